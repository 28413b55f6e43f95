"""Tells LMCache which objects the tiers have, from the tiers' events, on a thread of its own."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

from kvoffload_async.errors import naming_shortage
from kvoffload_async.integrations.lmcache.keys import Keys, StoreId
from kvoffload_async.types import OffloadingEvent, OffloadKey

_CLOSE_S: Final = 5.0
_KEYS_AT_ONCE: Final = 4096

Tell = Callable[[list[Any], list[int]], object]
"""Takes keys and the sizes of their objects."""


class _News(NamedTuple):
    store_id: StoreId
    events: Sequence[OffloadingEvent]
    is_counted: bool


class UsageTeller:
    """Tells which objects were stored and removed.

    Objects of tiers that do not announce removals are told with a size of 0, because their sum
    would only grow. Objects whose salt is not known yet are told when a request has named it.

    Thread-safe.
    """

    def __init__(self, keys: Keys, stored: Tell, deleted: Tell) -> None:
        """Start the thread.

        Args:
            keys: Decodes keys.
            stored: Called with objects that a tier has from now on.
            deleted: Called with objects that a tier has no longer.

        Raises:
            TierUnavailableError: The thread cannot be started.
        """
        self._keys = keys
        self._stored = stored
        self._deleted = deleted
        self._num_salts = 0
        self._untold: dict[StoreId, Counter[OffloadKey]] = defaultdict(Counter)
        """Blocks with a salt that is not known -> how many tiers have them, if they are counted."""
        self._news: SimpleQueue[_News | bool] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvoffload-usage", daemon=True)
        with naming_shortage("the thread for LMCache's usage counts cannot be started"):
            self._thread.start()

    def take(
        self, store_id: StoreId, events: Sequence[OffloadingEvent], *, is_counted: bool
    ) -> None:
        """Tell of events.

        Args:
            store_id: The store.
            events: Events of a tier.
            is_counted: Whether the tier announces removals.
        """
        self._news.put(_News(store_id, events, is_counted))

    def salts_changed(self) -> None:
        """Tell of objects with a salt that has become known."""
        if len(self._keys.salts) != self._num_salts:
            self._num_salts = len(self._keys.salts)
            self._news.put(True)

    def close(self) -> None:
        """Tell what is left, and end the thread."""
        self._news.put(False)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (news := self._news.get()) is not False:
            if isinstance(news, _News):
                for event in news.events:
                    self._take(news.store_id, event, is_counted=news.is_counted)
            else:
                self._tell_untold()

    def _take(self, store_id: StoreId, event: OffloadingEvent, *, is_counted: bool) -> None:
        untold = self._untold[store_id]
        known = []
        for key in event.keys:
            obj = self._keys.decode(store_id.model, key)
            if untold[key] and event.removed:
                untold[key] -= 1
            elif obj is not None:
                known.append(obj)
            elif is_counted and not event.removed:
                untold[key] += 1
            if not untold[key]:
                del untold[key]
        tell = self._deleted if event.removed else self._stored
        self._tell(tell, known, store_id.object_bytes * is_counted)

    def _tell_untold(self) -> None:
        for store_id, untold in self._untold.items():
            known = {key: self._keys.decode(store_id.model, key) for key in untold}
            found = {key: obj for key, obj in known.items() if obj is not None}
            objects = [obj for key, obj in found.items() for _ in range(untold[key])]
            for key in found:
                del untold[key]
            self._tell(self._stored, objects, store_id.object_bytes)

    @staticmethod
    def _tell(tell: Tell, objects: Sequence[Any], size: int) -> None:
        for first in range(0, len(objects), _KEYS_AT_ONCE):
            some = list(objects[first : first + _KEYS_AT_ONCE])
            tell(some, [size] * len(some))
