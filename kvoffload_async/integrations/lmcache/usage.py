"""Tells LMCache which objects the tiers have, from the tiers' events, on a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, Final

from kvoffload_async.error_log import ErrorLog
from kvoffload_async.errors import BusyError, naming_shortage
from kvoffload_async.integrations.lmcache.keys import Keys, StoreId
from kvoffload_async.types import OffloadingEvent, OffloadKey

logger = logging.getLogger(__name__)

_CLOSE_S: Final = 5.0
_KEYS_AT_ONCE: Final = 4096
MOST_WAITING: Final = 65_536
"""Maximum number of events that wait for LMCache's listeners; further ones are dropped."""

Report = Callable[[list[Any], list[int]], object]
"""Takes keys and the sizes of their objects."""


class UsageReporter:
    """Reports which objects were stored and removed.

    Objects of tiers that do not announce removals are reported with a size of 0, because their sum
    would only grow. Objects whose salt is not known yet are reported when a request has named it.

    An error of a listener of LMCache's ends one call only; the following ones are made.

    Thread-safe.

    Attributes:
        errors: Of listeners; events that were dropped, because one is too slow, count as well.
    """

    def __init__(self, keys: Keys, adapter: Any) -> None:  # noqa: ANN401 - LMCache's base class
        """Start the thread.

        Args:
            keys: Decodes keys.
            adapter: Has the methods that notify LMCache, `_notify_keys_stored` and so on.

        Raises:
            TierUnavailableError: The thread cannot be started.
        """
        self.errors = ErrorLog(logger, "reporting to LMCache which objects are stored")
        self._keys = keys
        self._stored: Report = adapter._notify_keys_stored  # noqa: SLF001 - what adapters call
        self._deleted: Report = adapter._notify_keys_deleted  # noqa: SLF001 - as above
        self._accessed: Callable[[list[Any]], object] = adapter._notify_keys_accessed  # noqa: SLF001
        self._num_salts = 0
        self._unreported: dict[StoreId, Counter[OffloadKey]] = defaultdict(Counter)
        """Blocks with a salt that is not known -> how many tiers have them, if they are counted."""
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvoffload-usage", daemon=True)
        with naming_shortage("the thread for LMCache's usage counts cannot be started"):
            self._thread.start()

    def take(
        self, store_id: StoreId, events: Sequence[OffloadingEvent], *, is_counted: bool
    ) -> None:
        """Report events.

        Args:
            store_id: The store.
            events: Events of a tier.
            is_counted: Whether the tier announces removals.
        """
        for event in events:
            self._ask(partial(self._take, store_id, event, is_counted=is_counted))

    def accessed(self, objects: list[Any]) -> None:
        """Report that objects were loaded."""
        self._ask(partial(self._accessed, objects))

    def salts_changed(self) -> None:
        """Report objects with a salt that has become known."""
        if len(self._keys.salts) != self._num_salts:
            self._num_salts = len(self._keys.salts)
            self._ask(self._report_unreported)

    def close(self) -> None:
        """Report the remaining events, and end the thread."""
        self._calls.put(None)
        self._thread.join(_CLOSE_S)

    def _ask(self, call: Callable[[], object]) -> None:
        if self._calls.qsize() < MOST_WAITING:
            self._calls.put(call)
        else:
            self.errors.note(BusyError(f"{MOST_WAITING} events wait for a listener; one is lost"))

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            with self.errors.survived():
                call()

    def _take(self, store_id: StoreId, event: OffloadingEvent, *, is_counted: bool) -> None:
        unreported = self._unreported[store_id]
        known = []
        for key in event.keys:
            obj = self._keys.decode(store_id.model, key)
            if unreported[key] and event.removed:
                unreported[key] -= 1
            elif obj is not None:
                known.append(obj)
            elif is_counted and not event.removed:
                unreported[key] += 1
            if not unreported[key]:
                del unreported[key]
        report = self._deleted if event.removed else self._stored
        self._report(report, known, store_id.object_bytes * is_counted)

    def _report_unreported(self) -> None:
        for store_id, unreported in self._unreported.items():
            known = {key: self._keys.decode(store_id.model, key) for key in unreported}
            found = {key: obj for key, obj in known.items() if obj is not None}
            objects = [obj for key, obj in found.items() for _ in range(unreported[key])]
            for key in found:
                del unreported[key]
            self._report(self._stored, objects, store_id.object_bytes)

    def _report(self, report: Report, objects: Sequence[Any], size: int) -> None:
        for first in range(0, len(objects), _KEYS_AT_ONCE):
            some = list(objects[first : first + _KEYS_AT_ONCE])
            with self.errors.survived():
                report(some, [size] * len(some))
