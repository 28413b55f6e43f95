"""This package's tiers as an L2 adapter of LMCache's multi-process mode.

    {"type": "plugin", "module_path": "kvoffload_async.integrations.lmcache",
     "class_name": "KVOffloadL2Adapter",
     "adapter_params": {"tier": {"type": "slab", "root_dir": "/srv/kv", "capacity_bytes": "1TiB"}}}

LMCache reuses memory as soon as a transfer is reported. So a transfer in its memory whose copy
still runs at the deadline is reported when the copy has ended; see `facade.plugged`. LMCache's
listeners hear which objects the tiers have from a thread of its own.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from itertools import count
from operator import methodcaller
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, TypeVar

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed import api
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from kvoffload_async.error_log import ErrorLog
from kvoffload_async.errors import BusyError, StateError, naming_shortage
from kvoffload_async.facade.host_rows import HostMemory
from kvoffload_async.facade.plugged import statistics_of
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.integrations.lmcache.keys import Keys, KeySet, StoreId
from kvoffload_async.integrations.lmcache.settings import AdapterOptions
from kvoffload_async.integrations.lmcache.staging import HostBlock
from kvoffload_async.integrations.lmcache.stores import OpenStore, Store, Stores, page_of
from kvoffload_async.observe.prometheus import publish
from kvoffload_async.runtime.lifetime import Closing, guard_forks
from kvoffload_async.runtime.log_level import show_log
from kvoffload_async.statistics import OffloadingStatistics
from kvoffload_async.status.server import EngineStatus
from kvoffload_async.types import OffloadingEvent, OffloadKey

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import KeyListPage, MemoryLayoutDesc, ObjectKey
    from lmcache.v1.distributed.internal_api import L1MemoryDesc
    from lmcache.v1.memory_management import MemoryObj

logger = logging.getLogger(__name__)

T = TypeVar("T")

Groups = dict[StoreId, list[int]]
"""Store -> positions of the store's keys in a call."""


class KVOffloadL2Adapter(L2AdapterInterface):
    """Stores LMCache's objects in the tiers that the adapter's options configure.

    Thread-safe. No call blocks but `close`.
    """

    def __init__(
        self, params: Mapping[str, Any], l1_memory_desc: L1MemoryDesc | None = None
    ) -> None:
        """Check the options; each store is opened when a call first names one of its objects.

        Args:
            params: See `AdapterOptions`.
            l1_memory_desc: LMCache's memory; without it, every object is copied once more.

        Raises:
            ConfigError: An option is missing, unknown or invalid; a `ValueError`.
        """
        options = AdapterOptions.parse(params)
        show_log()
        # LMCache must not evict: the tiers do, and it is notified.
        super().__init__(max_capacity_bytes=0)
        host = None
        if l1_memory_desc is not None:
            host = HostMemory(l1_memory_desc.ptr, l1_memory_desc.size)
        self._options = options
        self._keys = Keys(api.ObjectKey, options.known_tenants)
        self._stores = Stores(options, host, self._take_events)
        self._errors = ErrorLog(logger, "a request")
        self._task_ids = count(1)
        self._lock = threading.Lock()
        self._done_stores: dict[int, L2StoreResult] = {}
        self._done_lookups: dict[int, Bitmap] = {}
        self._done_loads: dict[int, Bitmap] = {}
        self._cannot_delete = self._cannot_encode = False
        self._without_key = 0
        self._is_closing = self._is_closed = False
        self._closing: Closing[None] = Closing()
        with ExitStack() as undo:
            self._status = EngineStatus(None)
            self._status.listen(options.status_socket)
            undo.callback(self._status.close)
            self._usage = UsageReporter(self._keys, self)
            undo.callback(self._usage.close)
            self._fds = [undo.enter_context(closing(create_event_notifier())) for _ in range(3)]
            undo.pop_all()
        self._store_fd, self._lookup_fd, self._load_fd = self._fds
        self._status.serve(self.stats, self._slowest)
        self._unpublish = publish("lmcache", self.stats)
        guard_forks(self, _closing=Closing.closed(None))

    # -- event descriptors ------------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        """Return the descriptor that is readable when a store has ended."""
        return int(self._store_fd.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return the descriptor that is readable when a lookup has ended."""
        return int(self._lookup_fd.fileno())

    def get_load_event_fd(self) -> int:
        """Return the descriptor that is readable when a load has ended."""
        return int(self._load_fd.fileno())

    # -- stores -----------------------------------------------------------------------------------

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Store objects; if a key occurs twice, only its first object is stored."""
        task_id = next(self._task_ids)
        groups, encoded = self._groups(keys, [obj.get_size() for obj in objects])
        blocks = _host_blocks(encoded, objects)
        with self._lock:
            self._without_key += encoded.count(None)

        def report(stored: list[bool]) -> None:
            num_bytes = sum(obj.get_size() for obj in objects)
            result = L2StoreResult(success=all(stored), bytes_transferred=num_bytes)
            self._finish(task_id, result, self._done_stores, self._store_fd)

        answer = _Answer(encoded, report)
        for store_id, indices in groups.items():
            distinct = list({blocks[i].key: blocks[i] for i in reversed(indices)}.values())[::-1]
            store = self._stores.of(store_id, len(distinct))
            self._ask(store, methodcaller("store", distinct), answer, indices)
        answer.end_part()
        return task_id

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Return the results of the stores that ended since the last call."""
        with self._lock:
            done = self._done_stores.copy()
            self._done_stores.clear()
        return done

    # -- lookups ----------------------------------------------------------------------------------

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Look up objects; tiers that can pin blocks keep found objects until they are unlocked."""
        task_id = next(self._task_ids)
        sizes = {group: _bytes_of(desc) for group, desc in group_layout_descs.items()}
        groups, encoded = self._groups(keys, [sizes.get(key.object_group_id, 0) for key in keys])

        def report(found: list[bool]) -> None:
            self._finish(task_id, _bitmap(found), self._done_lookups, self._lookup_fd)

        answer = _Answer(encoded, report)
        for store_id, indices in groups.items():
            distinct = list(dict.fromkeys(key for i in indices if (key := encoded[i])))
            look_up, timeout_s = partial(self._look_up, distinct), self._options.lookup_timeout_s
            self._ask(self._stores.of(store_id), look_up, answer, indices, timeout_s)
        answer.end_part()
        return task_id

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Return which keys were found, once; None before the lookup has ended."""
        with self._lock:
            return self._done_lookups.pop(task_id, None)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Remove one lock from each object that has one; never fails."""
        for store, encoded in self._open_stores_of(keys):
            store.tiers.unpin(encoded)

    # -- loads ------------------------------------------------------------------------------------

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Load objects; a key that occurs twice is loaded into both objects."""
        task_id = next(self._task_ids)
        groups, encoded = self._groups(keys, [obj.get_size() for obj in objects])
        blocks = _host_blocks(encoded, objects)

        def report(loaded: list[bool]) -> None:
            accessed = [key for key, is_loaded in zip(keys, loaded, strict=True) if is_loaded]
            if accessed:
                self._usage.accessed(accessed)
            self._finish(task_id, _bitmap(loaded), self._done_loads, self._load_fd)

        answer = _Answer(encoded, report)
        for store_id, indices in groups.items():
            store = self._stores.of(store_id)
            for once in _rounds(encoded, indices):
                load = methodcaller("load", [blocks[i] for i in once])
                self._ask(store, load, answer, once)
        answer.end_part()
        return task_id

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Return which keys were loaded, once; None before the load has ended."""
        with self._lock:
            return self._done_loads.pop(task_id, None)

    # -- contents ---------------------------------------------------------------------------------

    def delete(self, keys: list[ObjectKey]) -> None:
        """Remove objects that are not in use; each removal is announced when it has been done.

        With several tiers, those that cannot remove objects keep them.

        Raises:
            NotImplementedError: Some objects were not removed, because no tier of their store can
                remove objects, or their store is not open.
        """
        if self._is_closing:
            return
        refused = []
        missing = {(key.model_name, key.object_group_id) for key in keys}
        for store, encoded in self._open_stores_of(keys):
            missing.discard(store.store_id[:2])
            unable = store.tiers.discard(encoded)
            if len(unable) == len(store.tiers.managers):
                refused.append(f"tiers of type {', '.join(unable)} cannot remove single objects")
            elif unable and not self._cannot_delete:
                self._cannot_delete = True
                logger.warning(
                    "LMCache asked to delete objects; tiers of type %s cannot, so they keep them",
                    ", ".join(unable),
                )
        for model, group in sorted(missing):
            refused.append(
                f"the store of model {model!r}, group {group} is not open: it is opened by the "
                "first request that names it"
            )
        if refused:
            raise NotImplementedError("objects were not removed: " + "; ".join(refused))

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        """Return a page of the objects in open stores; see `page_of` for arguments and errors."""
        objects, following = page_of(
            self._stores.every(), self._keys, model_name, page_size, cursor
        )
        entries = [api.KeyEntry(key.to_encoded_object_key(), size) for key, size in objects]
        return api.KeyListPage(tuple(entries), following)

    def report_status(self) -> dict[str, Any]:
        """Return whether the adapter works, and the state of each store and of its tiers.

        It is healthy unless a store could not be opened, or a breaker of a tier is open.
        """
        stores = [_status_of(store) for store in self._stores.every()]
        return {
            "is_healthy": not self._is_closed and all(store["is_healthy"] for store in stores),
            "type": type(self).__name__,
            "stores": stores,
            "num_stores": self._options.num_stores,
            "refused_objects": self._stores.refused_objects,
            "objects_without_key": self._without_key,
            "listener_errors": self._usage.errors.count,
            "request_errors": self._errors.count,
        }

    def stats(self) -> OffloadingStatistics:
        """Return the statistics of the open stores' tiers. Thread: any."""
        stores = [store.opened for store in self._stores.every()]
        return statistics_of((store.tiers, store.rows) for store in stores if store is not None)

    def close(self) -> None:
        """Wait up to `close_timeout_s` for running transfers, and close the stores; idempotent.

        A call while another thread closes the adapter waits for it. In a forked child it does
        nothing.

        Raises:
            StateError: Called out of a listener or callback, for which it would wait; nothing is
                changed.
            TierTimeoutError: Another thread has not closed it within its time.
        """
        if threading.current_thread().name.startswith("kvoffload-"):
            raise StateError(
                "close() was called on a thread of the adapter, for which it waits; call it on "
                "another thread"
            )
        self._closing.run(self._close, self._options.close_timeout_s)

    def _close(self, timeout_s: float) -> None:
        self._is_closing = True
        self._unpublish()
        self._status.close()
        self._stores.close(timeout_s)
        self._usage.close()
        with self._lock:  # nothing is signalled from here on
            self._is_closed = True
        for notifier in self._fds:
            notifier.close()

    # -- inside -----------------------------------------------------------------------------------

    def _slowest(self) -> None:
        """Return None: the requests belong to LMCache, so no timelines are recorded."""

    def _take_events(
        self, store_id: StoreId, manager: SecondaryTierManager, events: Sequence[OffloadingEvent]
    ) -> None:
        is_counted = manager.tier.capabilities.announces_removals
        self._usage.take(store_id, events, is_counted=is_counted)

    def _groups(
        self, keys: Sequence[ObjectKey], sizes: Sequence[int]
    ) -> tuple[Groups, list[OffloadKey | None]]:
        """Group keys by their stores, and encode them; None for keys that fit no tier.

        Args:
            keys: The keys.
            sizes: Their objects' sizes; 0 if unknown: then the size that was last used applies.
        """
        indices: dict[tuple[str, int, int], list[int]] = {}
        encoded = [self._encode(key) for key in keys]
        for index, (key, size) in enumerate(zip(keys, sizes, strict=True)):
            if encoded[index] is not None:
                indices.setdefault((key.model_name, key.object_group_id, size), []).append(index)
        self._usage.salts_changed()
        groups: Groups = {}
        for (model, group, size), found in indices.items():
            store_id = StoreId(model, group, size) if size else self._stores.latest(model, group)
            if store_id is not None:
                groups.setdefault(store_id, []).extend(found)
        return groups, encoded

    def _encode(self, key: ObjectKey) -> OffloadKey | None:
        try:
            return self._keys.encode(key)
        except (OverflowError, ValueError) as error:
            if not self._cannot_encode:
                self._cannot_encode = True
                logger.error("objects are not stored: %s", error)  # noqa: TRY400 - expected
            return None

    def _open_stores_of(
        self, keys: Sequence[ObjectKey]
    ) -> Iterable[tuple[OpenStore, list[OffloadKey]]]:
        """Yield each open store of the keys' models and groups, with the matching distinct keys."""
        by_group: dict[tuple[str, int], dict[OffloadKey, None]] = defaultdict(dict)
        for key in keys:
            if (encoded := self._encode(key)) is not None:
                by_group[key.model_name, key.object_group_id][encoded] = None
        for store in self._stores.every():
            encoded_keys = by_group.get(store.store_id[:2])
            if encoded_keys and (opened := store.opened) is not None:
                yield opened, list(encoded_keys)

    def _look_up(self, keys: Sequence[OffloadKey], store: OpenStore) -> list[Future[KeySet]]:
        """Look up keys in an open store, and pin the found ones."""
        future: Future[KeySet] = Future()

        def report(looked_up: Future[list[bool]]) -> None:
            hits = zip(keys, looked_up.result(), strict=True)
            found = [key for key, is_found in hits if is_found]
            if found:
                store.tiers.pin(found, self._options.lock_timeout_s)
            future.set_result(frozenset(found))

        looked_up = store.tiers.lookup(keys, self._options.lookup_timeout_s)
        looked_up.add_done_callback(report)
        return [future]

    def _ask(
        self,
        store: Store | None,
        act: Callable[[OpenStore], Iterable[Future[KeySet]]],
        answer: _Answer,
        indices: Sequence[int],
        timeout_s: float | None = None,
    ) -> None:
        """Call `act` once a store is open; `answer` waits for the futures that `act` returns.

        Nothing is found if the store does not open, or not within `timeout_s`.
        """
        if store is None:
            return
        opening = store.when_open()

        def begin(_opening: Future[OpenStore | None]) -> None:
            opened = None if opening.cancelled() else opening.result()
            if opened is not None:
                with self._errors.survived():  # else LMCache would wait for the result forever
                    for part in act(opened):
                        answer.expect(part, indices)

        answer.await_part(opening, begin)
        if timeout_s is not None and not opening.done():
            timer = threading.Timer(timeout_s, opening.cancel)
            timer.daemon = True
            opening.add_done_callback(lambda _: timer.cancel())
            try:
                timer.start()
            except RuntimeError:  # there is no thread that could end the wait
                opening.cancel()

    def _finish(self, task_id: int, result: T, done: dict[int, T], notifier: Any) -> None:  # noqa: ANN401 - LMCache's
        """Notify LMCache that a task has ended, and keep the result until LMCache takes it."""
        with self._lock:
            done[task_id] = result
            if not self._is_closed:
                notifier.notify()


class _Answer:
    """Collects the results of a call's parts, and reports one result per position of its keys."""

    def __init__(
        self, keys: Sequence[OffloadKey | None], report: Callable[[list[bool]], object]
    ) -> None:
        self._keys = keys
        self._report = report
        self._lock = threading.Lock()
        self._left = 1
        """Number of parts without a result; starting the other parts counts as a part."""
        self._results = [False] * len(keys)

    def expect(self, part: Future[KeySet], indices: Sequence[int]) -> None:
        """Wait for a part's future of keys; only keys at `indices` may be among them."""

        def take(part: Future[KeySet]) -> None:
            landed = part.result()
            for index in indices:
                if self._keys[index] in landed:
                    self._results[index] = True

        self.await_part(part, take)

    def await_part(self, part: Future[T], take: Callable[[Future[T]], object]) -> None:
        """Wait for the future of a part; `take` is called with it when it is done."""
        with self._lock:
            self._left += 1

        def end(ended: Future[T]) -> None:
            take(ended)
            self.end_part()

        part.add_done_callback(end)

    def end_part(self) -> None:
        """Count a part as ended; the last part to end reports the results."""
        with self._lock:
            self._left -= 1
            is_last = not self._left
        if is_last:
            self._report(self._results)


def _host_blocks(
    keys: Sequence[OffloadKey | None], objects: Sequence[MemoryObj]
) -> list[HostBlock]:
    """Return the objects with keys and addresses; objects whose key is None are not used."""
    return [
        HostBlock(key or OffloadKey(b""), obj.data_ptr, obj)
        for key, obj in zip(keys, objects, strict=True)
    ]


def _rounds(keys: Sequence[OffloadKey | None], indices: Sequence[int]) -> list[list[int]]:
    """Divide positions into rounds, such that no key occurs twice in a round."""
    if len({keys[index] for index in indices}) == len(indices):
        return [list(indices)]
    rounds: list[list[int]] = []
    seen: Counter[OffloadKey | None] = Counter()
    for index in indices:
        number = seen[keys[index]]
        seen[keys[index]] += 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(index)
    return rounds


def _bitmap(flags: Sequence[bool]) -> Bitmap:
    bitmap = Bitmap(len(flags))
    for index, flag in enumerate(flags):
        if flag:
            bitmap.set(index)
    return bitmap


def _bytes_of(layout: MemoryLayoutDesc) -> int:
    """Return the size of an object; 0 if the layout is not given."""
    return sum(
        shape.numel() * dtype.itemsize
        for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True)
    )


def _status_of(store: Store) -> dict[str, Any]:
    """Return the state of a store in types that JSON can represent."""
    store_id, opened = store.store_id, store.opened
    tiers = [] if opened is None else [asdict(tier) for tier in opened.tiers.stats()]
    works = all(set(tier["breakers"].values()) == {"closed"} for tier in tiers)
    return {
        **store_id._asdict(),
        "is_healthy": store.error is None and works,
        "is_open": opened is not None,
        "error": store.error,
        "objects_in_place": 0 if opened is None else opened.in_place,
        "objects_staged": 0 if opened is None else opened.staged,
        "copy_errors": 0 if opened is None else opened.stage.errors.count,
        "tiers": tiers,
    }


_CLOSE_S: Final = 5.0
_KEYS_AT_ONCE: Final = 4096
MOST_WAITING: Final = 65_536
"""Maximum number of events that wait for LMCache's listeners; further ones are dropped."""

Report = Callable[[list[Any], list[int]], object]
"""Called with keys and the sizes of their objects."""


class UsageReporter:
    """Reports to LMCache which objects were stored and removed.

    Objects of tiers that do not announce removals are reported with a size of 0, because their sum
    would only grow. Objects whose salt is not known yet are reported when a request has named it.

    An error of a listener of LMCache's ends one call only; the following ones are made.

    Thread-safe.

    Attributes:
        errors: Of listeners; events that were dropped, because one is too slow, count as well.
    """

    def __init__(self, keys: Keys, adapter: Any) -> None:  # noqa: ANN401 - LMCache's base class
        """Start the thread that calls LMCache's listeners.

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
        """Blocks whose salt is not known yet -> number of tiers that have them, if counted."""
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvoffload-usage", daemon=True)
        with naming_shortage("the thread for LMCache's usage counts cannot be started"):
            self._thread.start()

    def take(
        self, store_id: StoreId, events: Sequence[OffloadingEvent], *, is_counted: bool
    ) -> None:
        """Report the objects that a tier's events name.

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
        """Report the objects whose salt has become known."""
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
