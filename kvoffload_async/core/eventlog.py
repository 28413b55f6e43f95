"""The bounded log of what appeared in and disappeared from a medium, until somebody reads it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from kvoffload_async.tables.keymap import KeyMap
from kvoffload_async.types import Locality, Medium, OffloadingEvent, OffloadKey


class _Entry(NamedTuple):
    keys: Sequence[OffloadKey]
    removed: bool
    metadata_only: bool


class EventLog:
    """Collects events for one medium; drops the oldest ones when nobody reads them.

    Events are numbered as they are taken, and a dropped one leaves its number out: who reads them
    all sees where some are missing.

    Attributes:
        ownership: See `OffloadingEvent`; applies to events that are taken from now on.
        dropped: Events that were dropped.
        dropped_keys: Keys in them.
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
        """Start empty.

        Args:
            medium: Where the blocks are.
            locality: How far away that is.
            enabled: Whether events are collected at all.
            ownership: See the class.
            announces_removals: Whether the removal of every stored block will be added.
            remembers: Remember which blocks are announced, so that each is announced as stored
                once until its removal, and as removed once. Takes an entry in a table per block.
            bound: Keys kept; but the latest event is kept however many it has.
        """
        self.ownership = ownership
        self.dropped = 0
        self.dropped_keys = 0
        self._medium = medium
        self._locality = locality
        self._enabled = enabled
        self._announces_removals = announces_removals
        self._announced = KeyMap() if enabled and remembers else None
        self._epoch = 0
        self._bound = bound
        self._entries: deque[_Entry] = deque()
        self._num_keys = 0
        self._sequence = 0

    def add(
        self, keys: Collection[OffloadKey], *, removed: bool, metadata_only: bool = False
    ) -> None:
        """Append one event; an empty one is left out."""
        if not self._enabled:
            return
        news: Sequence[OffloadKey] = tuple(keys)
        if self._announced is not None:
            news = self._changed(news, self._announced, removed=removed)
        if not news:
            return
        entries = self._entries
        entries.append(_Entry(news, removed, metadata_only))
        self._num_keys += len(news)
        while self._num_keys > self._bound and len(entries) > 1:
            num_dropped = len(entries.popleft().keys)
            self._num_keys -= num_dropped
            self.dropped_keys += num_dropped
            self.dropped += 1
            self._sequence += 1

    def announce_anew(self) -> None:
        """Announce announced blocks once more when they are stored again: consumers forgot them."""
        self._epoch += 1

    def take(self, is_allocated: Callable[[OffloadKey], bool]) -> Iterator[OffloadingEvent]:
        """Detach what has been collected and return it, oldest first.

        The batch is detached before anything is yielded, so that an iterator consumed in part
        cannot replay. A metadata-only removal loses the keys that have been allocated anew.
        """
        if not self._entries:
            return iter(())
        batch, self._entries = self._entries, deque()
        self._num_keys = 0
        return iter(self._events(batch, is_allocated))

    def _changed(
        self, keys: Sequence[OffloadKey], announced: KeyMap, *, removed: bool
    ) -> Sequence[OffloadKey]:
        """Take over which blocks are announced; return those for which that is new."""
        return announced.discard_present(keys) if removed else announced.change(keys, self._epoch)

    def _events(
        self, batch: Collection[_Entry], is_allocated: Callable[[OffloadKey], bool]
    ) -> Sequence[OffloadingEvent]:
        events = []
        for keys, removed, metadata_only in batch:
            current = keys
            if metadata_only:
                current = tuple(key for key in keys if not is_allocated(key))
                if not current:
                    continue
            self._sequence += 1
            events.append(
                OffloadingEvent(
                    current,
                    self._medium,
                    removed,
                    locality=self._locality,
                    ownership=self.ownership,
                    metadata_only=metadata_only,
                    removal_expected=self._announces_removals and not removed,
                    sequence=self._sequence,
                )
            )
        return events
