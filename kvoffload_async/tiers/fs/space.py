"""Room for blocks under a capacity: who goes, so that who comes finds a place.

The eviction policy and the set of known blocks live on the loop thread; the shared count and the
files are touched by the I/O threads. A victim leaves the policy before its file goes, and its
bytes are given back to the count only after its file is gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvoffload_async.abc.policy import CachePolicy
from kvoffload_async.tiers.fs.blockfile import BlockFiles, StoreItem, StoreOutcome, StoreStatus
from kvoffload_async.tiers.fs.inventory import Inventory
from kvoffload_async.tiers.fs.usage import Usage, UsageFile
from kvoffload_async.types import OffloadKey

T = TypeVar("T")

RunIo = Callable[[Callable[[], T]], Awaitable[T]]
_TRIM_BATCH = 256


@dataclass(frozen=True, slots=True)
class SpaceSettings:
    """The bounds of a namespace.

    Attributes:
        capacity_bytes: Disk bytes that are never exceeded.
        high_watermark: Share of it above which room is made in the background.
        low_watermark: Share of it down to which that goes.
    """

    capacity_bytes: int
    high_watermark: float = 1.0
    low_watermark: float = 0.95


class Space:
    """The room of one namespace, as one tier sees it. Thread: loop."""

    def __init__(
        self,
        settings: SpaceSettings,
        policy: CachePolicy,
        usage: UsageFile,
        files: BlockFiles,
        *,
        block_bytes: int,
        folder_bytes: int,
        announce: Callable[[Iterable[OffloadKey]], None],
    ) -> None:
        """Start with nothing known.

        Args:
            settings: The bounds.
            policy: Ranks the known blocks; owned from now on.
            usage: The shared count.
            files: The block files.
            block_bytes: Disk bytes of one block's file.
            folder_bytes: Disk bytes of one new folder.
            announce: Told which blocks were evicted.
        """
        self._settings = settings
        self._policy = policy
        self._usage = usage
        self._files = files
        self.block_bytes = block_bytes
        # A block may need a leaf folder, and that its parent.
        self._folders_bytes = 2 * folder_bytes
        self._unit_bytes = block_bytes + self._folders_bytes
        self._announce = announce
        self._known: set[OffloadKey] = set()
        self._busy: Counter[OffloadKey] = Counter()

    def learn(self, inventory: Inventory) -> None:
        """Take over what a walk has found: new blocks in order of age, vanished ones dropped."""
        gone = [k for k in self._known if k not in inventory.blocks and not self._busy[k]]
        self.forget(gone)
        news = [key for key in inventory.oldest_first if key not in self._known]
        room = max(0, self._policy.capacity_blocks - len(self._known))
        self._admit(news[max(0, len(news) - room) :])

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        """Drop blocks whose files are gone."""
        gone = [key for key in keys if key in self._known]
        self._known.difference_update(gone)
        self._policy.discard(gone)

    def used(self, keys: Sequence[OffloadKey]) -> None:
        """Note a use of blocks, head to tail."""
        self._policy.access([key for key in keys if key in self._known], lambda _key: True)

    def pin(self, keys: Iterable[OffloadKey]) -> None:
        """Keep blocks from being evicted while they are read or written."""
        self._busy.update(keys)

    def unpin(self, keys: Iterable[OffloadKey]) -> None:
        """Undo one `pin`."""
        self._busy.subtract(keys)
        for key in keys:
            if not self._busy[key]:
                del self._busy[key]

    async def plan(
        self, items: Sequence[StoreItem], run_io: RunIo[int], *, squeeze: bool
    ) -> tuple[list[StoreItem], list[StoreItem], int]:
        """Find room for blocks.

        Args:
            items: What is to be stored.
            run_io: Runs a call on an I/O thread.
            squeeze: The disk is full below the capacity: every block must replace another.

        Returns:
            The items to hand to `BlockFiles.store`, each with its room; those without room; the
            bytes that were set aside.
        """
        known = [replace_item(item, may_write=False) for item in items if item.key in self._known]
        new = [item for item in items if item.key not in self._known]
        granted = 0
        if new and not squeeze:
            granted = await run_io(
                partial(
                    self._usage.reserve, self._unit_bytes, len(new), self._settings.capacity_bytes
                )
            )
        new = [item for item in new if item.key not in self._known]  # another job was faster
        roomy = min(granted, len(new), self._policy.capacity_blocks - len(self._known))
        count = min(len(new) - roomy, self._idle_count())
        # A block in a reused file may still need folders, which its victim's need not give back.
        spare = min(-(-count * self._folders_bytes // self.block_bytes), self._idle_count() - count)
        placed = new[: roomy + count]
        victims = self._evict([item.key for item in placed], count + spare)
        reserved = granted * self._unit_bytes
        if spare:
            await self.remove(victims[:spare], run_io)
            del victims[:spare]
        if victims and self._folders_bytes:
            allowed = await run_io(
                partial(
                    self._usage.reserve, self._folders_bytes, count, self._settings.capacity_bytes
                )
            )
            reserved += allowed * self._folders_bytes
            self.forget([item.key for item in placed[roomy + allowed :]])
            self._admit(victims[allowed:])
            del placed[roomy + allowed :], victims[allowed:]
        replacing = [
            replace_item(item, victim=victim)
            for item, victim in zip(placed[roomy:], victims, strict=True)
        ]
        return [*known, *placed[:roomy], *replacing], new[len(placed) :], reserved

    def account(self, outcomes: Sequence[StoreOutcome]) -> int:
        """Take in how storing went; return by how much the settled bytes have grown."""
        grown = 0
        evicted = []
        for outcome in outcomes:
            item, status = outcome.item, outcome.status
            written = status is StoreStatus.WRITTEN
            grown += outcome.folder_bytes + written * self.block_bytes
            if item.victim is not None:
                if outcome.victim_taken:
                    grown -= self.block_bytes
                if outcome.victim_taken or status is StoreStatus.VICTIM_GONE:
                    evicted.append(item.victim)
                else:
                    self._admit([item.victim])  # it was not needed after all
            if written or status is StoreStatus.PRESENT:
                self._admit([item.key])
            else:
                self.forget([item.key])
        if evicted:
            self._announce(evicted)
        return grown

    async def settle(self, released: int, grown: int, run_io: RunIo[Usage]) -> Usage:
        """Tell the shared count."""
        return await run_io(partial(self._usage.settle, released, grown))

    def trim_batch(self, usage: Usage, *, trimming: bool) -> list[OffloadKey]:
        """Take blocks out that are to go in the background, a bounded number.

        Args:
            usage: The shared count.
            trimming: Whether trimming has begun, and goes on down to the low watermark.
        """
        settings = self._settings
        mark = settings.low_watermark if trimming else settings.high_watermark
        excess = usage.total_bytes - int(mark * settings.capacity_bytes)
        if excess <= 0:
            return []
        count = min(_TRIM_BATCH, -(-excess // self.block_bytes), self._idle_count())
        return self._evict([], count)

    async def remove(self, victims: Sequence[OffloadKey], run_io: RunIo[int]) -> None:
        """Delete the files of blocks that left the policy; then give their bytes back."""
        freed = await run_io(partial(self._delete, victims))
        self._announce(victims)
        await run_io(partial(self._give_back, freed))

    def _delete(self, victims: Sequence[OffloadKey]) -> int:
        """Thread: an I/O thread."""
        return sum(self._files.remove(key) or 0 for key in victims)

    def _give_back(self, freed_bytes: int) -> int:
        """Thread: an I/O thread."""
        return self._usage.settle(0, -freed_bytes).total_bytes

    def _idle_count(self) -> int:
        return len(self._known) - sum(key in self._known for key in self._busy)

    def _evict(self, coming: Sequence[OffloadKey], count: int) -> list[OffloadKey]:
        """Take `count` idle blocks out of the policy, and admit the blocks that come."""
        busy = self._busy
        victims = self._policy.make_room(coming, count, lambda key: key not in busy) or []
        self._known.difference_update(victims)
        self._policy.admit(coming)
        self._known.update(coming)
        return victims

    def _admit(self, keys: Sequence[OffloadKey]) -> None:
        news = [key for key in keys if key not in self._known]
        del news[max(0, self._policy.capacity_blocks - len(self._known)) :]
        self._policy.admit(news)
        self._known.update(news)


def replace_item(
    item: StoreItem, *, may_write: bool = True, victim: OffloadKey | None = None
) -> StoreItem:
    """Return the same block with other room."""
    return StoreItem(item.index, item.key, item.row, may_write, victim)
