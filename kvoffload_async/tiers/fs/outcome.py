"""Arguments and results of operations on block files."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from kvoffload_async.errors import TierError, TierFullError
from kvoffload_async.types import OffloadKey


class Verify(enum.StrEnum):
    """Which blocks a load accepts."""

    REQUIRED = "required"
    """Only those with a valid checksum."""
    WHEN_PRESENT = "when_present"
    """Those with a valid checksum or none."""
    OFF = "off"
    """Those of the right length, unless another key or a newer release made their checksum."""


class StoreStatus(enum.Enum):
    """Result of storing one block."""

    WRITTEN = enum.auto()
    PRESENT = enum.auto()
    ABSENT = enum.auto()
    """Expected to be present, but missing; nothing was written."""
    VICTIM_GONE = enum.auto()
    """The victim's file, which was to be reused, is missing; nothing was written."""
    FAILED = enum.auto()


class DiskChange:
    """Change of disk usage by an operation, in allocated bytes of files.

    Attributes:
        buckets: Bucket of the namespace -> (bytes added, bytes removed); see `counts`.
    """

    __slots__ = ("buckets",)

    def __init__(self) -> None:
        self.buckets: dict[int, tuple[int, int]] = {}

    @property
    def added_bytes(self) -> int:
        """Total bytes added. For inspection."""
        return sum(added for added, _ in self.buckets.values())

    @property
    def removed_bytes(self) -> int:
        """Total bytes removed. For inspection."""
        return sum(removed for _, removed in self.buckets.values())

    def add(self, bucket: int, num_bytes: int) -> None:
        """Record bytes added to a bucket."""
        added, removed = self.buckets.get(bucket, (0, 0))
        self.buckets[bucket] = (added + num_bytes, removed)

    def remove(self, bucket: int, num_bytes: int) -> None:
        """Record bytes removed from a bucket."""
        added, removed = self.buckets.get(bucket, (0, 0))
        self.buckets[bucket] = (added, removed + num_bytes)

    def __iadd__(self, other: DiskChange) -> Self:
        if not self.buckets:
            self.buckets = other.buckets.copy()
            return self
        for bucket, (added, removed) in other.buckets.items():
            own_added, own_removed = self.buckets.get(bucket, (0, 0))
            self.buckets[bucket] = (own_added + added, own_removed + removed)
        return self

    def __bool__(self) -> bool:
        return bool(self.buckets)


@dataclass(frozen=True, slots=True)
class StoreItem:
    """One block to store.

    Attributes:
        index: Its index in the job.
        key: Its key.
        row: Its bytes.
        may_write: False if no room was reserved; the block is then only looked up.
        victim: An evicted key whose file makes room for this block.
        slot: Its slot in the primary.
    """

    index: int
    key: OffloadKey
    row: memoryview
    may_write: bool = True
    victim: OffloadKey | None = None
    slot: int = -1


@dataclass(slots=True)
class StoreOutcome:
    """Result of storing one block, and its change of disk usage.

    Attributes:
        item: The block.
        status: See `StoreStatus`.
        error: The error, if it failed.
        victim_taken: Whether this store has removed the victim's file.
        change: Its change of disk usage, also after a failure.
    """

    item: StoreItem
    status: StoreStatus = StoreStatus.FAILED
    error: TierError | None = None
    victim_taken: bool = False
    change: DiskChange = field(default_factory=DiskChange)


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """Failure of loading a block.

    Attributes:
        index: Its index in the job.
        error: The error; the block must not be served.
        freed_bytes: Bytes freed by deleting the corrupt file; None if it was not deleted.
    """

    index: int
    error: TierError
    freed_bytes: int | None = None


LOST_ROOM = frozenset({StoreStatus.ABSENT, StoreStatus.VICTIM_GONE})
"""Results after which a block may be retried once there is room."""


def failures_of(outcomes: Sequence[StoreOutcome]) -> dict[int, TierError]:
    """Return the errors by index; blocks whose room was taken by others count as without room."""
    failures: dict[int, TierError] = {}
    for outcome in outcomes:
        if outcome.error is not None:
            failures[outcome.item.index] = outcome.error
        elif outcome.status in LOST_ROOM:
            failures[outcome.item.index] = TierFullError("other processes took the block's room")
    return failures
