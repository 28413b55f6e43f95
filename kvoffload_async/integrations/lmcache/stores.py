"""The stores of the adapter: one for each combination of model, object group and object size.

A store is opened on a thread of its own when a request first names it; requests wait for that. A
store that cannot be opened has no objects and takes none; a later request opens it again, after a
pause that doubles from 1 s to 60 s.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

from kvoffload_async.errors import text_of
from kvoffload_async.facade.host_rows import HostMemory, HostRows
from kvoffload_async.facade.plugged import ListPosition, OnEvents, PluggedTiers, Transfer
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.facade.tier_group import pauses_s
from kvoffload_async.integrations.lmcache.keys import Keys, KeySet, StoreId
from kvoffload_async.integrations.lmcache.settings import AdapterOptions
from kvoffload_async.integrations.lmcache.staging import HostBlock, StagedTransfers
from kvoffload_async.types import OffloadingEvent, OffloadKey, as_block_ids

logger = logging.getLogger(__name__)

MOST_DIRECT_LOADS: Final = 4
"""Maximum number of concurrent loads into LMCache's memory. A hung load is reported only when
its copy has ended, and occupies one of LMCache's prefetches until then (8 by default); further
loads use staging rows."""
_MOST_WAITING: Final = 1024
"""Maximum number of requests that wait for a store to open; further ones fail."""
_CLOSE_LATE_S: Final = 1.0
"""Timeout in seconds for closing a store that was opened after the adapter was closed."""

_abandoned: Final[list[object]] = []
"""Memory kept allocated because copies may still access it after the adapter was closed."""


class OpenStore:
    """The tiers of an open store, with transfers of objects in place and through staging rows.

    Attributes:
        store_id: Names the store.
        tiers: The tiers.
        rows: Their primary.
        in_place: Objects transferred without a copy.
        staged: Objects transferred through own rows.
        stage: Transfers them.
    """

    def __init__(
        self,
        store: StoreId,
        options: AdapterOptions,
        host: HostMemory | None,
        on_events: OnEvents,
    ) -> None:
        """Open the tiers of a store; blocks. Raises the errors of `PluggedTiers`."""
        self.store_id = store
        tiers = [options.tier_of(tier, store) for tier in options.tier]
        num_own = max(1, options.staging_bytes // store.object_bytes)
        self.rows = HostRows(store.object_bytes, num_own, host)
        self.in_place = self.staged = 0
        self._lock = threading.Lock()
        self._direct_loads: set[Transfer] = set()
        """Loads whose copies still access LMCache's memory; late if their result was reported."""
        with ExitStack() as undo:
            undo.callback(self.rows.close)
            self.tiers = PluggedTiers(tiers, self.rows.view, on_events=on_events)
            undo.callback(self.tiers.close, options.close_timeout_s)
            timeout_s = max(manager.io_timeout_s for manager in self.tiers.managers)
            self.stage = StagedTransfers(self.rows, self.tiers, timeout_s)
            undo.pop_all()

    def store(self, blocks: Sequence[HostBlock]) -> list[Future[KeySet]]:
        """Store distinct objects; each future returns stored keys once their objects may change."""
        return self._transfer(blocks, is_load=False)

    def load(self, blocks: Sequence[HostBlock]) -> list[Future[KeySet]]:
        """Load distinct objects; each future returns loaded keys once their objects may be used."""
        return self._transfer(blocks, is_load=True)

    def close(self, timeout_s: float) -> None:
        """Close the tiers; afterwards every future is complete, except those of hung copies."""
        report = self.tiers.close(timeout_s)
        self.stage.close()
        if report.unfinished_jobs:
            logger.error(
                "copies of jobs %s still run; the memory that they access stays allocated",
                ", ".join(map(str, report.unfinished_jobs)),
            )
            _abandoned.append(self)
        self.rows.close(is_idle=not report.unfinished_jobs)

    def _transfer(self, blocks: Sequence[HostBlock], *, is_load: bool) -> list[Future[KeySet]]:
        """Transfer objects that lie in rows in place, and all others through staging rows."""
        rows = [self.rows.row_of(block.address) for block in blocks]
        if is_load and not self._may_load_in_place():
            rows = [None] * len(blocks)
        pairs = list(zip(blocks, rows, strict=True))
        direct = {block.key: row for block, row in pairs if row is not None}
        others = [block for block, row in pairs if row is None]
        parts = []
        if direct:
            submit = self.tiers.load if is_load else self.tiers.store
            transfer = submit(list(direct), as_block_ids(direct.values()))
            if is_load:
                with self._lock:
                    self._direct_loads.add(transfer)
                transfer.at_rest.add_done_callback(partial(self._note_at_rest, transfer))
            parts.append(_at_rest(transfer, blocks))
        if others:
            parts.append(self.stage.transfer(others, is_load=is_load))
        with self._lock:
            self.in_place += len(direct)
            self.staged += len(others)
        return parts

    def _may_load_in_place(self) -> bool:
        """Return whether another load into LMCache's memory may run: few run, and none is late."""
        with self._lock:
            is_late = any(load.ended.done() for load in self._direct_loads)
            return not is_late and len(self._direct_loads) < MOST_DIRECT_LOADS

    def _note_at_rest(self, transfer: Transfer, _at_rest: Future[None]) -> None:
        with self._lock:
            self._direct_loads.discard(transfer)


def _at_rest(transfer: Transfer, blocks: Sequence[HostBlock]) -> Future[KeySet]:
    """Return a future of the transferred keys, done when no copy runs; it retains the objects."""
    future: Future[KeySet] = Future()

    def complete(_kept: Sequence[HostBlock], _at_rest: Future[None]) -> None:
        future.set_result(transfer.ended.result().keys)

    transfer.at_rest.add_done_callback(partial(complete, tuple(blocks)))
    return future


class Store:
    """One store of the adapter, opened on first use.

        CLOSED --asked, pause elapsed--> OPENING --> OPEN | CLOSED (with an error)

    Thread-safe, except `close`.

    Attributes:
        store_id: Names it.
        opened: The open store; None while it is not open.
        error: Why it could not be opened last time.
    """

    def __init__(self, store_id: StoreId, open_store: Callable[[], OpenStore]) -> None:
        """Create a closed store.

        Args:
            store_id: Names it.
            open_store: Opens it; blocks.
        """
        self.store_id = store_id
        self.opened: OpenStore | None = None
        self.error: str | None = None
        self._open_store = open_store
        self._lock = threading.Lock()
        self._waiting: list[Future[OpenStore | None]] = []
        self._thread: threading.Thread | None = None
        self._retry_at_s = 0.0
        self._pauses_s = pauses_s()
        self._is_ended = False

    def when_open(self) -> Future[OpenStore | None]:
        """Return a future of the open store, or of None if it cannot be opened. Non-blocking.

        Opens the store if it is due. The caller may cancel the future.
        """
        future: Future[OpenStore | None] = Future()
        with self._lock:
            opened = None if self._is_ended else self.opened
            if opened is None and self._may_wait():
                self._waiting.append(future)
                return future
        future.set_result(opened)
        return future

    def close(self, timeout_s: float) -> None:
        """Close the store, waiting for it if it is being opened; idempotent."""
        with self._lock:
            self._is_ended = True
            thread = self._thread
        deadline_s = time.monotonic() + timeout_s
        if thread is not None:
            thread.join(timeout_s)
        if self.opened is not None:
            self.opened.close(max(0.0, deadline_s - time.monotonic()))
            self.opened = None

    def _may_wait(self) -> bool:
        """Return whether a request may wait for the store, and begin to open it if due."""
        if self._is_ended or len(self._waiting) >= _MOST_WAITING:
            return False
        if self._thread is None:
            if time.monotonic() < self._retry_at_s:
                return False
            thread = threading.Thread(target=self._open, name="kvoffload-open", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no more threads
                self._failed(error)
                return False
            self._thread = thread
        return True

    def _open(self) -> None:
        opened: OpenStore | None = None
        try:
            opened = self._open_store()
        except BaseException as error:  # noqa: BLE001 - third-party tiers; the store stays closed
            with self._lock:
                self._failed(error)
        with self._lock:
            self._thread = None
            waiting, self._waiting = self._waiting, []
            is_ended = self._is_ended
            if opened is not None and not is_ended:
                self.opened, self.error, self._pauses_s = opened, None, pauses_s()
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_result(None if is_ended else opened)
        if is_ended and opened is not None:
            opened.close(_CLOSE_LATE_S)

    def _failed(self, error: BaseException) -> None:
        self.error = text_of(error)
        pause_s = next(self._pauses_s)
        self._retry_at_s = time.monotonic() + pause_s
        logger.error(
            "the store of model %s cannot be opened, and is tried again after %g s: %s",
            self.store_id,
            pause_s,
            self.error,
        )


class Stores:
    """All stores of the adapter. Thread-safe, except `close`.

    Attributes:
        options: The adapter's options.
        refused_objects: Objects that were not stored because there are `num_stores` others.
    """

    def __init__(
        self,
        options: AdapterOptions,
        host: HostMemory | None,
        on_events: Callable[[StoreId, SecondaryTierManager, Sequence[OffloadingEvent]], object],
    ) -> None:
        """Create the object without any store.

        Args:
            options: The adapter's options.
            host: LMCache's memory.
            on_events: Called with the events of a store.
        """
        self.options = options
        self.refused_objects = 0
        self._host = host
        self._on_events = on_events
        self._lock = threading.Lock()
        self._stores: dict[StoreId, Store] = {}
        self._latest: dict[tuple[str, int], StoreId] = {}

    def of(self, store_id: StoreId, num_objects: int = 0) -> Store | None:
        """Return a store, created if necessary; None if the maximum number of stores is reached.

        Args:
            store_id: Names it.
            num_objects: Objects to store; counted if they are refused.
        """
        with self._lock:
            store = self._stores.get(store_id)
            if store is None:
                if len(self._stores) >= self.options.num_stores:
                    self._refuse(store_id, num_objects)
                    return None
                store = Store(store_id, partial(self._open, store_id))
                self._stores[store_id] = store
            self._latest[store_id.model, store_id.group] = store_id
            return store

    def latest(self, model: str, group: int) -> StoreId | None:
        """Return the store that was last used for a model's object group."""
        return self._latest.get((model, group))

    def every(self) -> list[Store]:
        """Return all stores."""
        with self._lock:
            return list(self._stores.values())

    def close(self, timeout_s: float) -> None:
        """Close all stores, with a common timeout."""
        deadline_s = time.monotonic() + timeout_s
        for store in self.every():
            store.close(max(0.0, deadline_s - time.monotonic()))

    def _open(self, store_id: StoreId) -> OpenStore:
        return OpenStore(store_id, self.options, self._host, partial(self._on_events, store_id))

    def _refuse(self, store_id: StoreId, num_objects: int) -> None:
        if not self.refused_objects and num_objects:
            logger.error(
                "num_stores: %d: objects of %s are not stored, because there already is a store of "
                "%s; raise num_stores, which divides capacity_bytes, or restart LMCache",
                self.options.num_stores,
                store_id,
                " and of ".join(map(str, self._stores)),
            )
        self.refused_objects += num_objects


_CURSOR: Final = re.compile(r"(\d{1,6})\.(\d{1,6})\.((?:[0-9a-f]{2}){5,96}|)")
"""Matches a page cursor: numbers of the store and of the tier, and the last key."""


def page_of(
    stores: Sequence[Store], keys: Keys, model: str | None, page_size: int, cursor: str | None
) -> tuple[list[tuple[Any, int]], str | None]:
    """Return a page of the objects in open stores.

    Args:
        stores: The stores, in the same order in all calls; further ones may follow.
        keys: Decodes keys; an object whose salt is not known is left out.
        model: Name of the only model to list; None: all.
        page_size: Maximum number of objects.
        cursor: The cursor that came with the page before; None: the first page.

    Returns:
        Keys of objects with their sizes, and the cursor of the next page; None after the last one.

    Raises:
        NotImplementedError: A store has a tier that does not know its contents.
        ValueError: `page_size` or `cursor` is not valid.
    """
    if page_size <= 0:
        raise ValueError(f"page_size: {page_size} is not valid; give a positive number")
    number, position = _parsed(cursor)
    objects: list[tuple[Any, int]] = []
    while number < len(stores) and len(objects) < page_size:
        (name, _, size), opened = stores[number].store_id, stores[number].opened
        after = None
        if opened is not None and model in {None, name}:
            if unlisted := opened.tiers.unlisted:
                raise NotImplementedError(
                    f"tiers of type {', '.join(unlisted)} do not know their contents; slab does, "
                    "and fs with capacity_bytes"
                )
            found, after = opened.tiers.list_keys(position, page_size - len(objects))
            decoded = (keys.decode(name, key) for key in found)
            objects += [(key, size) for key in decoded if key is not None]
        number, position = (number + 1, ListPosition()) if after is None else (number, after)
    if number >= len(stores):
        return objects, None
    return objects, f"{number}.{position.tier}.{(position.key or b'').hex()}"


def _parsed(cursor: str | None) -> tuple[int, ListPosition]:
    """Parse a page cursor: number of the store, and position in it; raises ValueError."""
    if cursor is None:
        return 0, ListPosition()
    found = _CURSOR.fullmatch(cursor)
    if found is None:
        raise ValueError(f"cursor: {cursor!r} is not valid; give the token of the page before")
    store, tier, key = found.groups()
    return int(store), ListPosition(int(tier), OffloadKey(bytes.fromhex(key)) if key else None)
