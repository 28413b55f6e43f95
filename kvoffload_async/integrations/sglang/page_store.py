"""The pages of one host pool in tiers, for calls that block with a deadline."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from threading import Condition
from typing import Any, Final, TypeVar

import numpy as np
import torch

from kvoffload_async.abc.tier import CloseReport, Direction
from kvoffload_async.errors import StateError, TierUnavailableError
from kvoffload_async.facade.plugged import Ended, PluggedTiers
from kvoffload_async.facade.tier_options import TierOptions
from kvoffload_async.integrations.sglang.pages import Bytes, PageCopier, PoolPages
from kvoffload_async.runtime.buffer import PrimaryBuffer, row_stride_bytes
from kvoffload_async.types import OffloadKey, as_block_ids

T = TypeVar("T")

logger = logging.getLogger(__name__)

_GRACE_S: Final = 5.0
"""Seconds after a deadline of the tiers until a call gives up waiting for its report."""

CopyRows = Callable[[Sequence[int], Sequence[int]], None]
"""Copies between the pages at some positions of a call, and rows."""


class _Staging:
    """Rows of one direction. Thread-safe.

    Attributes:
        copier: Copies between pages and rows.
    """

    def __init__(self, copier: PageCopier, rows: Sequence[int]) -> None:
        self.copier = copier
        self._free = list(rows)
        self._changed = Condition()

    def take(self, most: int, timeout_s: float) -> list[int]:
        """Take up to `most` free rows; none if there is none before the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._free, timeout_s)
            taken, self._free = self._free[:most], self._free[most:]
            return taken

    def give(self, rows: Sequence[int]) -> None:
        """Return rows that no copy accesses."""
        with self._changed:
            self._free.extend(rows)
            self._changed.notify_all()

    def give_at_rest(self, rows: Sequence[int], _at_rest: Future[None]) -> None:
        """Return the rows of a transfer that is at rest."""
        self.give(rows)


class PageStore:
    """Stores and loads pages of one pool. Thread-safe.

    A page that cannot be stored or loaded is reported as such; no method raises for it.
    """

    def __init__(
        self, pages: PoolPages, tiers: Sequence[Mapping[str, Any]], most_pages: int, max_bytes: int
    ) -> None:
        """Map the rows and open the tiers; blocks.

        Args:
            pages: The pool's pages.
            tiers: Configuration of each tier.
            most_pages: Maximum number of pages per job.
            max_bytes: Maximum memory of the rows of each direction, if two pages fit into it.

        Raises:
            ConfigError: A tier's configuration is unusable, or memory is missing. As for the other
                errors, nothing is left running.
            TierUnavailableError: A tier's storage cannot be reached.
            TierTimeoutError: A tier did not open in time.
        """
        self.page_bytes = pages.page_bytes
        row_bytes = row_stride_bytes(pages.page_bytes)
        count = max(2, min(most_pages, max_bytes // row_bytes))
        with ExitStack() as undo:
            self._buffer = PrimaryBuffer(2 * count, row_bytes)
            undo.callback(self._buffer.release)
            rows = self._buffer.view
            self._staging = {}
            for direction, first in ((Direction.STORE, 0), (Direction.LOAD, count)):
                copier = PageCopier(pages, rows, direction)
                undo.callback(copier.close)
                self._staging[direction] = _Staging(copier, range(first, first + count))
            self._tiers = PluggedTiers(tiers, rows)
            undo.pop_all()
        self._pages = pages
        self._rows = np.asarray(rows)
        self._probe_timeout_s = sum(TierOptions.take(tier).probe_timeout_s for tier in tiers)
        self._job_timeout_s = sum(tier.io_timeout_s for tier in self._tiers.managers)

    @property
    def tiers(self) -> PluggedTiers:
        """The tiers."""
        return self._tiers

    # -- pages of the pool ------------------------------------------------------------------------

    def leading_run(self, keys: Sequence[OffloadKey]) -> int:
        """Return how many of the first keys are stored; waits for the probes' deadline at most."""
        wanted = list(dict.fromkeys(keys))
        found = _awaited(
            self._tiers.lookup(wanted, self._probe_timeout_s, stops_at_miss=True),
            self._probe_timeout_s,
        )
        present = {key for key, is_found in zip(wanted, found or (), strict=False) if is_found}
        return next((index for index, key in enumerate(keys) if key not in present), len(keys))

    def store_pages(self, keys: Sequence[OffloadKey], host_indices: torch.Tensor) -> list[bool]:
        """Store pages; return for each whether it is stored.

        Args:
            keys: The keys.
            host_indices: Indices of the pages' tokens in the pool.
        """
        return self._move(Direction.STORE, keys, self._page_copy(Direction.STORE, host_indices))

    def load_pages(self, keys: Sequence[OffloadKey], host_indices: torch.Tensor) -> list[bool]:
        """Load pages; return for each whether it was loaded. Others are unchanged."""
        return self._move(Direction.LOAD, keys, self._page_copy(Direction.LOAD, host_indices))

    # -- pages in tensors -------------------------------------------------------------------------

    def store_tensors(
        self, keys: Sequence[OffloadKey], pages: Sequence[torch.Tensor]
    ) -> list[bool]:
        """Store pages that are given as tensors; return for each whether it is stored."""
        sources = [self._bytes_of(page.contiguous()) for page in pages]

        def copy(positions: Sequence[int], rows: Sequence[int]) -> None:
            for position, row in zip(positions, rows, strict=True):
                self._rows[row, : self.page_bytes] = sources[position]

        return self._move(Direction.STORE, keys, copy)

    def load_tensors(self, keys: Sequence[OffloadKey], pages: Sequence[torch.Tensor]) -> list[bool]:
        """Load pages into tensors; return for each whether it was loaded. Others are unchanged."""
        targets = [self._bytes_of(page) for page in pages]

        def copy(positions: Sequence[int], rows: Sequence[int]) -> None:
            for position, row in zip(positions, rows, strict=True):
                targets[position][:] = self._rows[row, : self.page_bytes]

        return self._move(Direction.LOAD, keys, copy)

    def close(self, timeout_s: float) -> CloseReport:
        """Refuse further calls, close the tiers and release the memory; idempotent.

        The rows stay mapped while a copy of a hung tier accesses them.

        Args:
            timeout_s: Seconds for running jobs to end.

        Returns:
            The jobs that still run, and the first error.
        """
        report = self._tiers.close(timeout_s)
        for staging in self._staging.values():
            staging.copier.close()
        self._rows = np.empty((0, 0), np.uint8)  # a view would keep the memory mapped
        if not report.unfinished_jobs:
            self._buffer.release()
        return report

    # -- inside -----------------------------------------------------------------------------------

    def _page_copy(self, direction: Direction, host_indices: torch.Tensor) -> CopyRows:
        pieces = self._pages.pieces(host_indices)
        copier = self._staging[direction].copier
        return lambda positions, rows: copier.copy(pieces.select(positions), rows)

    def _bytes_of(self, page: torch.Tensor) -> Bytes:
        if page.nbytes != self.page_bytes or not page.is_contiguous():
            raise StateError(
                f"a tensor of {page.nbytes} bytes is not a contiguous page of {self.page_bytes}"
            )
        found: Bytes = page.reshape(-1).view(torch.uint8).numpy()
        return found

    def _move(self, direction: Direction, keys: Sequence[OffloadKey], copy: CopyRows) -> list[bool]:
        """Run jobs of as many pages as rows are free, until a tier fails as a whole."""
        staging, is_store = self._staging[direction], direction is Direction.STORE
        positions: dict[OffloadKey, list[int]] = {}
        for position, key in enumerate(keys):
            positions.setdefault(key, []).append(position)
        waiting = list(positions)
        landed: set[OffloadKey] = set()
        while waiting and (rows := staging.take(len(waiting), self._job_timeout_s)):
            part, waiting = waiting[: len(rows)], waiting[len(rows) :]
            transfer = None
            try:
                if is_store:
                    copy([positions[key][0] for key in part], rows)
                submit = self._tiers.store if is_store else self._tiers.load
                transfer = submit(part, as_block_ids(rows))
                ended = _awaited(transfer.ended, self._job_timeout_s) or Ended(frozenset())
                if not is_store:
                    _copy_landed(part, rows, ended.keys, positions, copy)
            finally:
                if transfer is None:
                    staging.give(rows)
                else:
                    transfer.at_rest.add_done_callback(partial(staging.give_at_rest, rows))
            landed |= ended.keys
            if isinstance(ended.error, TierUnavailableError):
                break
        return [key in landed for key in keys]


def _copy_landed(
    keys: Sequence[OffloadKey],
    rows: Sequence[int],
    landed: Collection[OffloadKey],
    positions: Mapping[OffloadKey, Sequence[int]],
    copy: CopyRows,
) -> None:
    """Copy loaded rows to all positions of their keys."""
    pairs = [
        (position, row)
        for key, row in zip(keys, rows, strict=True)
        if key in landed
        for position in positions[key]
    ]
    if pairs:
        copy([position for position, _ in pairs], [row for _, row in pairs])


def _awaited(future: Future[T], timeout_s: float) -> T | None:
    """Return the result of a future that the tiers complete before a deadline; None if late."""
    try:
        return future.result(timeout_s + _GRACE_S)
    except TimeoutError:
        logger.error("the tiers did not report within %g s of their deadline", _GRACE_S)  # noqa: TRY400 - expected
        return None
