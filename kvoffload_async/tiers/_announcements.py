"""What is said of a tier's blocks while its jobs run, so that a job's end does not contradict it.

A job says only at its end what it did to its blocks, while a tier announces an eviction when it
happens. So what a job's end says of a block is out of date if something was said of the block since
the job began: a block that a store has written, and that made room for others before the store has
ended, is gone; and one that a load has missed may have been stored since. Whether a block was
evicted before or after it was written is known to the tier alone: see `_recheck`.

Thread: loop.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvoffload_async.types import OffloadKey

_BOUND: Final = 16_384


@dataclass(slots=True, eq=False)
class Watch:
    """What has been said of some blocks since a call of the tier about them began.

    Attributes:
        keys: The blocks.
        heeds_stores: Whether the end of a store says something.
        begun_at: The number of the last thing said before.
        outdated: Blocks of which something was said since, as far as was looked.
    """

    keys: Sequence[OffloadKey]
    heeds_stores: bool
    begun_at: int
    outdated: set[OffloadKey] = field(default_factory=set)


class Announcements:
    """What was said since the oldest watch began.

    A watch costs nothing a block unless something was announced in the meantime. A bound on what is
    kept holds however long a call hangs: beyond it, each watch is given what concerns it.

    Attributes:
        refused_keys: How many keys were announced that are none.
    """

    def __init__(self, bound: int = _BOUND) -> None:
        """Keep what is said of about so many blocks, besides those that are watched."""
        self.refused_keys = 0
        self._bound = bound
        self._watches: dict[Watch, None] = {}
        self._heeding_stores = 0
        self._number = 0
        self._announced: dict[OffloadKey, int] = {}
        """Block -> the number of the last announcement about it."""
        self._stored: list[tuple[int, Sequence[OffloadKey]]] = []
        """What stores have ended with, numbered as announcements are."""
        self._stored_blocks = 0

    def begin(self, keys: Sequence[OffloadKey], *, heeds_stores: bool) -> Watch:
        """Watch blocks, which the tier is about to look at for the first time."""
        watch = Watch(keys, heeds_stores, self._number)
        self._watches[watch] = None
        self._heeding_stores += heeds_stores
        return watch

    def note(self, keys: Collection[OffloadKey]) -> None:
        """Note that a tier says something of its own accord; what it is does not matter."""
        if self._watches:
            self._number += 1
            self._announced.update(dict.fromkeys(keys, self._number))
            self._keep_bound()

    def note_stored(self, keys: Sequence[OffloadKey]) -> None:
        """Note that a store has ended, and that these blocks are there."""
        if self._heeding_stores:
            self._number += 1
            self._stored.append((self._number, keys))
            self._stored_blocks += len(keys)
            self._keep_bound()

    def end(self, watch: Watch, *, looks: bool = True) -> frozenset[OffloadKey]:
        """Stop watching blocks; return those of which something was said since the beginning.

        Args:
            watch: What began.
            looks: Whether that is of interest; else nothing is returned.
        """
        del self._watches[watch]
        self._heeding_stores -= watch.heeds_stores
        if looks:
            self._look(watch)
        if not self._watches:
            self._forget()
        return frozenset(watch.outdated) if looks else frozenset()

    def _look(self, watch: Watch) -> None:
        """Take what was said of watched blocks over to their watch."""
        keys, begun_at, announced = watch.keys, watch.begun_at, self._announced
        if announced and not announced.keys().isdisjoint(keys):
            watch.outdated.update(key for key in keys if announced.get(key, 0) > begun_at)
        if watch.heeds_stores and self._stored and self._stored[-1][0] > begun_at:
            own = set(keys)
            for number, stored in self._stored:
                if number > begun_at:
                    watch.outdated |= own.intersection(stored)

    def _keep_bound(self) -> None:
        if len(self._announced) + self._stored_blocks > self._bound:
            for watch in self._watches:
                self._look(watch)
            self._forget()

    def _forget(self) -> None:
        self._announced.clear()
        self._stored.clear()
        self._stored_blocks = 0
