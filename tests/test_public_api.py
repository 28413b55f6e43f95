"""What can be imported from the top, and what importing it leaves alone."""

import inspect
import json
import subprocess
import sys

import pytest

import kvoffload_async
import kvoffload_async.testing

REQUIRED = [
    "CPUOffloadingSpec",
    "CPUPrimaryTierOffloadingManager",
    "ExampleSecondaryTierManager",
    "JobMetadata",
    "JobResult",
    "OffloadingManager",
    "SecondaryTierFactory",
    "SecondaryTierManager",
    "TieringOffloadingManager",
    "TieringOffloadingSpec",
]
TIER_METHODS = {
    "lookup": ["key", "req_context"],
    "submit_store": ["job_metadata"],
    "submit_load": ["job_metadata"],
    "get_finished_jobs": [],
    "on_schedule_end": ["context"],
    "touch": ["keys", "req_context"],
    "on_new_request": ["req_context"],
    "on_request_finished": ["req_context"],
    "take_events": [],
    "has_pending_work": [],
    "drain_jobs": ["timeout"],
    "shutdown": ["timeout"],
}
FACTORY_METHODS = {
    "register_tier": ["name", "import_path", "class_name"],
    "create_secondary_tier": ["tier_config", "primary_kv_view", "offloading_spec"],
    "validate": [],
}


@pytest.mark.parametrize("module", [kvoffload_async, kvoffload_async.testing])
def test_every_public_name_exists_and_is_listed_once_in_order(module):
    assert all(hasattr(module, name) for name in module.__all__)
    assert len(set(module.__all__)) == len(module.__all__)
    assert sorted(module.__all__) == list(module.__all__)


@pytest.mark.parametrize("name", REQUIRED)
def test_a_name_of_the_requirement_documents_is_at_the_top(name):
    assert name in kvoffload_async.__all__


@pytest.mark.parametrize(
    ("owner", "methods"),
    [
        (kvoffload_async.SecondaryTierManager, TIER_METHODS),
        (kvoffload_async.SecondaryTierFactory, FACTORY_METHODS),
    ],
)
def test_the_methods_of_the_requirement_documents_have_their_parameters(owner, methods):
    for name, expected in methods.items():
        parameters = list(inspect.signature(getattr(owner, name)).parameters)
        assert [p for p in parameters if p != "self"] == expected, name


def test_on_schedule_end_needs_no_context_and_drain_has_a_deadline():
    manager = kvoffload_async.SecondaryTierManager
    assert inspect.signature(manager.on_schedule_end).parameters["context"].default is None
    assert inspect.signature(manager.drain_jobs).parameters["timeout"].default > 0


def test_every_manager_method_is_there_in_both_managers():
    abstract = kvoffload_async.OffloadingManager.__abstractmethods__
    assert "take_events" in abstract
    for manager in (
        kvoffload_async.TieringOffloadingManager,
        kvoffload_async.CPUPrimaryTierOffloadingManager,
    ):
        assert not manager.__abstractmethods__


@pytest.mark.parametrize("module", ["kvoffload_async", "kvoffload_async.testing"])
def test_importing_it_imports_neither_torch_nor_any_extra(module):
    code = (
        f"import json, sys, threading, {module}; "
        "print(json.dumps([sorted(sys.modules), threading.active_count()]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=True
    )
    loaded, threads = json.loads(done.stdout)
    unwanted = {"torch", "typer", "rich", "uvloop", "vllm", "hypothesis", "pytest", "aiofiles"}
    assert not unwanted & set(loaded)
    assert threads == 1, "no thread is started by an import"


@pytest.mark.slow
def test_only_the_native_engine_needs_the_native_module():
    code = """
import importlib, pkgutil, sys
sys.modules["kvoffload_async.block_io._native"] = None
import kvoffload_async
for found in pkgutil.walk_packages(kvoffload_async.__path__, "kvoffload_async."):
    try:
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
    except ImportError as error:
        if "_native " in str(error):
            print(found.name.removeprefix("kvoffload_async."))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=True
    )
    needing = {f"block_io.{name}" for name in ("_native", "engine", "native_copies", "native_io")}
    assert set(done.stdout.split()) == needing
