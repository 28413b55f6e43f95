"""The frozen values that cross the package's borders.

Names follow vLLM's `kv_offload` package, which this field knows: a *block* is one offload unit, a
*slot* its row in the primary tier's buffer.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NewType, TypeVar

import numpy as np
import numpy.typing as npt

OffloadKey = NewType("OffloadKey", bytes)
"""Block hash followed by the KV-cache group's index (4 bytes, big-endian, unsigned).

The hash is the *chained* prefix hash, so equal keys mean equal contents for that group. Bytes and
not a tuple, so that the garbage collector need not track millions of them.
"""

ENGINE_REQ_ID: Final = "kvoffload_async:engine"
"""The `req_id` of what is done for no request: cascades that come late, and uses told to tiers.

A tier hears of its begin and its end as of any other request's, if anything is done under it.
"""

JobId = int
"""Strictly increasing and never reused; one counter a manager, shared by both directions."""

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


class Medium(enum.StrEnum):
    """Where a block lies."""

    CPU = "CPU"
    STORAGE = "STORAGE"


class Locality(enum.StrEnum):
    """How far away the medium is."""

    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


class LookupResult(enum.Enum):
    """What a lookup knows of one key.

    `HIT`: readable in the primary now. `MISS`: nowhere, or not to be promoted now. `HIT_PENDING`:
    in the primary, but its bytes are still on the way; a hit that defers the request. `RETRY`:
    not known yet (an existence probe is under way), or in a tier, and no room for it in the primary
    yet; no hit, and defers the request.
    """

    HIT = enum.auto()
    MISS = enum.auto()
    HIT_PENDING = enum.auto()
    RETRY = enum.auto()


class OffloadPolicy(enum.Enum):
    """Which of a request's blocks a tier wants."""

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

    def matches(self, medium: Medium, locality: Locality) -> bool:
        """Tell whether a tier of this medium and locality is meant."""
        return self.medium in {None, medium} and self.locality in {None, locality}


LoadTierFilter = frozenset[TierMatcher]
"""A disjunction of matchers; the empty set means: load from no secondary tier."""

ALL_TIERS: LoadTierFilter = frozenset({TierMatcher()})


@dataclass(eq=False, slots=True, weakref_slot=True)
class ReqContext:
    """What the managers know of one request; one object for the request's whole life.

    Attributes:
        req_id: A name, for messages and for tiers. Requests are told apart by their contexts: an
            id may be used again at any time.
        kv_transfer_params: The serving stack's per-request parameters, passed through.
        key_positions: End token of each key's block. Recency is committed in this order, head
            first, whatever the order in which transfers end. Keys that are absent rank in the
            order in which the request first used them, behind those that are present.
        load_tier_filter: Secondary tiers that this request may load from.
        trace_context: What the request's spans are to belong to: an OpenTelemetry context, or the
            headers of W3C Trace Context. None: what is current when the request begins.
    """

    req_id: str
    kv_transfer_params: dict[str, Any] | None = None
    key_positions: dict[OffloadKey, int] = field(default_factory=dict)
    load_tier_filter: LoadTierFilter = ALL_TIERS
    _scratch: dict[type, object] = field(default_factory=dict, repr=False)
    trace_context: object | None = field(default=None, repr=False)

    def put_scratch(self, value: object) -> None:
        """Keep a value for this request, under its type, so that a tier parses params once."""
        self._scratch[type(value)] = value

    def get_scratch(self, kind: type[S]) -> S | None:
        """Return the value kept under `kind`, or None."""
        value = self._scratch.get(kind)
        return value if isinstance(value, kind) else None


def as_block_ids(values: Iterable[int] | npt.NDArray[Any]) -> BlockIds:
    """Return a private, read-only int32 copy of slot or block numbers, shape `[num_blocks]`.

    Raises:
        TypeError: A number is no integer.
        OverflowError: A number does not fit.
    """
    numbers = values.tolist() if isinstance(values, np.ndarray) else values
    block_ids = np.array(array("i", numbers), dtype=np.int32)
    block_ids.setflags(write=False)
    return block_ids


@dataclass(frozen=True, slots=True, eq=False)
class JobMetadata:
    """One job of a secondary tier, as the tier receives it.

    Attributes:
        job_id: See `JobId`.
        keys: Ordered, without duplicates.
        block_ids: Slots of the primary, parallel to `keys`. Those of a cascade are pinned and
            ready, those of a promotion reserved and not ready.
        is_promotion: True for secondary to primary, False for primary to secondary.
        req_context: The request that the job works for.
        submit_time: Monotonic seconds, or 0.0 where the submitter did not say.
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
    """The one answer to an accepted job; made by the job ledger and nowhere else.

    Attributes:
        job_id: The job.
        success: True if and only if every key succeeded.
        successful_keys: For a job that did not fully succeed, the keys that landed, any subset of
            the job's; None or empty means none.
        transfer_time: Seconds from submission to the end, where known.
        queue_time: Of these, the seconds until the tier began, where known.
        transfer_bytes: Bytes moved, where known.
        error: Why it failed: the first failed block's error, or the job's.
        orphaned: True if the copy is still running: it was reported because its deadline had
            passed. Its slots must not be used again before the job is released.
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
    """Where a transfer reads or writes; opaque to the scheduler."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockIDsLoadStoreSpec(LoadStoreSpec):
    """Blocks named by index; `block_ids` int32, shape `[num_blocks]`."""

    block_ids: BlockIds


@dataclass(frozen=True, slots=True, eq=False)
class CPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Slots of the primary tier.

    Attributes:
        generation: How often the primary had been reset when it granted them. Whoever completes a
            copy with it need not know whether a reset has come in between.
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
    """What `prepare_store` granted.

    Attributes:
        keys_to_store: The input's missing keys, in input order.
        store_spec: Their slots, parallel to `keys_to_store`.
        evicted_keys: Keys that made room.
        keys_left_out: Missing keys that there was no room for: all from some token on, over all
            KV-cache groups. Offer them again later.
    """

    keys_to_store: Sequence[OffloadKey]
    store_spec: CPULoadStoreSpec
    evicted_keys: Sequence[OffloadKey]
    keys_left_out: Sequence[OffloadKey] = ()


@dataclass(frozen=True, slots=True)
class OffloadingEvent:
    """Blocks appeared in, or disappeared from, a medium; emitted only by the tier that owns it.

    Attributes:
        keys: The blocks.
        medium: Where.
        removed: True for disappeared.
        locality: How far away the medium is, where the tier says.
        ownership: Which secondary tier announces it, unique within a manager; None: the primary.
        metadata_only: A failed write released its bookkeeping; the keys were never readable.
        removal_expected: Each of these stored blocks will be announced as removed when it goes.
        sequence: Counts the events of one `ownership` from 1 on; where a number is left out, an
            event was dropped because nobody read it in time. 0: not counted.
    """

    keys: Collection[OffloadKey]
    medium: Medium
    removed: bool
    locality: Locality | None = None
    ownership: str | None = None
    metadata_only: bool = False
    removal_expected: bool = False
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class ScheduleEndContext:
    """What happened in the step that ends.

    Attributes:
        new_req_ids: Requests that began to be computed in it.
        preempted_req_ids: Requests that lost their device blocks.
    """

    new_req_ids: Collection[str] = ()
    preempted_req_ids: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class TransferResult:
    """The end of one copy between device and host.

    Attributes:
        job_id: The adapter's job; not a secondary tier's.
        success: Whether every byte arrived.
        transfer_size: Bytes, where known.
        transfer_time: Seconds, where known.
    """

    job_id: JobId
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None
