"""What is asked of the block files, and how it ended; values only."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from kvoffload_async.errors import TierError, TierFullError
from kvoffload_async.types import OffloadKey


class Verify(enum.StrEnum):
    """Which blocks a load serves."""

    REQUIRED = "required"
    """Those whose checksum is right."""
    WHEN_PRESENT = "when_present"
    """Those whose checksum is not wrong: a file without one is served."""
    OFF = "off"
    """All of the right length."""


class StoreStatus(enum.Enum):
    """How storing one block ended."""

    WRITTEN = enum.auto()
    PRESENT = enum.auto()
    ABSENT = enum.auto()
    """It was expected to be present and is not; nothing was written."""
    VICTIM_GONE = enum.auto()
    """The file whose place was to be taken is not there any more; nothing was written."""
    FAILED = enum.auto()


class DiskChange:
    """What an operation did to the disk, in allocated bytes, files and folders together.

    Attributes:
        buckets: Part of the namespace -> (bytes added, bytes removed); see `counts`.
    """

    __slots__ = ("buckets",)

    def __init__(self) -> None:
        self.buckets: dict[int, tuple[int, int]] = {}

    @property
    def added_bytes(self) -> int:
        """What was added in all. For inspection."""
        return sum(added for added, _ in self.buckets.values())

    @property
    def removed_bytes(self) -> int:
        """What was removed in all. For inspection."""
        return sum(removed for _, removed in self.buckets.values())

    def add(self, bucket: int, num_bytes: int) -> None:
        """Note what was added to a part."""
        added, removed = self.buckets.get(bucket, (0, 0))
        self.buckets[bucket] = (added + num_bytes, removed)

    def remove(self, bucket: int, num_bytes: int) -> None:
        """Note what was removed from a part."""
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
        index: Its place in the job.
        key: Its key.
        row: Its bytes.
        may_write: False if no room was set aside: then it is only looked for.
        victim: An evicted key whose file makes room for this one.
        slot: Which row of the primary that is.
    """

    index: int
    key: OffloadKey
    row: memoryview
    may_write: bool = True
    victim: OffloadKey | None = None
    slot: int = -1


@dataclass(slots=True)
class StoreOutcome:
    """How storing one block ended, and what it did to the disk.

    Attributes:
        item: What was to be stored.
        status: See `StoreStatus`.
        error: Why it failed.
        victim_taken: Whether the victim's file is gone by this store.
        change: What it did to the disk, also where it failed.
    """

    item: StoreItem
    status: StoreStatus = StoreStatus.FAILED
    error: TierError | None = None
    victim_taken: bool = False
    change: DiskChange = field(default_factory=DiskChange)


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """Why a block could not be loaded.

    Attributes:
        index: Its place in the job.
        error: Why it must not be served.
        freed_bytes: None unless its file is gone: what deleting it as bad has freed.
    """

    index: int
    error: TierError
    freed_bytes: int | None = None


LOST_ROOM = frozenset({StoreStatus.ABSENT, StoreStatus.VICTIM_GONE})
"""Whose block may be stored once there is room."""


def failures_of(outcomes: Sequence[StoreOutcome]) -> dict[int, TierError]:
    """Return why blocks failed; one that lost its room to others counts as without room."""
    failures: dict[int, TierError] = {}
    for outcome in outcomes:
        if outcome.error is not None:
            failures[outcome.item.index] = outcome.error
        elif outcome.status in LOST_ROOM:
            failures[outcome.item.index] = TierFullError("others took the block's room")
    return failures
