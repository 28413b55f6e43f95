"""`KVOffloadSpec` as vLLM finds it and configures it."""

import inspect
import logging
from dataclasses import replace

import pytest
from engine_world import canonical, strided_pages
from vllm.config import KVTransferConfig
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm_world import MODULE, make_config, own_id, shared_files

from kvoffload_async.errors import ConfigError
from kvoffload_async.integrations.vllm import KVOffloadSpec
from kvoffload_async.integrations.vllm.manager import KVOffloadManager
from kvoffload_async.integrations.vllm.worker import KVOffloadWorker


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (KVOffloadManager, base.OffloadingManager),
        (KVOffloadWorker, base.OffloadingWorker),
        (KVOffloadSpec, base.OffloadingSpec),
    ],
)
def test_every_method_of_vllms_contract_is_there_with_its_parameters(ours, theirs):
    assert issubclass(ours, theirs)
    assert not ours.__abstractmethods__
    names = [
        name
        for name, member in vars(theirs).items()
        if inspect.isfunction(member) or isinstance(member, classmethod)
    ]
    for name in set(names) - {"__init__", "__init_subclass__"}:
        own, given = (
            list(inspect.signature(getattr(owner, name)).parameters) for owner in (ours, theirs)
        )
        assert getattr(ours, name) is not getattr(theirs, name), name
        assert own[: len(given)] == given, name


def test_vllm_finds_the_spec_by_its_json():
    found = OffloadingSpecFactory.get_spec_cls(
        {"spec_name": "KVOffloadSpec", "spec_module_path": MODULE}
    )
    assert found is KVOffloadSpec


def spec_with(tiers=(), **extra):
    config = make_config([], own_id("kvoffload-test-config"))
    given = {"cpu_bytes_to_use": "64KiB", "secondary_tiers": list(tiers), **extra}
    return KVOffloadSpec(replace(config, extra_config=given))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"cpu_bytes": 1}, r"unknown key 'cpu_bytes' \(did you mean 'cpu_bytes_to_use'\?\)"),
        ({"block_bytes": 1}, "unknown key 'block_bytes'"),
        ({"cpu_bytes_to_use": 100}, "cpu_bytes_to_use: 100 bytes hold no block"),
        ({"cpu_bytes_to_use": None}, "cpu_bytes_to_use"),
        ({"eviction_policy": "mru"}, "eviction_policy: 'mru' is unknown"),
        ({"secondary_tiers": {"type": "fs"}}, "secondary_tiers"),
        ({"secondary_tiers": [{"type": "fsx", "root_dir": "/x"}]}, "'fsx'.*did you mean 'fs'"),
        ({"secondary_tiers": [{"type": "fs"}]}, "root_dir"),
        ({"secondary_tiers": [{"type": "fs", "root_dir": "/x", "n": 1}]}, "unknown key 'n'"),
        (
            {"secondary_tiers": [{"type": "fs", "root_dir": "/x", "rank": 1}]},
            "rank: 1 is determined by vLLM",
        ),
        ({"secondary_tiers": [{"type": "fs", "root_dir": "x"}]}, "'x' is not an absolute path"),
        ({"secondary_tiers": [{"type": "fs", "root_dir": None}]}, r"\[0\]: root_dir: None"),
        ({"secondary_tiers": [{"type": "FsTier", "root_dir": "/x"}]}, r'\[0\]: .*use "fs" here'),
        ({"secondary_tiers": [{"type": "SlabTier", "module_path": MODULE}]}, 'use "slab" here'),
        (
            {"secondary_tiers": [{"type": "slab", "root_dir": "/x", "trust_vllm_directory": True}]},
            "trust_vllm_directory: vLLM has no tier of this kind",
        ),
        ({"prefault": False}, "unknown key 'prefault'"),
        ({"canonical_layout": "no"}, "canonical_layout: 'no' is not valid"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_before_anything_starts(extra, message):
    with pytest.raises(ConfigError, match=message):
        spec_with(**extra)
    assert shared_files() == []


def test_vllms_own_keys_are_allowed():
    spec_with(
        spec_name="KVOffloadSpec",
        spec_module_path=MODULE,
        offload_prompt_only=False,
        canonical_layout=False,
        self_describing_kv_events=False,
        blocks_per_chunk=1,
    )


def test_too_much_memory_is_refused_with_the_remedy(pair):
    with pytest.raises(ConfigError, match=r"cpu_bytes_to_use: \d+ bytes are more"):
        pair(slots=1 << 40)
    assert shared_files() == []


def test_tensors_that_are_no_pages_are_refused():
    spec = spec_with()
    tensors = [strided_pages().unsqueeze(2)]
    with pytest.raises(ConfigError, match="KV cache tensor 0 has shape"):
        spec.get_worker(canonical(tensors, ((0,),)))


def test_tensors_that_do_not_fit_what_vllm_announced_are_refused():
    spec = spec_with()
    with pytest.raises(ConfigError, match="vLLM announced 8192"):
        spec.get_worker(canonical([strided_pages() for _ in range(20)], (tuple(range(20)),)))
    assert shared_files() == []


# -- failed loads -------------------------------------------------------------------------------

CONNECTOR = {"kv_connector": "KVOffloadConnector", "kv_connector_module_path": MODULE}


@pytest.mark.parametrize(
    ("transfer", "remedy"),
    [
        (CONNECTOR, '"kv_load_failure_policy": "recompute" next to "kv_connector"'),
        (CONNECTOR | {"kv_load_failure_policy": "fail"}, '"kv_load_failure_policy": "recompute"'),
        (CONNECTOR | {"kv_load_failure_policy": "recompute"}, None),
        ({"kv_connector": "OffloadingConnector"}, '"kv_connector": "KVOffloadConnector"'),
    ],
)
def test_a_start_warns_once_if_a_failed_load_would_end_requests_or_the_engine(
    transfer, remedy, caplog
):
    class VllmConfig:
        kv_transfer_config = KVTransferConfig(
            kv_role="kv_both",
            kv_connector_extra_config={"cpu_bytes_to_use": "64KiB"},
            **transfer,
        )

    vllm_config = VllmConfig()  # noqa: F841 - as in the frame of vLLM's connector
    extra = VllmConfig.kv_transfer_config.kv_connector_extra_config
    spec = KVOffloadSpec(
        replace(make_config([], own_id("kvoffload-test-policy")), extra_config=extra)
    )
    manager = spec.get_manager()
    assert spec.get_manager() is manager
    manager.shutdown()
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [remedy in record.getMessage() for record in warnings] == [True] * (remedy is not None)
    assert shared_files() == []
