"""Keys and names in a configuration for vLLM, for its integration and for `check-config`."""

from __future__ import annotations

from typing import Final

VLLMS_OWN: Final = frozenset(
    {
        "block_size",
        "blocks_per_chunk",
        "canonical_layout",
        "offload_prompt_only",
        "self_describing_kv_events",
        "spec_module_path",
        "spec_name",
        "sync_load_budget_bytes",
    }
)
"""Keys of `kv_connector_extra_config` that vLLM reads."""

OFFLOADING_CONNECTORS: Final = ("OffloadingConnector", "KVOffloadConnector")
"""Values of `kv_connector`: vLLM's connector that takes a spec, and this package's."""

DECIDED_OF_TIERS: Final = ("model", "rank", "run_config")
"""Keys of a tier that vLLM's configuration determines."""

NAMES_UNDER_VLLM: Final = {
    "FsTier": "fs",
    "MooncakeTier": "mooncake",
    "ObjectTier": "object",
    "SlabTier": "slab",
    "ValkeyTier": "valkey",
}
"""Name of each tier under vLLM's own spec -> its name under `KVOffloadSpec`."""
