"""`check-config` and vLLM, whose own classes read the same configurations, agree."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import host_configs
import pytest
import torch
from tiny_model import HEAD_DIM, KV_HEADS, save_tiny_model
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm_world import make_config, own_id

from kvoffload_async.integrations.vllm import KVOffloadSpec

NEEDS_PLATFORM = {"two sizes of a chunk", "size of a chunk", "no chunk", "multi, two"}
"""What vLLM refuses when it creates a connector, for which it needs a platform."""


@pytest.fixture(scope="module")
def create(tmp_path_factory):
    """Return what creates a worker's connector, as vLLM does, and returns its specs."""
    model = str(save_tiny_model(tmp_path_factory.mktemp("model")))
    vllm_config = EngineArgs(
        model=model, block_size=32, dtype="float32", max_model_len=256, skip_tokenizer_init=True
    ).create_engine_config()
    vllm_config.cache_config.kv_cache_layout = "LBHNC"  # as the engine's core decides it
    layer = FullAttentionSpec(
        block_size=32, num_kv_heads=KV_HEADS, head_size=HEAD_DIM, dtype=torch.float32
    )
    (cache,) = kv_cache_utils.get_kv_cache_configs(vllm_config, [{"layer": layer}], [1 << 24])

    def create(transfer):
        config = copy.copy(vllm_config)
        config.kv_transfer_config = transfer
        connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)
        connectors = getattr(connector, "sub_connectors", [connector])
        return [one.connector_worker.spec for one in connectors]

    return create


def create_specs(transfer):
    """Find the connectors' classes and create their specs, as vLLM does; needs no platform."""
    transfers = [transfer]
    if KVConnectorFactory.get_connector_class(transfer) is MultiConnector:
        config = SimpleNamespace(kv_transfer_config=transfer)
        found = MultiConnector._get_connector_classes_and_configs(config)
        transfers = [one.kv_transfer_config for _, one in found]
    extras = [one.kv_connector_extra_config for one in transfers]
    world = make_config([], own_id("kvoffload-test-check"))
    return [OffloadingSpecFactory.create_spec(replace(world, extra_config=e)) for e in extras]


def start(create, given):
    for spec in create(KVTransferConfig(**given)):
        if not isinstance(spec, KVOffloadSpec):  # ours has checked everything
            spec.get_manager().shutdown()


@pytest.mark.parametrize("case", host_configs.OF_VLLM, ids=lambda case: case.name)
def test_check_config_and_vllm_agree(request, tmp_path, monkeypatch, case):
    # As in a process that has not imported the connector yet.
    monkeypatch.delitem(KVConnectorFactory._registry, "KVOffloadConnector", raising=False)
    if current_platform.is_cpu():
        how = request.getfixturevalue("create")
    elif case.name in NEEDS_PLATFORM:
        pytest.skip("needs a platform")
    else:
        how = create_specs
    given = host_configs.placed(case.config, tmp_path)
    assert host_configs.is_refused(start, how, given) is not case.is_accepted_by_host
    assert host_configs.is_accepted(given) is (case.why is None)
