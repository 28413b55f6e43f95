"""Our tier has every method of the installed vLLM's interface, called as vLLM calls it."""

import inspect
import re
from pathlib import Path

import pytest
import vllm
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.tiering import manager as vllms_manager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
from vllm_world import MODULE

from kvoffload_async import integrations
from kvoffload_async.integrations.vllm import FsTier, SlabTier
from kvoffload_async.integrations.vllm.tiers import VllmTier
from kvoffload_async.integrations.vllm.version import CONTRACT

TIERS = [FsTier, SlabTier]
METHODS = sorted(
    name
    for name, member in vars(SecondaryTierManager).items()
    if inspect.isfunction(member) or isinstance(member, classmethod)
)
INHERITED = {"__init_subclass__", "serve_external_requests"}


def parameters_of(owner, name):
    return [
        (parameter.name, parameter.kind)
        for parameter in inspect.signature(getattr(owner, name)).parameters.values()
    ]


@pytest.mark.parametrize("tier", TIERS)
def test_no_method_is_left_abstract(tier):
    assert issubclass(tier, SecondaryTierManager)
    assert tier.__abstractmethods__ == frozenset()


@pytest.mark.parametrize("name", sorted(set(METHODS) - INHERITED - {"__init__"}))
def test_a_method_takes_vllms_parameters(name):
    assert getattr(VllmTier, name) is not getattr(SecondaryTierManager, name), "not ours"
    assert parameters_of(VllmTier, name) == parameters_of(SecondaryTierManager, name)


def test_the_constructor_begins_as_vllms_and_takes_the_options_of_vllms_fs_tier():
    ours = list(inspect.signature(FsTier).parameters)
    vllms = list(inspect.signature(SecondaryTierManager).parameters)
    assert ours[: len(vllms)] == vllms
    options = set(inspect.signature(FileSystemTierManager).parameters) - set(vllms)
    assert options == {"root_dir", "n_read_threads", "n_write_threads", "enable_kv_events"} | {
        "locality"
    }


def test_vllms_manager_calls_no_method_of_a_tier_that_is_not_covered():
    source = inspect.getsource(vllms_manager)
    called = set(re.findall(r"\btier\.([a-z_]+)\(", source))
    assert called <= set(METHODS), called - set(METHODS)
    assert {"lookup", "submit_store", "submit_load", "drain_jobs"} <= called


def test_a_tier_is_found_by_its_json():
    found = SecondaryTierFactory.get_tier_class({"type": "FsTier", "module_path": MODULE})
    assert found is FsTier
    assert found.medium is base.Medium.STORAGE


@pytest.mark.parametrize(
    ("record", "fields"),
    [
        (TransferJob, "job_id keys chunk_ids is_promotion req_context submit_time"),
        (JobResult, "job_id success successful_keys transfer_time transfer_bytes"),
    ],
)
def test_the_records_have_the_fields_that_are_converted(record, fields):
    assert set(record.__dataclass_fields__) == set(fields.split())


def test_every_member_of_vllms_enums_has_one_of_ours():
    from kvoffload_async import types

    for name in ("LookupResult", "Medium", "Locality"):
        ours = {member.name for member in getattr(types, name)}
        assert {member.name for member in getattr(base, name)} == ours
    assert {member.name for member in base.OffloadPolicy} == {"CHUNK_LEVEL", "REQUEST_LEVEL"}


def test_the_installed_version_is_supported():
    CONTRACT.check(vllm.__version__, "this test")


def test_vllm_is_named_in_the_integration_alone():
    package = Path(integrations.__file__).parent.parent
    naming = [
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if re.search(r"^\s*(from|import) vllm\b", path.read_text(), re.MULTILINE)
    ]
    assert naming
    assert all(name.startswith("integrations/vllm/") for name in naming)


def test_the_installed_version_has_the_private_names_that_are_used():
    assert CONTRACT.has_private_names("this test")


@pytest.mark.skipif(not vllm.__version__.startswith("0.33"), reason="recorded from 0.33")
def test_the_recorded_signatures_are_vllms():
    assert CONTRACT.read() == CONTRACT.recorded()
