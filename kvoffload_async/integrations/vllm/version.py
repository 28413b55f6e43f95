"""The contract with vLLM: its tested releases, and the classes and names used."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvoffload_async.integrations.host_contract import HostContract

_OFFLOAD: Final = "vllm.v1.kv_offload"
_CONNECTOR: Final = "vllm.distributed.kv_transfer.kv_connector.v1"
_SCHEDULER: Final = f"{_CONNECTOR}.offloading.scheduler"

CONTRACT: Final = HostContract(
    module="vllm",
    title="vLLM",
    remedy="install kvoffload-async[vllm], or a build of vLLM for your platform",
    first=(0, 32),
    beyond=(0, 34),
    derived={
        f"{_OFFLOAD}.base:OffloadingManager": (),
        f"{_OFFLOAD}.base:OffloadingSpec": (),
        f"{_OFFLOAD}.base:OffloadingWorker": (),
        f"{_OFFLOAD}.tiering.base:SecondaryTierManager": (),
        f"{_CONNECTOR}.offloading_connector:OffloadingConnector": (
            "bind_gpu_block_pool",
            "build_connector_meta",
            "get_transfer_results",
            "on_new_request",
            "register_kv_caches",
            "start_load_kv",
        ),
    },
    used={
        "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory": (
            "register_connector",
        )
    }
    | dict.fromkeys(
        (
            f"{_OFFLOAD}.base:CanonicalKVCaches",
            f"{_OFFLOAD}.base:GPULoadStoreSpec",
            f"{_OFFLOAD}.base:OffloadingEvent",
            f"{_OFFLOAD}.base:PrepareStoreOutput",
            f"{_OFFLOAD}.base:ReqContext",
            f"{_OFFLOAD}.base:ScheduleEndContext",
            f"{_OFFLOAD}.base:TransferResult",
            f"{_OFFLOAD}.config:OffloadingConfig",
            f"{_OFFLOAD}.file_mapper:FileMapper",
            f"{_OFFLOAD}.tiering.base:JobResult",
            f"{_OFFLOAD}.tiering.base:TransferJob",
            f"{_CONNECTOR}.base:KVConnectorTransferResults",
        ),
        (),
    ),
    recording=Path(__file__).with_name("contract.json"),
    private={
        f"{_SCHEDULER}:OffloadingConnectorScheduler": (
            "_events_tracker",
            "_maximal_prefix_lookup",
            "_req_status",
            "_sliding_window_lookup",
            "config",
        ),
        f"{_SCHEDULER}:RequestGroupState": ("next_stored_chunk_idx", "offload_keys"),
        f"{_SCHEDULER}:RequestOffloadState": (
            "group_states",
            "max_load_tokens",
            "req_context",
            "update_offload_keys",
        ),
        f"{_SCHEDULER}:SchedulerOffloadConfig": ("kv_group_configs", "tokens_per_hash"),
        f"{_SCHEDULER}:GroupOffloadConfig": (
            "group_idx",
            "load_window_size_in_chunks",
            "sliding_window_size_in_chunks",
            "tokens_per_chunk",
        ),
        "vllm.v1.request:Request": (
            "block_hashes",
            "cache_salt",
            "num_tokens",
            "skip_reading_prefix_cache",
        ),
        f"{_CONNECTOR}.offloading.events:OffloadingEventsTracker": ("self_describing_enabled",),
        "vllm.v1.core.block_pool:BlockPool": ("get_cached_block",),
        "vllm.v1.core.sched.output:SchedulerOutput": ("finished_req_ids",),
    },
)
