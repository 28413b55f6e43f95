"""Log of blocks added to and removed from a medium, until the events are read."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum, auto
from itertools import compress, islice
from typing import Final, NamedTuple

from kvoffload_async.tables.keymap import LAST_HASH_BYTE, KeyMap
from kvoffload_async.types import Locality, Medium, OffloadingEvent, OffloadKey

KEYS_PER_EVENT: Final = 1024


class Change(IntEnum):
    """Kind of an event."""

    STORED = auto()
    REMOVED = auto()
    RELEASED = auto()
    """A failed write released its bookkeeping; the block was never readable."""


_CANCELLED: Final[Mapping[tuple[int | None, Change], Change | None]] = {
    (Change.REMOVED, Change.STORED): None,
    (Change.STORED, Change.REMOVED): Change.RELEASED,
    (Change.REMOVED, Change.RELEASED): Change.REMOVED,
}
"""(unread change of a block, next one) -> the change that replaces both; others: the next one."""


class _Entry(NamedTuple):
    keys: Sequence[OffloadKey]
    change: Change


class EventLog:
    """Collects events for one medium.

    If too many keys wait to be read, a log that follows every block replaces the oldest changes of
    each block by one: the events still lead to the contents, and their number is limited by the
    blocks of the medium and of the reader. Each `add` replaces about as many as it appends. Other
    logs drop their oldest events.

    Events are numbered when they are taken. A dropped event consumes a number, so that a reader can
    detect the gap.

    Attributes:
        entries: The collected events, not yet numbered; not empty if any change is unread.
        medium: Medium of the blocks.
        locality: Locality of the medium.
        ownership: Name of the tier, None for the primary; applies to events taken from now on.
        shared_store: Name of the store if engines share it; in events instead of `ownership`.
        is_enabled: Whether events are collected at all.
        dropped: Number of dropped events.
        is_behind: Whether the last `take` has left events to the next.
        announced: Blocks that were announced as stored and not as removed, also in events not yet
            taken; None if they are not tracked. Read-only.
    """

    def __init__(
        self,
        medium: Medium,
        locality: Locality | None = None,
        *,
        enabled: bool,
        ownership: str | None = None,
        announces_removals: bool = False,
        remembers: bool = False,
        bound: int = 262_144,
    ) -> None:
        """Create an empty log.

        Args:
            medium: Medium of the blocks.
            locality: Locality of the medium.
            enabled: See `is_enabled`.
            ownership: See the class.
            announces_removals: Whether every block that is removed gets a removal event.
            remembers: Track announced blocks to suppress repeated events: a block is announced
                as stored once until it is removed, and then as removed once. Costs a table entry
                per block.
            bound: Maximum number of unread keys before changes are replaced or dropped, and of
                released blocks among the replaced; the latest event is kept whatever its size.
        """
        self.ownership = ownership
        self.shared_store: str | None = None
        self.dropped = 0
        self.medium = medium
        self.locality = locality
        self.is_enabled = enabled
        self._announces_removals = announces_removals
        self._follows_every_block = announces_removals or remembers
        self.announced = KeyMap() if enabled and remembers else None
        self._epoch = 0
        self._bound = bound
        self._merged: KeyMap | None = None
        """Block -> the change that replaces those before its changes in `entries`."""
        self._num_released = 0
        """Number of `RELEASED` in `_merged`."""
        self.entries: deque[_Entry] = deque()
        self._num_keys = 0
        """Number of keys in `entries`."""
        holds_removals = enabled and announces_removals and not remembers
        self._unread_stores = KeyMap() if holds_removals else None
        """Block -> number of its `STORED` in `entries`; None if no removal is held back."""
        self._held = KeyMap()
        """Blocks whose removal was taken and is not returned before their next event."""
        self._num_held = 0
        self.is_behind = False
        self._sequence = 0

    @property
    def owner(self) -> str | None:
        """The `ownership` in events."""
        return self.shared_store or self.ownership

    def add(self, keys: Collection[OffloadKey], change: Change) -> None:
        """Append events about a change of these blocks, unless they would report nothing new."""
        if not self.is_enabled:
            return
        news: Sequence[OffloadKey] = tuple(keys)
        if self.announced is not None:
            if change is Change.STORED:
                news = self.announced.change(news, self._epoch)
            else:
                news = self.announced.discard_present(news)
        if self._follows_every_block:
            if self._num_keys > self._bound:
                self._merge(len(news))
            self._append(news, change)
            return
        self._append(news, change)
        while self._num_keys > self._bound and len(self.entries) > 1:
            self._pop()
            self.dropped += 1
            self._sequence += 1

    def announce_anew(self) -> None:
        """Announce each block again at its next store or load; for readers that lost state."""
        self._epoch += 1

    def confirm(self, keys: Sequence[OffloadKey]) -> None:
        """Announce those of these stored blocks again that `announce_anew` applies to."""
        if self._epoch and self.announced is not None:
            epochs = zip(keys, self.announced.find(keys), strict=True)
            self.add([key for key, epoch in epochs if epoch is not None], Change.STORED)

    def take(
        self, is_allocated: Callable[[OffloadKey], bool], max_keys: int | None = None
    ) -> Iterator[OffloadingEvent]:
        """Remove and return the collected events, oldest first.

        The events are removed before the first is yielded, so a partly consumed iterator cannot
        replay them. Those of released blocks omit keys that have been allocated again. The
        primary's removal of a block that a later call announces again is held back until then: vLLM
        drops its metadata of a block that is in no medium. A block that a tier stores is in the
        primary, so that a tier's removals need not wait.

        Args:
            is_allocated: Whether a block is stored or being written now.
            max_keys: Number of keys after which further events wait for the next call.
        """
        entries = self.entries
        if self._merged is not None:
            self._put_back(self._merged, sys.maxsize if max_keys is None else max_keys)
        least = 0 if max_keys is None else max(0, self._num_keys - max_keys)
        batch: list[_Entry] = []
        while self._num_keys > least:
            batch.append(self._pop())
        self.is_behind = bool(entries)
        events = []
        for entry in batch:
            for keys, change in self._changes(entry, is_allocated):
                if keys:
                    self._sequence += 1
                    events.append(self._event(keys, change))
        return iter(events)

    def will_announce(self, key: OffloadKey) -> bool:
        """Return whether an unread event of the primary announces a block as stored."""
        unread, merged = self._unread_stores, self._merged
        if unread is None:
            return False
        return key in unread or (merged is not None and merged.get(key) == Change.STORED)

    def contents(self, keys: Iterable[OffloadKey]) -> Iterator[OffloadingEvent]:
        """Yield events that announce `keys` as the whole contents; call when no event is unread."""
        rest = iter(keys)
        first = tuple(islice(rest, KEYS_PER_EVENT))
        yield self._event(first, Change.STORED, restarts=True)
        while portion := tuple(islice(rest, KEYS_PER_EVENT)):
            yield self._event(portion, Change.STORED)

    # -- internal -------------------------------------------------------------------------------

    def _event(
        self, keys: Sequence[OffloadKey], change: Change, *, restarts: bool = False
    ) -> OffloadingEvent:
        return OffloadingEvent(
            keys,
            self.medium,
            change is not Change.STORED,
            locality=self.locality,
            ownership=self.owner,
            metadata_only=change is Change.RELEASED,
            removal_expected=self._announces_removals and change is Change.STORED,
            sequence=self._sequence,
            restarts=restarts,
        )

    def _changes(
        self, entry: _Entry, is_allocated: Callable[[OffloadKey], bool]
    ) -> Iterator[_Entry]:
        """Yield the changes to return for an entry that has been taken."""
        keys, change = entry
        waits, held = self.will_announce, self._held
        if change is Change.REMOVED:
            if self.is_behind and self._unread_stores is not None:
                unread = self._unread_stores.find(keys)
                if any(unread):
                    self._num_held += len(held.change(compress(keys, unread), 1))
                    keys = [key for key, stores in zip(keys, unread, strict=True) if not stores]
        elif self._num_held:
            is_stored = change is Change.STORED
            due = held.discard_present(key for key in keys if is_stored or not waits(key))
            self._num_held -= len(due)
            yield _Entry(due, Change.REMOVED)
        if change is Change.RELEASED:
            keys = [key for key in keys if not (is_allocated(key) or waits(key))]
        yield _Entry(keys, change)

    def _append(self, keys: Sequence[OffloadKey], change: Change) -> None:
        for first in range(0, len(keys), KEYS_PER_EVENT):
            self.entries.append(_Entry(keys[first : first + KEYS_PER_EVENT], change))
        self._num_keys += len(keys)
        self._count(keys, change, 1)

    def _pop(self) -> _Entry:
        keys, change = entry = self.entries.popleft()
        self._num_keys -= len(keys)
        self._count(keys, change, -1)
        return entry

    def _count(self, keys: Sequence[OffloadKey], change: Change, difference: int) -> None:
        if change is not Change.STORED or self._unread_stores is None:
            return
        parts = self._unread_stores.parts
        for key in keys:
            part = parts[key[0] + key[LAST_HASH_BYTE]]
            if number := part.pop(key, 0) + difference:
                part[key] = number

    def _merge(self, num_keys: int) -> None:
        """Replace the oldest changes in `entries`, of `num_keys` keys or a few more."""
        if self._merged is None:
            self._merged = KeyMap()
        parts = self._merged.parts
        while self._num_keys > self._bound and num_keys > 0:
            keys, change = self._pop()
            num_keys -= len(keys)
            for key in keys:
                part = parts[key[0] + key[LAST_HASH_BYTE]]
                before = part.pop(key, None)
                self._num_released -= before == Change.RELEASED
                replacement = _CANCELLED.get((before, change), change)
                if replacement is Change.RELEASED:
                    if self._num_released >= self._bound and key not in self._held:
                        continue  # without it, the events lead to the contents, too
                    self._num_released += 1
                if replacement is not None:
                    part[key] = replacement

    def _put_back(self, merged: KeyMap, num_keys: int) -> None:
        """Put up to `num_keys` of the merged changes in front of `entries`."""
        portion = merged.pop(num_keys)
        if len(portion) < num_keys:
            self._merged = None
        for change in Change:
            keys = [key for key, merged_change in portion if merged_change == change]
            self._count(keys, change, 1)
            for first in range(0, len(keys), KEYS_PER_EVENT):
                self.entries.appendleft(_Entry(keys[first : first + KEYS_PER_EVENT], change))
            if change is Change.RELEASED:
                self._num_released -= len(keys)
        self._num_keys += len(portion)
