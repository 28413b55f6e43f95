"""A multi-tier KV-cache offload engine for LLM serving: asyncio inside, a synchronous API outside.

This module exports the public names. Importing it loads no torch and starts no thread.
"""

from kvoffload_async.abc.policy import CachePolicy
from kvoffload_async.abc.tier import AsyncTier, Direction, TierCapabilities, TierEnvironment
from kvoffload_async.async_engine.request import EngineRequest
from kvoffload_async.async_engine.surface import OffloadEngine
from kvoffload_async.async_engine.transfers import EngineBounds
from kvoffload_async.config import OffloadConfig
from kvoffload_async.errors import (
    BlockMissingError,
    BusyError,
    ClosedError,
    ConfigError,
    CorruptBlockError,
    InvalidatedError,
    OffloadError,
    StateError,
    TierError,
    TransportError,
)
from kvoffload_async.facade.connector.protocol import (
    ConnectorGeometry,
    KVGroup,
    OffloadingConnectorMetadata,
    SchedulerRequest,
    StepOutput,
)
from kvoffload_async.facade.connector.scheduler import OffloadingConnectorScheduler
from kvoffload_async.facade.connector.worker import OffloadingConnectorWorker
from kvoffload_async.facade.manager import OffloadingManager
from kvoffload_async.facade.primary import CPUPrimaryTierOffloadingManager
from kvoffload_async.facade.secondary import (
    ExampleSecondaryTierManager,
    FileSystemTierManager,
    SecondaryTierManager,
    SlabTierManager,
)
from kvoffload_async.facade.spec import CPUOffloadingSpec, TieringOffloadingSpec
from kvoffload_async.facade.tier_factory import SecondaryTierFactory
from kvoffload_async.facade.tiering import TieringOffloadingManager
from kvoffload_async.fingerprint import fingerprint_files
from kvoffload_async.statistics import EngineStatistics, OffloadingStatistics
from kvoffload_async.types import (
    BlockIDsLoadStoreSpec,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    Hints,
    JobMetadata,
    JobResult,
    LoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    Priority,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    TransferJob,
    TransferResult,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)

__version__ = "0.1.0"

__all__ = [
    "AsyncTier",
    "BlockIDsLoadStoreSpec",
    "BlockMissingError",
    "BusyError",
    "CPULoadStoreSpec",
    "CPUOffloadingSpec",
    "CPUPrimaryTierOffloadingManager",
    "CachePolicy",
    "ClosedError",
    "ConfigError",
    "ConnectorGeometry",
    "CorruptBlockError",
    "Direction",
    "EngineBounds",
    "EngineRequest",
    "EngineStatistics",
    "ExampleSecondaryTierManager",
    "FileSystemTierManager",
    "GPULoadStoreSpec",
    "Hints",
    "InvalidatedError",
    "JobMetadata",
    "JobResult",
    "KVGroup",
    "LoadStoreSpec",
    "LookupResult",
    "Medium",
    "OffloadConfig",
    "OffloadEngine",
    "OffloadError",
    "OffloadKey",
    "OffloadPolicy",
    "OffloadingConnectorMetadata",
    "OffloadingConnectorScheduler",
    "OffloadingConnectorWorker",
    "OffloadingEvent",
    "OffloadingManager",
    "OffloadingStatistics",
    "PrepareStoreOutput",
    "Priority",
    "ReqContext",
    "RequestOffloadingContext",
    "ScheduleEndContext",
    "SchedulerRequest",
    "SecondaryTierFactory",
    "SecondaryTierManager",
    "SlabTierManager",
    "StateError",
    "StepOutput",
    "TierCapabilities",
    "TierEnvironment",
    "TierError",
    "TieringOffloadingManager",
    "TieringOffloadingSpec",
    "TransferJob",
    "TransferResult",
    "TransportError",
    "fingerprint_files",
    "get_offload_block_hash",
    "get_offload_group_idx",
    "make_offload_key",
]
