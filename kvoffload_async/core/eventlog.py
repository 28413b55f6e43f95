"""Bounded log of blocks added to and removed from a medium, until the events are read."""

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
    """Collects events for one medium; drops the oldest ones if they are not read.

    Events are numbered when they are taken. A dropped event consumes a number, so that a reader can
    detect the gap.

    Attributes:
        entries: The collected events, not yet numbered.
        medium: Medium of the blocks.
        locality: Locality of the medium.
        ownership: See `OffloadingEvent`; applies to events that are taken from now on.
        dropped: Number of dropped events.
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
            enabled: Whether events are collected at all.
            ownership: See the class.
            announces_removals: Whether every block that is removed gets a removal event.
            remembers: Track announced blocks to suppress repeated events: a block is announced
                as stored once until it is removed, and then as removed once. Costs a table entry
                per block.
            bound: Maximum number of keys; the latest event is kept whatever its size.
        """
        self.ownership = ownership
        self.dropped = 0
        self.medium = medium
        self.locality = locality
        self._enabled = enabled
        self._announces_removals = announces_removals
        self.announced = KeyMap() if enabled and remembers else None
        self._epoch = 0
        self._bound = bound
        self.entries: deque[_Entry] = deque()
        self._num_keys = 0
        self._sequence = 0

    def add(
        self, keys: Collection[OffloadKey], *, removed: bool, metadata_only: bool = False
    ) -> None:
        """Append an event about these blocks, unless it would report nothing new."""
        if not self._enabled:
            return
        news: Sequence[OffloadKey] = tuple(keys)
        if self.announced is not None and removed:
            news = self.announced.discard_present(news)
        elif self.announced is not None:
            news = self.announced.change(news, self._epoch)
        if not news:
            return
        entries = self.entries
        entries.append(_Entry(news, removed, metadata_only))
        self._num_keys += len(news)
        while self._num_keys > self._bound and len(entries) > 1:
            self._num_keys -= len(entries.popleft().keys)
            self.dropped += 1
            self._sequence += 1

    def announce_anew(self) -> None:
        """Announce each block again at its next store; for consumers that lost state."""
        self._epoch += 1

    def take(self, is_allocated: Callable[[OffloadKey], bool]) -> Iterator[OffloadingEvent]:
        """Remove and return the collected events, oldest first.

        The events are removed before the first is yielded, so a partly consumed iterator cannot
        replay them. Metadata-only removals omit keys that have been allocated again.
        """
        batch, self.entries = self.entries, deque()
        self._num_keys = 0
        events: list[OffloadingEvent] = []
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
                    self.medium,
                    removed,
                    locality=self.locality,
                    ownership=self.ownership,
                    metadata_only=metadata_only,
                    removal_expected=self._announces_removals and not removed,
                    sequence=self._sequence,
                )
            )
        return iter(events)
