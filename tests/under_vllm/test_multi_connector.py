"""`KVOffloadConnector` inside vLLM's `MultiConnector`, alone and beside another connector."""

import logging

import pytest
import torch
from tiny_model import HEAD_DIM, KV_HEADS, save_tiny_model
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm_world import MODULE, own_id, shared_files

from kvoffload_async.errors import ConfigError

OTHER = {
    "kv_connector": "ExampleConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"shared_storage_path": "/nowhere"},
}
VLLMS = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 1 << 20,
    },
}


def ours(**beside):
    extra = {"spec_name": "KVOffloadSpec", "spec_module_path": MODULE, "cpu_bytes_to_use": "1MiB"}
    return {
        "kv_connector": "KVOffloadConnector",
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
        **beside,
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def connector(model):
    """Return what makes the scheduler's connector, as vLLM does; it is shut down at the end."""
    made = []

    def make(*connectors, **beside):
        transfer = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"connectors": list(connectors)},
            engine_id=own_id("kvoffload-test-multi"),
            **beside,
        )
        config = EngineArgs(
            model=model,
            block_size=32,
            disable_hybrid_kv_cache_manager=True,  # ExampleConnector needs that
            dtype="float32",
            kv_transfer_config=transfer,
            max_model_len=256,
            skip_tokenizer_init=True,
        ).create_engine_config()
        config.cache_config.kv_cache_layout = "LBHNC"  # as the engine's core decides it
        spec = FullAttentionSpec(
            block_size=32, num_kv_heads=KV_HEADS, head_size=HEAD_DIM, dtype=torch.float32
        )
        (cache,) = get_kv_cache_configs(config, [{"layer": spec}], [1 << 24])
        made.append(KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache))
        return made[-1]

    yield make
    for one in made:
        one.shutdown()
    assert shared_files() == []


RECOMPUTE = {"kv_load_failure_policy": "recompute"}


@pytest.mark.parametrize(
    ("connectors", "beside", "remedies"),
    [
        ([ours()], RECOMPUTE, []),
        ([ours(), OTHER], RECOMPUTE, []),
        ([ours(**RECOMPUTE)], {}, ['"recompute" next to "kv_connector": "MultiConnector"']),
        ([ours()], {}, ['"recompute" next to "kv_connector": "MultiConnector"']),
    ],
)
def test_the_failure_policy_that_counts_is_that_beside_multi_connector(
    connector, caplog, connectors, beside, remedies
):
    connector(*connectors, **beside)
    warnings = [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and record.name.startswith("kvoffload_async")
    ]
    assert len(warnings) == len(remedies)
    assert all(remedy in text for remedy, text in zip(remedies, warnings, strict=True))


@pytest.mark.parametrize("second", [ours(), VLLMS])
def test_a_second_connector_that_offloads_is_refused_and_without_it_the_engine_starts(
    connector, second
):
    names = f"KVOffloadConnector and {second['kv_connector']}"
    with pytest.raises(ConfigError, match=f"connectors: {names} cannot be .*; keep one of them"):
        connector(ours(), second, **RECOMPUTE)
    assert shared_files() == []
    connector(ours(), **RECOMPUTE)


def test_vllm_accepts_no_engine_id_of_a_connector_within_multi_connector(connector):
    with pytest.raises(TypeError, match="engine_id"):
        connector(ours(engine_id="own"), **RECOMPUTE)


def test_statistics_that_come_from_another_process_find_the_connectors_class(connector):
    connector(ours(), **RECOMPUTE)
    found = MultiConnector.build_kv_connector_stats({"KVOffloadConnector": {}})
    assert set(found.data) == {"KVOffloadConnector"}
