"""Transfers of objects outside the primary's rows: through staging rows, on a thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple

import numpy as np

from kvoffload_async.error_log import ErrorLog
from kvoffload_async.errors import naming_shortage
from kvoffload_async.facade.host_rows import HostRows, RowCopies
from kvoffload_async.facade.plugged import Ended, PluggedTiers, Transfer
from kvoffload_async.integrations.lmcache.keys import KeySet
from kvoffload_async.types import BlockIds, OffloadKey

logger = logging.getLogger(__name__)

_IDLE_S: Final = 60.0
_CLOSE_S: Final = 5.0


class HostBlock(NamedTuple):
    """An object of LMCache in host memory.

    Attributes:
        key: Its key.
        address: Its first byte.
        owner: Keeps the memory.
    """

    key: OffloadKey
    address: int
    owner: Any


class _Request:
    """A requested transfer, which runs in parts of as many objects as rows are free."""

    __slots__ = ("deadline_s", "future", "is_load", "landed", "left", "running")

    def __init__(self, blocks: Sequence[HostBlock], deadline_s: float, *, is_load: bool) -> None:
        self.left = list(blocks)
        self.deadline_s = deadline_s
        self.is_load = is_load
        self.running = 0
        self.landed: set[OffloadKey] = set()
        self.future: Future[KeySet] = Future()

    def end_if_done(self) -> None:
        if not self.left and not self.running:
            self.future.set_result(frozenset(self.landed))


class StagedTransfers:
    """Copies objects to and from staging rows, which the tiers transfer.

    So a transfer ends in time whether or not a tier still accesses its rows, which stay taken until
    they are at rest; while none is free, transfers wait, until they fail at their deadline. An
    object that cannot be copied fails alone.

    Thread-safe.

    Attributes:
        errors: Of copies.
    """

    def __init__(self, rows: HostRows, tiers: PluggedTiers, timeout_s: float) -> None:
        """Start the thread that runs the transfers.

        Args:
            rows: Has the own rows.
            tiers: The tiers over these rows.
            timeout_s: Seconds until a transfer that has no rows yet fails.

        Raises:
            TierUnavailableError: Threads cannot be started.
        """
        self.errors = ErrorLog(logger, "copying objects to or from staging memory")
        self._rows = rows
        self._tiers = tiers
        self._timeout_s = timeout_s
        self._copies = RowCopies(rows)
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._waiting: deque[_Request] = deque()
        self._thread = threading.Thread(target=self._run, name="kvoffload-stage", daemon=True)
        try:
            with naming_shortage("the thread for copies cannot be started"):
                self._thread.start()
        except BaseException:
            self._copies.close()
            raise

    def transfer(self, blocks: Sequence[HostBlock], *, is_load: bool) -> Future[KeySet]:
        """Store or load objects; the future returns the keys of the transferred objects.

        Objects are not accessed afterwards.
        """
        request = _Request(blocks, time.monotonic() + self._timeout_s, is_load=is_load)
        self._calls.put(partial(self._waiting.append, request))
        return request.future

    def close(self) -> None:
        """Fail waiting transfers, and end the thread; call it after the tiers were closed."""
        self._calls.put(None)
        self._thread.join(_CLOSE_S)
        self._copies.close()

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                call = self._calls.get(timeout=self._left_s())
            except Empty:
                call = _look_again
            if call is None:
                break
            with self.errors.survived():
                call()
            self._begin_waiting()
        for request in self._waiting:
            request.deadline_s = 0.0
        self._begin_waiting()
        while not self._calls.empty():  # ends that the calls before have brought about
            if (call := self._calls.get()) is not None:
                with self.errors.survived():
                    call()

    def _left_s(self) -> float:
        if not self._waiting:
            return _IDLE_S
        return max(0.0, self._waiting[0].deadline_s - time.monotonic())

    def _begin_waiting(self) -> None:
        """Begin waiting transfers, oldest first, while rows are free; fail the overdue ones."""
        while self._waiting:
            request = self._waiting[0]
            if request.left and time.monotonic() < request.deadline_s:
                rows = self._rows.take(len(request.left))
                if not len(rows):
                    return
                blocks, request.left = request.left[: len(rows)], request.left[len(rows) :]
                with self.errors.survived():
                    self._begin(request, blocks, rows)
            else:
                request.left.clear()
                self._waiting.popleft()
                request.end_if_done()

    def _begin(self, request: _Request, blocks: Sequence[HostBlock], rows: BlockIds) -> None:
        keys = [block.key for block in blocks]
        if request.is_load:
            transfer = self._tiers.load(keys, rows)
        elif self._has_copied(self._copies.gather, blocks, rows):
            transfer = self._tiers.store(keys, rows)
            transfer.at_rest.add_done_callback(partial(self._free, rows))
        else:
            self._rows.give_back(rows)
            return
        request.running += 1
        transfer.ended.add_done_callback(
            lambda ended: self._calls.put(
                partial(self._ended, request, blocks, transfer, ended.result())
            )
        )

    def _ended(
        self, request: _Request, blocks: Sequence[HostBlock], transfer: Transfer, ended: Ended
    ) -> None:
        request.running -= 1
        if not request.is_load:
            request.landed |= ended.keys
        else:
            loaded = [index for index, block in enumerate(blocks) if block.key in ended.keys]
            rows, targets = transfer.block_ids, [blocks[index] for index in loaded]
            if self._has_copied(self._copies.scatter, targets, rows[loaded]):
                request.landed |= ended.keys
            transfer.at_rest.add_done_callback(partial(self._free, rows))
        if request not in self._waiting:
            request.end_if_done()

    def _has_copied(
        self, copy: Callable[..., None], blocks: Sequence[HostBlock], rows: BlockIds
    ) -> bool:
        """Copy objects to or from rows; return whether the copy succeeded."""
        addresses = np.array([[block.address] for block in blocks], dtype=np.int64)
        try:
            if len(blocks):
                copy(rows, addresses, np.full_like(addresses, self._rows.row_bytes))
        except Exception as error:  # noqa: BLE001 - the objects fail
            self.errors.note(error)
            return False
        return True

    def _free(self, rows: BlockIds, _at_rest: Future[None]) -> None:
        self._rows.give_back(rows)
        self._calls.put(_look_again)


def _look_again() -> None:
    """Do nothing: queued as a call, it wakes the thread."""
