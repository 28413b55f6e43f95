"""Arguments and results of operations on block files."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from kvoffload_async.errors import TierError, TierFullError
from kvoffload_async.tiers.fs.layout import bucket_of
from kvoffload_async.types import OffloadKey


class Verify(enum.StrEnum):
    """Which blocks a load accepts."""

    REQUIRED = "required"
    """Only blocks with a valid checksum."""
    WHEN_PRESENT = "when_present"
    """Blocks with a valid checksum or without a checksum."""
    OFF = "off"
    """Blocks of the right length, unless another key or a newer release made their checksum."""


class StoreStatus(enum.Enum):
    """Result of storing one block."""

    WRITTEN = enum.auto()
    PRESENT = enum.auto()
    ABSENT = enum.auto()
    """The block was expected to be present, but is missing; nothing was written."""
    VICTIM_GONE = enum.auto()
    """The victim's file, which was to be reused, is missing; nothing was written."""
    FAILED = enum.auto()


DiskChange = tuple[int, int]
"""A bucket, and the allocated bytes of a file that was added to it (negative: removed from it)."""


@dataclass(slots=True, eq=False)
class StoreItem:
    """One block to store, and the result of storing it.

    Attributes:
        index: Its index in the job.
        key: Its key.
        slot: Its slot in the primary.
        may_write: False if no room was reserved; the block is then only looked up.
        victim: An evicted key whose file makes room for this block.
        status: See `StoreStatus`.
        error: The error, if it failed.
        freed_bytes: Disk bytes of the victim; None if its file was not taken.
        added_bytes: Disk bytes added under its key, also after a failure.
        removed_bytes: Disk bytes removed under its key.
    """

    index: int
    key: OffloadKey
    slot: int
    may_write: bool = True
    victim: OffloadKey | None = None
    status: StoreStatus = StoreStatus.FAILED
    error: TierError | None = None
    freed_bytes: int | None = None
    added_bytes: int = 0
    removed_bytes: int = 0


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


STORED = frozenset({StoreStatus.WRITTEN, StoreStatus.PRESENT})
LOST_ROOM = frozenset({StoreStatus.ABSENT, StoreStatus.VICTIM_GONE})
"""Results after which a block may be retried once there is room."""


def failures_of(items: Sequence[StoreItem]) -> dict[int, TierError]:
    """Return the errors of blocks by index; a block whose room was taken gets `TierFullError`."""
    failures: dict[int, TierError] = {}
    for item in items:
        if item.error is not None:
            failures[item.index] = item.error
        elif item.status in LOST_ROOM:
            failures[item.index] = TierFullError("other processes took the block's room")
    return failures


def changes_of(items: Sequence[StoreItem]) -> list[DiskChange]:
    """Return the changes of disk usage made by stores."""
    changes: list[DiskChange] = []
    for item in items:
        bucket = bucket_of(item.key)
        if item.added_bytes:
            changes.append((bucket, item.added_bytes))
        if item.removed_bytes:
            changes.append((bucket, -item.removed_bytes))
        if item.victim is not None and item.freed_bytes:
            changes.append((bucket_of(item.victim), -item.freed_bytes))
    return changes
