"""Stores the pages of one host pool in tiers, by blocking calls with a deadline.

Stores and loads have rows of their own. A call gathers its pages into rows, or scatters them from
rows, and the tiers' jobs access the rows only. So a call returns at the jobs' deadline although a
copy of a hung tier still runs, and SGLang may reuse the pages; the rows stay taken until that copy
has ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from threading import Condition, Lock
from typing import Any, Final, TypeVar

import numpy as np
import torch

from kvoffload_async.abc.tier import CloseReport, Direction
from kvoffload_async.config import TierOptions
from kvoffload_async.errors import ClosedError, StateError, TierTimeoutError, TierUnavailableError
from kvoffload_async.facade.host_rows import HostRows, RowCopies
from kvoffload_async.facade.plugged import Ended, ListPosition, PluggedTiers, statistics_of
from kvoffload_async.integrations.sglang.pages import Numbers, PoolPages
from kvoffload_async.runtime.buffer import row_stride_bytes
from kvoffload_async.runtime.lifetime import Closing, guard_forks
from kvoffload_async.statistics import OffloadingStatistics
from kvoffload_async.types import BlockIds, OffloadKey, as_block_ids

T = TypeVar("T")
_NO_REPORT: Final = Ended(frozenset(), TierTimeoutError("the tiers did not report in time"))

logger = logging.getLogger(__name__)

_KEYS_AT_ONCE: Final = 4096
_LOOK_AGAIN_S: Final = 0.1
"""Seconds until the removal of pages that were in use is retried."""
_GRACE_S: Final = 5.0
"""Seconds after the tiers' deadline until a call stops waiting for their report."""


class _Staging:
    """One direction's share of the staging rows, and its copies to or from them. Thread-safe."""

    def __init__(self, rows: HostRows, count: int, direction: Direction) -> None:
        """Start the copy threads; raises TierUnavailableError if they cannot be started."""
        self._rows = rows
        self._copies = RowCopies(rows)
        is_store = direction is Direction.STORE
        self._copy = self._copies.gather if is_store else self._copies.scatter
        self._lock = Lock()
        self._is_closed = False
        self._room = count
        self._is_given = Condition()

    def copy(self, rows: BlockIds, addresses: Numbers, sizes: Numbers) -> None:
        """Copy pages between rows and the pool or tensors; blocks until the copy has ended.

        Native threads copy without the interpreter's lock. There is no timeout: copies in memory
        always end.

        Args:
            rows: The rows, `[n]`.
            addresses: Address of each part of the pages, `[n, parts of a page]`.
            sizes: Bytes of each part, `[parts of a page]`.

        Raises:
            ClosedError: The store was closed.
        """
        with self._lock:
            if self._is_closed:
                raise ClosedError("the storage backend was closed")
            self._copy(rows, addresses, np.broadcast_to(sizes, addresses.shape))

    def take(self, most: int, timeout_s: float) -> BlockIds:
        """Take up to `most` free rows; returns no rows if none becomes free before the timeout."""
        with self._is_given:
            self._is_given.wait_for(lambda: self._room, timeout_s)
            count = min(most, self._room)
            self._room -= count
        return self._rows.take(count)

    def give_back(self, rows: BlockIds, _at_rest: Future[None] | None = None) -> None:
        """Free rows that no copy accesses any more."""
        self._rows.give_back(rows)
        with self._is_given:
            self._room += len(rows)
            self._is_given.notify_all()

    def close(self) -> None:
        """Wait for a running copy, and end the copy threads; idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._copies.close()


class PageStore:
    """Stores and loads the pages of one host pool. Thread-safe.

    A page that cannot be stored or loaded is reported as such; no method raises because of a tier.

    Attributes:
        page_bytes: Bytes of a page.
        tiers: The tiers.
    """

    def __init__(
        self, pages: PoolPages, tiers: Sequence[Mapping[str, Any]], most_pages: int, max_bytes: int
    ) -> None:
        """Map the staging rows and open the tiers; blocks until they are open.

        Args:
            pages: The pool's pages.
            tiers: Configuration of each tier.
            most_pages: Maximum number of pages per job.
            max_bytes: Maximum memory of the rows of each direction, if one page fits into it.

        Raises:
            ConfigError: A tier's configuration is unusable, or there is no memory. As for the other
                errors, nothing is left running.
            TierUnavailableError: A tier's storage cannot be reached.
            TierTimeoutError: A tier did not open in time.
        """
        self._pages = pages
        self.page_bytes = pages.page_bytes
        row_bytes = row_stride_bytes(pages.page_bytes)
        count = max(1, min(most_pages, max_bytes // row_bytes))
        self._has_changed = Condition()
        with ExitStack() as undo:
            self._rows = HostRows(row_bytes, 2 * count)
            undo.callback(self._rows.close)
            self._staging = {}
            for direction in (Direction.STORE, Direction.LOAD):
                staging = self._staging[direction] = _Staging(self._rows, count, direction)
                undo.callback(staging.close)
            self.tiers = PluggedTiers(tiers, self._rows.view, on_events=self._note_events)
            undo.pop_all()
        options = [TierOptions.take(tier) for tier in tiers]
        self._probe_timeout_s = sum(tier.probe_timeout_s for tier in options)
        self._close_timeout_s = max(tier.close_timeout_s for tier in options)
        self._job_timeout_s = sum(manager.io_timeout_s for manager in self.tiers.managers)
        self._closing: Closing[CloseReport] = Closing()
        guard_forks(self, _closing=Closing.closed(CloseReport()))

    def leading_run(self, keys: Sequence[OffloadKey]) -> int:
        """Return how many leading keys are stored; waits for the probes' deadline at most."""
        wanted = list(dict.fromkeys(keys))
        lookup = self.tiers.lookup(wanted, self._probe_timeout_s, stops_at_miss=True)
        answers = _awaited(lookup, self._probe_timeout_s) or ()
        present = {key for key, is_found in zip(wanted, answers, strict=False) if is_found}
        return next((index for index, key in enumerate(keys) if key not in present), len(keys))

    def move_pages(
        self, direction: Direction, keys: Sequence[OffloadKey], host_indices: torch.Tensor
    ) -> list[bool]:
        """Store or load pages of the pool; return for each page whether it was transferred.

        Pages that could not be loaded are unchanged.

        Args:
            direction: Whether to store or to load.
            keys: The keys.
            host_indices: Indices of the pages' tokens.

        Raises:
            StateError: The indices do not name a page for each key.
        """
        addresses = self._pages.addresses(host_indices)
        if len(addresses) != len(keys):
            raise StateError(f"{len(keys)} keys, but indices of {len(addresses)} pages")
        return self._move(direction, keys, addresses, self._pages.part_bytes)

    def move_tensors(
        self, direction: Direction, keys: Sequence[OffloadKey], pages: Sequence[torch.Tensor]
    ) -> list[bool]:
        """Store or load pages as tensors, one per page; otherwise like `move_pages`.

        Raises:
            StateError: A tensor has not the size of a page, is not contiguous although it is to be
                loaded, or there is not one for each key.
        """
        if len(pages) != len(keys):
            raise StateError(f"{len(keys)} keys, but {len(pages)} pages")
        page_bytes = self._pages.page_bytes
        if direction is Direction.STORE:
            pages = [page.contiguous() for page in pages]
        for page in pages:
            if page.nbytes != page_bytes or not page.is_contiguous() or page.device.type != "cpu":
                raise StateError(
                    f"a tensor of {page.nbytes} bytes on {page.device} is not a contiguous page of "
                    f"{page_bytes} bytes in host memory"
                )
        addresses = np.array([[page.data_ptr()] for page in pages], np.int64)
        return self._move(direction, keys, addresses, np.array([page_bytes], np.int64))

    def stats(self) -> OffloadingStatistics:
        """Return the tiers' statistics; the staging rows count as the primary. Thread: any."""
        return statistics_of([(self.tiers, self._rows)])

    @property
    def not_clearable(self) -> list[str]:
        """Names of the tiers that cannot list their contents, or cannot remove single pages."""
        return sorted({*self.tiers.unlisted, *self.tiers.discard(())})

    def clear(self, is_own: Callable[[OffloadKey], bool]) -> None:
        """Remove the pages with own keys from the tiers; blocks. Pages stored meanwhile may stay.

        Raises:
            TierTimeoutError: At the jobs' deadline, a page was still there, or in use.
        """
        deadline_s = time.monotonic() + self._job_timeout_s
        position: ListPosition | None = ListPosition()
        while position is not None:
            listed, following = self.tiers.list_keys(position, _KEYS_AT_ONCE)
            found = list(filter(is_own, listed))
            if not found:
                position = following
                continue
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TierTimeoutError(
                    f"not all pages were removed within {self._job_timeout_s:g} s: some are in "
                    "use, or a tier is slow"
                )
            with self._has_changed:
                self.tiers.discard(found)
                self._has_changed.wait(min(left_s, _LOOK_AGAIN_S))

    def close(self) -> CloseReport:
        """Fail further calls, close the tiers and release the memory; idempotent.

        Running jobs have `close_timeout_s` to end. Otherwise as `PluggedTiers.close`.

        Returns:
            The jobs whose copies still run, for which the rows stay mapped, and the first error.

        Raises:
            StateError: Called out of a callback of the tiers.
            TierTimeoutError: Another thread has not closed it within its time.
        """
        return self._closing.run(self._close, self._close_timeout_s)

    def _close(self, timeout_s: float) -> CloseReport:
        report = self.tiers.close(timeout_s)
        for staging in self._staging.values():
            staging.close()
        self._rows.close(is_idle=not report.unfinished_jobs)
        return report

    # -- inside -----------------------------------------------------------------------------------

    def _note_events(self, _tier: object, _events: object) -> None:
        """Wake `clear`, because blocks were removed or added. Thread: the loop's."""
        with self._has_changed:
            self._has_changed.notify_all()

    def _move(
        self,
        direction: Direction,
        keys: Sequence[OffloadKey],
        addresses: Numbers,
        sizes: Numbers,
    ) -> list[bool]:
        """Run jobs, each of as many pages as rows are free, until a tier fails as a whole.

        Args:
            direction: Whether to store or to load.
            keys: The keys; of one that is named twice, the first page is stored, or all are loaded.
            addresses: See `_Staging.copy`.
            sizes: See `_Staging.copy`.
        """
        staging, is_store = self._staging[direction], direction is Direction.STORE
        positions: dict[OffloadKey, list[int]] = {}
        for position, key in enumerate(keys):
            positions.setdefault(key, []).append(position)
        waiting = list(positions)
        landed: set[OffloadKey] = set()
        while waiting and len(rows := staging.take(len(waiting), self._job_timeout_s)):
            part, waiting = waiting[: len(rows)], waiting[len(rows) :]
            transfer = None
            try:
                if is_store:
                    staging.copy(rows, addresses[[positions[key][0] for key in part]], sizes)
                submit = self.tiers.store if is_store else self.tiers.load
                transfer = submit(part, rows)
                ended = _awaited(transfer.ended, self._job_timeout_s) or _NO_REPORT
                if not is_store and ended.keys:
                    loaded = [
                        (row, position)
                        for key, row in zip(part, rows.tolist(), strict=True)
                        if key in ended.keys
                        for position in positions[key]
                    ]
                    found, targets = zip(*loaded, strict=True)
                    staging.copy(as_block_ids(found), addresses[list(targets)], sizes)
            finally:
                if transfer is None:
                    staging.give_back(rows)
                else:
                    transfer.at_rest.add_done_callback(partial(staging.give_back, rows))
            landed |= ended.keys
            if isinstance(ended.error, TierUnavailableError):
                break
        return [key in landed for key in keys]


def _awaited(future: Future[T], timeout_s: float) -> T | None:
    """Wait for a future that the tiers complete, and return its result; None if it is late."""
    try:
        return future.result(timeout_s + _GRACE_S)
    except TimeoutError:
        logger.error("the tiers did not report within %g s of their deadline", _GRACE_S)  # noqa: TRY400 - expected
        return None
