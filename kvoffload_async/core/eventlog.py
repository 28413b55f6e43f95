"""The bounded log of what appeared in and disappeared from a medium, until somebody reads it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from kvoffload_async.types import Locality, Medium, OffloadingEvent, OffloadKey


class EventLog:
    """Collects events for one medium; drops the oldest ones when nobody reads them."""

    def __init__(
        self,
        medium: Medium,
        locality: Locality | None = None,
        *,
        enabled: bool,
        bound: int = 65_536,
    ) -> None:
        self._medium = medium
        self._locality = locality
        self._enabled = enabled
        self._bound = bound
        self._events: deque[OffloadingEvent] = deque()
        self.dropped = 0

    def add(
        self, keys: Collection[OffloadKey], *, removed: bool, metadata_only: bool = False
    ) -> None:
        """Append one event; an empty one is left out."""
        if not self._enabled or not keys:
            return
        if len(self._events) == self._bound:
            self._events.popleft()
            self.dropped += 1
        self._events.append(
            OffloadingEvent(
                tuple(keys),
                self._medium,
                removed,
                locality=self._locality,
                metadata_only=metadata_only,
            )
        )

    def take(self, is_allocated: Callable[[OffloadKey], bool]) -> Iterator[OffloadingEvent]:
        """Detach what has been collected and return it, oldest first.

        The batch is detached before anything is yielded, so that an iterator consumed in part
        cannot replay. A metadata-only removal loses the keys that have been allocated anew.
        """
        batch, self._events = self._events, deque()
        return iter(self._current(batch, is_allocated))

    @staticmethod
    def _current(
        batch: Collection[OffloadingEvent], is_allocated: Callable[[OffloadKey], bool]
    ) -> Sequence[OffloadingEvent]:
        current = []
        for event in batch:
            if event.metadata_only:
                keys = tuple(key for key in event.keys if not is_allocated(key))
                if not keys:
                    continue
                event = replace(event, keys=keys)  # noqa: PLW2901 - the narrowed event
            current.append(event)
        return current
