"""Immutable value types of the public interfaces.

Names follow vLLM's `kv_offload` package: a *block* is one offload unit, a *slot* is its row in the
primary tier's buffer.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, NewType, TypeVar

import numpy as np
import numpy.typing as npt

OffloadKey = NewType("OffloadKey", bytes)
"""Block hash followed by the KV-cache group's index (4 bytes, big-endian, unsigned).

The hash is the *chained* prefix hash, so equal keys mean equal contents for that group. A key is
bytes and not a tuple, so that the garbage collector does not track millions of them.
"""


class SlidingWindow(NamedTuple):
    """A group of layers that attend to a window: it loads the last blocks of a found prefix.

    Attributes:
        keys: The keys of its blocks of a prompt, first block first.
        num_blocks: Number of blocks that a window needs, at least 1.
    """

    keys: Sequence[OffloadKey]
    num_blocks: int


TENANT_TAG: Final = slice(1, 9)
"""Where a key has its tenant's tag, if there are tenants."""
ENGINE_REQ_ID: Final = "kvoffload_async:engine"
"""The `req_id` of the engine's own work: late cascades, and the `touch` calls of tiers.

Tiers see this request begin and end like any other, if it has any work.
"""

JobId = int
"""Number of a job: strictly increasing, never reused. Each manager has one counter for both
directions."""

BlockIds = npt.NDArray[np.int32]
"""Slots of the primary tier, shape `[num_blocks]`."""

_GROUP_BYTES = 4

S = TypeVar("S")


def make_offload_key(block_hash: bytes, group_idx: int = 0) -> OffloadKey:
    """Return the key of the block with this chained hash in KV-cache group `group_idx`.

    Raises:
        OverflowError: `group_idx` is negative or does not fit in 32 bits.
    """
    return OffloadKey(block_hash + group_idx.to_bytes(_GROUP_BYTES, "big"))


def get_offload_block_hash(key: OffloadKey) -> bytes:
    """Return the chained block hash of a key."""
    return key[:-_GROUP_BYTES]


def get_offload_group_idx(key: OffloadKey) -> int:
    """Return the KV-cache group of a key."""
    return int.from_bytes(key[-_GROUP_BYTES:], "big")


def block_text(key: OffloadKey) -> str:
    """Return a block's name for messages, with its hash in hexadecimal, as in its file's name."""
    return f"block {get_offload_block_hash(key).hex()} of group {get_offload_group_idx(key)}"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, in singular or plural."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


class Medium(enum.StrEnum):
    """Kind of storage that holds a block."""

    CPU = "CPU"
    STORAGE = "STORAGE"


class Locality(enum.StrEnum):
    """Whether the medium is on this host."""

    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


class LookupResult(enum.Enum):
    """Result of looking up one key.

    `HIT`: readable in the primary. `MISS`: in no tier, or not to be promoted now. `HIT_PENDING`:
    still being written to the primary, or in a tier and not promoted yet; counts as a hit and
    defers the request. `RETRY`: not known yet (an existence probe is in flight); not a hit, and
    defers the request.
    """

    HIT = enum.auto()
    MISS = enum.auto()
    HIT_PENDING = enum.auto()
    RETRY = enum.auto()


class OffloadPolicy(enum.Enum):
    """Which of a request's blocks are stored."""

    BLOCK_LEVEL = "block"
    """Only newly computed blocks."""
    CHUNK_LEVEL = "block"  # noqa: PIE796 - vLLM 0.33's name for the same member
    REQUEST_LEVEL = "request"
    """Every block of the request, prefix hits included."""


@dataclass(frozen=True, slots=True)
class RequestOffloadingContext:
    """A manager's answer to a new request."""

    policy: OffloadPolicy = OffloadPolicy.BLOCK_LEVEL


@dataclass(frozen=True, slots=True)
class TierMatcher:
    """Matches tiers by medium and locality; `None` matches any."""

    medium: Medium | None = None
    locality: Locality | None = None

    def matches(self, medium: Medium, locality: Locality | None) -> bool:
        """Return whether the matcher covers tiers of this medium and locality; None: unknown."""
        return self.medium in (None, medium) and self.locality in (None, locality)


LoadTierFilter = frozenset[TierMatcher]
"""A disjunction of matchers; the empty set means: load from no secondary tier."""

ALL_TIERS: LoadTierFilter = frozenset({TierMatcher()})


class Priority(enum.StrEnum):
    """When a request's blocks are evicted from the primary, compared with those of others."""

    LOW = "low"
    """First: the blocks that it has stored, until another request uses them."""
    NORMAL = "normal"
    HIGH = "high"
    """Last: retained for `HIGH_RETAIN_S` seconds or `retain_s`, and behind other retained ones."""


MOST_RETAIN_S: Final = 3600
"""Longest retention, in seconds."""
HIGH_RETAIN_S: Final = 300
"""Retention of the blocks of a request of high priority that gives no `retain_s`, in seconds."""


@dataclass(frozen=True, slots=True)
class Hints:
    """What a request's client wishes for its blocks; see `kvoffload_async.hints`.

    Attributes:
        priority: The order of eviction from the primary.
        retain_s: Seconds after the request's end during which the blocks that it has used are
            evicted after all others, 0 to `MOST_RETAIN_S`; without effect at low priority.
        max_offload_tokens: Only blocks that end within this many tokens of the prompt's start are
            stored, 0: none; None: all.
    """

    priority: Priority = Priority.NORMAL
    retain_s: float = 0.0
    max_offload_tokens: int | None = None

    @property
    def retention_s(self) -> float:
        """Seconds after the request's end for which its blocks are retained; 0: not at all."""
        if self.priority is Priority.LOW:
            return 0.0
        return self.retain_s or HIGH_RETAIN_S * (self.priority is Priority.HIGH)


NO_HINTS: Final = Hints()


@dataclass(eq=False, slots=True, weakref_slot=True)
class ReqContext:
    """State shared by the managers for one request; one object for the request's lifetime.

    Attributes:
        req_id: Name of the request, for messages and tiers. Not unique: requests are identified by
            their context object, and an id may be reused at any time.
        kv_transfer_params: The serving stack's per-request parameters, passed through.
        key_positions: End token of each key's block. Recency is updated in this order, first block
            first, regardless of the order in which transfers end. Keys without a position rank
            after those with one, in the order of their first use by the request.
        load_tier_filter: Secondary tiers that this request may load from.
        trace_context: Parent of the request's spans: an OpenTelemetry context, or W3C Trace
            Context headers. None: the context that is current when the request begins.
        kv_hints: vLLM's envelope of hints, or a mapping with its fields.
        hints: The request's hints. When it begins, those in `kv_hints` and `kv_transfer_params` are
            added, and `load_tier_filter` is read from the latter unless it is given.
        tokens_per_position: Tokens per unit of `key_positions`.
        tenant: Name of the request's tenant, for its timeline.
    """

    req_id: str
    kv_transfer_params: dict[str, Any] | None = None
    key_positions: dict[OffloadKey, int] = field(default_factory=dict)
    load_tier_filter: LoadTierFilter = ALL_TIERS
    _scratch: dict[type, object] = field(default_factory=dict, repr=False)
    trace_context: object | None = field(default=None, repr=False)
    kv_hints: object | None = field(default=None, repr=False)
    hints: Hints = NO_HINTS
    tokens_per_position: int = 1
    tenant: str | None = None

    def storable(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Return the keys that `max_offload_tokens` permits to store, in the given order.

        A key without a position is not, if there is a limit.
        """
        limit = self.hints.max_offload_tokens
        if limit is None:
            return keys
        positions, last = self.key_positions, limit // self.tokens_per_position
        return [key for key in keys if key in positions and positions[key] <= last]

    def put_scratch(self, value: object) -> None:
        """Store a value under its type for this request, so that a tier parses params only once."""
        self._scratch[type(value)] = value

    def get_scratch(self, kind: type[S]) -> S | None:
        """Return the value stored under `kind`, or None."""
        value = self._scratch.get(kind)
        return value if isinstance(value, kind) else None


def as_block_ids(values: Iterable[int] | npt.NDArray[Any]) -> BlockIds:
    """Return a private, read-only int32 copy of slot or block numbers, shape `[num_blocks]`.

    Raises:
        TypeError: A number is not an integer.
        OverflowError: A number does not fit in 32 bits.
    """
    if isinstance(values, np.ndarray) and (values.dtype, values.ndim) == (np.int32, 1):
        block_ids = values.copy()
    else:
        numbers = values.tolist() if isinstance(values, np.ndarray) else values
        block_ids = np.array(array("i", numbers), dtype=np.int32)
    block_ids.setflags(write=False)
    return block_ids


@dataclass(frozen=True, slots=True, eq=False)
class JobMetadata:
    """One job of a secondary tier, as submitted to it.

    Attributes:
        job_id: See `JobId`.
        keys: Ordered, without duplicates.
        block_ids: Slots of the primary, parallel to `keys`. Those of a cascade are pinned and
            ready, those of a promotion reserved and not ready.
        is_promotion: True for secondary to primary, False for primary to secondary.
        req_context: The request that the job works for.
        submit_time: Monotonic seconds; 0.0 if the submitter did not set it.
    """

    job_id: JobId
    keys: tuple[OffloadKey, ...]
    block_ids: BlockIds
    is_promotion: bool
    req_context: ReqContext
    submit_time: float = 0.0


TransferJob = JobMetadata
"""vLLM 0.33's name for `JobMetadata`."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """Result of an accepted job; created only by the job ledger, and by external managers.

    Attributes:
        job_id: The job.
        success: True if and only if every key succeeded.
        successful_keys: If the job did not fully succeed, the subset of its keys that were
            transferred; None or empty means none.
        transfer_time: Seconds from submission to the end, if known.
        queue_time: Seconds of `transfer_time` spent queued before the tier began, if known.
        transfer_bytes: Bytes moved, if known.
        error: Reason of the failure: the first failed block's error, or the job's.
        orphaned: True if the job was reported at its deadline while its copy still runs. Its slots
            must not be reused before the job is released.
    """

    job_id: JobId
    success: bool
    successful_keys: frozenset[OffloadKey] | None = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None
    error: Exception | None = None
    orphaned: bool = False
    queue_time: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, eq=False)
class LoadStoreSpec:
    """Source or destination of a transfer; opaque to the scheduler."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockIDsLoadStoreSpec(LoadStoreSpec):
    """Blocks given by index; `block_ids` is int32, shape `[num_blocks]`."""

    block_ids: BlockIds


@dataclass(frozen=True, slots=True, eq=False)
class CPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Slots of the primary tier.

    Attributes:
        generation: Number of resets of the primary before it granted the slots. It lets the primary
            recognise the completion of a copy that a reset has made stale.
    """

    generation: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Blocks of the device's paged KV cache.

    Attributes:
        group_sizes: Device blocks of each KV-cache group; their sum is `len(block_ids)`.
        block_indices: For each group, the logical index within the request of its first device
            block; parallel to `group_sizes`. Needed when that block starts inside a chunk.
    """

    group_sizes: tuple[int, ...] = ()
    block_indices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PrepareStoreOutput:
    """Result of `prepare_store`.

    Attributes:
        keys_to_store: Input keys that are not in the primary and got a slot, in input order.
        store_spec: Their slots, parallel to `keys_to_store`.
        evicted_keys: Keys evicted to make room.
        keys_left_out: Missing keys that got no slot: all blocks after some token position, in all
            KV-cache groups. Offer them again later.
    """

    keys_to_store: Sequence[OffloadKey]
    store_spec: CPULoadStoreSpec
    evicted_keys: Sequence[OffloadKey]
    keys_left_out: Sequence[OffloadKey] = ()


@dataclass(frozen=True, slots=True)
class OffloadingEvent:
    """Blocks were added to or removed from a medium; emitted only by the tier that owns it.

    Attributes:
        keys: The blocks.
        medium: The medium.
        removed: True if the blocks were removed, False if they were added.
        locality: Locality of the medium, if the tier gives it.
        ownership: Name of the secondary tier, unique within a manager; None for the primary. For a
            REMOTE tier that engines may share, its type, `@`, and a digest of its location and of
            the blocks' identity: the same for all of them.
        metadata_only: A failed write released its bookkeeping; the keys were never readable.
        removal_expected: Removal of these stored blocks will be announced for each block.
        sequence: Counts the events of one `ownership` from 1. A gap means that an event was
            dropped because nobody read it in time. 0: not counted.
        restarts: Earlier events of this `ownership` are void: it has these keys, and those of later
            events.
        tenant: Name of the blocks' tenant, in the events of an `OffloadEngine` with tenants; its
            keys have no tag then. Blocks of several tenants come in parts with one `sequence`.
    """

    keys: Collection[OffloadKey]
    medium: Medium
    removed: bool
    locality: Locality | None = None
    ownership: str | None = None
    metadata_only: bool = False
    removal_expected: bool = False
    sequence: int = 0
    restarts: bool = False
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class ScheduleEndContext:
    """Events of the scheduler step that ends.

    Attributes:
        new_req_ids: Requests scheduled for the first time in this step.
        preempted_req_ids: Requests that lost their device blocks.
    """

    new_req_ids: Collection[str] = ()
    preempted_req_ids: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class TransferResult:
    """Result of one copy between device and host.

    Attributes:
        job_id: The connector's job id, unrelated to secondary tiers' jobs.
        success: True if every byte was copied.
        transfer_size: Bytes, if known.
        transfer_time: Seconds, if known.
    """

    job_id: JobId
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None
