"""A real vLLM engine on the CPU, with a tiny model: the tokens are those of no offloading at all.

Every run is a process of its own, so that a restart is one.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from engine_run import BLOCK_TOKENS
from tiny_model import save_tiny_model
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm_world import MODULE, is_shared_file_of, make_config, shared_files_of

from kvoffload_async.facade.tier_factory import SecondaryTierFactory
from kvoffload_async.integrations.vllm import KVOffloadSpec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
DEADLINE_S = 800.0
ENGINE_ID = f"kvoffload-engine-test-{os.getpid()}"
FULL_BLOCKS = 500 // BLOCK_TOKENS * BLOCK_TOKENS
"""Tokens of the prompt that can be cached."""
BLOCK_BYTES = 2 * 2 * 2 * 32 * 4 * BLOCK_TOKENS
"""A block of the tiny model: layers, K and V, heads, their size, bytes a number, tokens."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


def connector(
    spec="KVOffloadSpec", module=MODULE, *, tiers=(), name="OffloadingConnector", **extra
):
    options = {"cpu_bytes_to_use": 64 * BLOCK_BYTES, "secondary_tiers": list(tiers), **extra}
    if spec != "HostTieringOffloadingSpec":
        options["check_invariants"] = True
    given = {
        "engine_id": ENGINE_ID,
        "kv_connector": name,
        "kv_load_failure_policy": "recompute",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": spec, "spec_module_path": module, **options},
    }
    if name != "OffloadingConnector":
        given["kv_connector_module_path"] = MODULE
    return given


def command(**run):
    return [sys.executable, str(HERE / "engine_run.py"), json.dumps(run)]


def environment():
    """Return this process's environment, for one that finds the same modules."""
    path = os.pathsep.join([*os.environ.get("PYTHONPATH", "").split(os.pathsep), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path.lstrip(os.pathsep)}


def run(*, under=(), **settings):
    """Run an engine to its end, under a command that starts it; return what it found."""
    done = subprocess.run(
        [*under, *command(**settings)],
        capture_output=True,
        check=False,
        cwd=HERE,
        env=environment(),
        text=True,
        timeout=DEADLINE_S,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"tokens"')]
    assert lines, (done.stdout + done.stderr)[-6000:]
    assert shared_files_of(ENGINE_ID) == []
    return json.loads(lines[-1])


def test_the_files_that_this_module_looks_for_are_those_of_the_engine():
    spec = KVOffloadSpec(make_config([], ENGINE_ID))
    buffer = spec.map_primary(0)
    assert len(shared_files_of(ENGINE_ID)) == 1
    assert shared_files_of(ENGINE_ID + "0") == []
    assert buffer.release()
    assert shared_files_of(ENGINE_ID) == []


@pytest.fixture(scope="module")
def expected(model):
    """The tokens without offloading."""
    return run(model=model, steps=["generate"])["tokens"][0]


def fs(folder):
    return {"type": "fs", "root_dir": str(folder)}


def slab(folder):
    return {"type": "slab", "root_dir": str(folder), "capacity_bytes": "16MiB"}


JOURNEY = ["generate", "reset device", "generate", "reset primary", "generate"]


@pytest.mark.parametrize("tier", [fs, slab])
def test_a_tiers_blocks_give_the_same_tokens_after_resets_and_after_a_restart(
    model, expected, tier, tmp_path
):
    tiers = [tier(tmp_path)]
    if tiers[0]["type"] not in SecondaryTierFactory.names():
        pytest.skip(f"there is no tier {tiers[0]['type']!r}")
    warm = run(model=model, connector=connector(tiers=tiers), steps=JOURNEY)
    assert warm["tokens"] == [expected] * 3
    assert warm["hits"] == [0, FULL_BLOCKS, FULL_BLOCKS]
    assert warm["counters"]["vllm:kvoffload_async_loaded_blocks"] == FULL_BLOCKS // BLOCK_TOKENS
    assert warm["counters"]["vllm:kvoffload_async_stored_blocks"] == FULL_BLOCKS // BLOCK_TOKENS
    again = run(model=model, connector=connector(tiers=tiers), steps=["generate"])
    assert again["tokens"] == [expected]
    assert again["hits"] == [FULL_BLOCKS]
    assert again["counters"]["vllm:kv_offload_load_bytes"] == 15 * BLOCK_BYTES


def test_the_example_tiers_blocks_give_the_same_tokens_after_resets(model, expected):
    tiers = [{"type": "example"}]
    found = run(model=model, connector=connector(tiers=tiers), steps=JOURNEY)
    assert found["tokens"] == [expected] * 3
    assert found["hits"] == [0, FULL_BLOCKS, FULL_BLOCKS]


def test_a_primary_alone_gives_the_same_tokens(model, expected):
    found = run(model=model, connector=connector(), steps=JOURNEY)
    assert found["tokens"] == [expected] * 3
    assert found["hits"] == [0, FULL_BLOCKS, 0]


def test_chunks_of_several_blocks_give_the_same_tokens(model, expected, tmp_path):
    settings = connector(tiers=[fs(tmp_path)], blocks_per_chunk=4)
    found = run(model=model, connector=settings, steps=JOURNEY)
    assert found["tokens"] == [expected] * 3
    assert found["hits"] == [0, 384, 384]


def test_our_tier_under_vllms_spec_and_our_spec_serve_each_others_directory(
    model, expected, tmp_path
):
    tier = {**fs(tmp_path), "type": "FsTier", "module_path": MODULE}
    vllms = connector("HostTieringOffloadingSpec", tiers=[tier])
    warm = run(model=model, connector=vllms, steps=JOURNEY)
    assert warm["tokens"] == [expected] * 3
    assert warm["hits"] == [0, FULL_BLOCKS, FULL_BLOCKS]
    ours = connector(tiers=[fs(tmp_path)])
    for settings in (vllms, ours):
        again = run(model=model, connector=settings, steps=["generate"])
        assert again["tokens"] == [expected]
        assert again["hits"] == [FULL_BLOCKS]


@pytest.mark.skipif("sync" not in TransferJob.__dataclass_fields__, reason="0.33 and later")
def test_loads_that_a_step_waits_for_give_the_same_tokens(model, expected, tmp_path):
    settings = connector(tiers=[fs(tmp_path)], sync_load_budget_bytes=1 << 30)
    found = run(model=model, connector=settings, steps=JOURNEY)
    assert found["tokens"] == [expected] * 3
    assert found["hits"] == [0, FULL_BLOCKS, FULL_BLOCKS]


@pytest.mark.parametrize("spec", ["ZeroingSpec", "ZeroingOneSpec"])
def test_the_tokens_tell_when_loaded_bytes_are_wrong(model, expected, spec):
    found = run(
        model=model,
        connector=connector(spec, "engine_faults"),
        steps=["generate", "reset device", "generate"],
    )
    assert found["tokens"][0] == expected
    assert found["hits"] == [0, FULL_BLOCKS]
    assert found["tokens"][1] != expected


@pytest.mark.parametrize("is_alone", [True, False])
def test_multi_connector_serves_the_same_tokens_alone_and_beside_another(
    model, expected, is_alone, tmp_path
):
    ours = connector(tiers=[fs(tmp_path / "ours")], name="KVOffloadConnector")
    del ours["engine_id"]  # vLLM takes that of MultiConnector
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "other")},
    }
    settings = connector() | {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [ours] if is_alone else [ours, other]},
    }
    llm = {"disable_hybrid_kv_cache_manager": True}  # ExampleConnector needs that
    found = run(model=model, processes=True, connector=settings, llm=llm, steps=JOURNEY)
    assert found["tokens"] == [expected] * 3
    assert found["hits"] == [0, FULL_BLOCKS, FULL_BLOCKS]


def test_pipeline_ranks_of_unequal_layers_start(tmp_path):
    model = str(save_tiny_model(tmp_path / "model", layers=3))
    found = run(
        model=model,
        ranks=2,
        connector=connector(tiers=[fs(tmp_path)], name="KVOffloadConnector"),
        llm={"tensor_parallel_size": 1, "pipeline_parallel_size": 2},
        steps=[],  # vLLM's model runner for CPUs cannot run a stage of a pipeline
    )
    assert not [name for name in found["shared_files"] if is_shared_file_of(ENGINE_ID, name)]


def test_a_load_that_fails_is_computed_instead(model, expected):
    found = run(
        model=model,
        connector=connector("FailingLoadSpec", "engine_faults", name="KVOffloadConnector"),
        steps=["generate", "reset device", "generate", "reset device", "generate"],
    )
    assert found["tokens"] == [expected] * 3
    assert found["hits"][2] == FULL_BLOCKS


def test_a_load_that_fails_under_vllms_connector_ends_the_engine_and_serves_nothing(model):
    with pytest.raises(AssertionError, match="KVOffloadConnector"):
        run(
            model=model,
            connector=connector("FailingLoadSpec", "engine_faults"),
            steps=["generate", "reset device", "generate"],
        )


def test_blocks_whose_store_has_failed_are_no_hits(model, expected):
    found = run(
        model=model,
        connector=connector("FailingStoreSpec", "engine_faults"),
        steps=["generate", "reset device", "generate", "reset device", "generate"],
    )
    assert found["tokens"] == [expected] * 3
    assert found["hits"] == [0, 0, FULL_BLOCKS]
    failed = found["counters"]["vllm:kvoffload_async_failed_stores"]
    assert failed == FULL_BLOCKS // BLOCK_TOKENS


def test_eight_requests_at_once_share_a_primary_that_is_too_small_for_them(model, tmp_path):
    crowd = {"model": model, "requests": 8, "prompt_tokens": 300}
    expected = run(**crowd, steps=["generate"])["tokens"][0]
    found = run(**crowd, connector=connector(tiers=[fs(tmp_path)]), steps=[*JOURNEY, *JOURNEY[1:]])
    assert found["tokens"] == [expected] * 5
    assert found["hits"][0] == 0
    assert all(hits > 0 for hits in found["hits"][1:])


def test_two_ranks_in_processes_of_their_own(model, tmp_path):
    settings = connector(tiers=[fs(tmp_path)])
    found = run(model=model, processes=True, ranks=2, connector=settings, steps=JOURNEY)
    assert found["tokens"] == [found["tokens"][0]] * 3
    assert found["hits"] == [0, FULL_BLOCKS, FULL_BLOCKS]


@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
def test_events_of_a_run_with_evictions_replay_to_the_contents(model, tmp_path, blocks_per_chunk):
    tier = {**slab(tmp_path), "capacity_bytes": "4MiB", "enable_kv_events": True}
    settings = connector(
        tiers=[{**tier, "segment_bytes": "1MiB"}],
        blocks_per_chunk=blocks_per_chunk,
        cpu_bytes_to_use=48 * BLOCK_BYTES,
        self_describing_kv_events=True,
    )
    crowd = {"model": model, "requests": 20, "prompt_tokens": 300, "events": True}
    steps = ["generate", "reset device", "generate"]
    found = run(**crowd, connector=settings, steps=steps)["events"]
    assert found["told"] == found["there"]
    assert found["removed"] == {"CPU None": True, "STORAGE slab": True}
    assert found["tracked"] == found["blocks"]


def test_events_of_tenants_that_evict_have_vllms_own_hashes(model, tmp_path):
    tier = {**slab(tmp_path), "capacity_bytes": "4MiB", "enable_kv_events": True}
    settings = connector(
        tiers=[{**tier, "segment_bytes": "1MiB"}],
        name="KVOffloadConnector",
        cpu_bytes_to_use=48 * BLOCK_BYTES,
        self_describing_kv_events=True,
        tenants={"a": {}},
        tenant_field="cache_salt",
        unknown_tenant="no_store",
    )
    crowd = {"model": model, "requests": 10, "prompt_tokens": 300, "events": True}
    steps = ["generate", "reset device", "generate"]
    found = run(**crowd, salts=["a", "b"], connector=settings, steps=steps)
    events = found["events"]
    assert events["told"] == events["there"]
    assert events["there"]["CPU None"]
    assert events["removed"]["CPU None"]
    assert events["tracked"] == events["blocks"]


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_leaves_no_file_in_shared_memory(model, tmp_path, ending):
    settings = connector(tiers=[fs(tmp_path)])
    with subprocess.Popen(
        command(model=model, connector=settings, processes=True, steps=["generate", "wait"]),
        cwd=HERE,
        env=environment(),
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        told = []
        for line in process.stdout:
            told.append(line)
            if line.strip() == "waiting":
                break
        assert told[-1:] == ["waiting\n"], "".join(told)[-6000:]
        assert shared_files_of(ENGINE_ID) == []
        os.killpg(process.pid, ending)
        process.stdin.close()
        process.stdout.read()  # until the last process of the engine is gone
        process.wait(DEADLINE_S)
    assert shared_files_of(ENGINE_ID) == []
