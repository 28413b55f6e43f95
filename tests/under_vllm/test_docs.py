"""The configurations that the documentation gives to vLLM are ones that vLLM and we accept."""

import json
import re
from dataclasses import replace

import doc_blocks
import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_offload.base import OffloadingCounterMetadata
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from vllm_world import make_config, own_id

from kvoffload_async.integrations.vllm import HostTieringOffloadingSpec, KVOffloadSpec
from kvoffload_async.integrations.vllm.engine_metrics import definitions

SMALL = {"cpu_bytes_to_use": "64KiB"}
CONFIGURATIONS = [
    pytest.param(json.loads(block.text), id=f"line-{block.line}")
    for block in doc_blocks.blocks_of(doc_blocks.ROOT / "docs/howto/vllm.md")
    if block.language == "json"
]


@pytest.mark.parametrize("given", CONFIGURATIONS)
def test_a_configuration_of_the_documentation_works(given, serving, tmp_path):
    config = KVTransferConfig(**given)
    extra = config.kv_connector_extra_config
    assert KVConnectorFactory.get_connector_class(config).__name__ == given["kv_connector"]
    if given["kv_connector"] == "MultiConnector":
        (inner,) = extra["connectors"]
        config = KVTransferConfig(**inner)
        extra = config.kv_connector_extra_config
        assert KVConnectorFactory.get_connector_class(config).__name__ == inner["kv_connector"]
    spec = OffloadingSpecFactory.get_spec_cls(extra)
    (tier,) = extra["secondary_tiers"]
    tier = {**tier, "root_dir": str(tmp_path), "fingerprint": "made up"}
    if spec is KVOffloadSpec:
        if tier["type"] == "slab":
            tier["capacity_bytes"] = "1MiB"
        if "vllm." in tier.get("module_path", ""):
            del tier["fingerprint"]
        world = make_config([], own_id("kvoffload-test-docs"))
        spec(replace(world, extra_config={**extra, **SMALL, "secondary_tiers": [tier]}))
    else:
        assert spec in (TieringOffloadingSpec, HostTieringOffloadingSpec)
        assert serving(tier).tier.tier_type == tier["type"]


def test_the_documentation_has_every_way_into_vllm():
    assert len(CONFIGURATIONS) == 5


@pytest.mark.parametrize("name", ["vllm-alerts.yml", "vllm-dashboard.json"])
def test_rules_and_dashboard_name_metrics_of_the_engine(name):
    text = (doc_blocks.ROOT / "docs/metrics" / name).read_text(encoding="utf-8")
    series = {
        f"{metric}_total" if isinstance(found, OffloadingCounterMetadata) else metric
        for metric, found in definitions().items()
    }
    named = set(re.findall(r"vllm:kv_?offload_\w+", text))
    assert named
    assert named <= series
