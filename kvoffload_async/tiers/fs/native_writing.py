"""Fast path for storing blocks with native code; errors and special cases use `BlockWriter`.

An I/O thread checks the root and renames victims. Then one batch writes the files and gives them
their names. A second call follows only if something has to be synced or removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvoffload_async.block_io.contract import (
    FILE_NOT_BEGUN,
    FILE_PRESENT,
    FILE_WRITTEN,
    Attribute,
    FileBatch,
    FileIo,
    FileStores,
    StoredFiles,
)
from kvoffload_async.errors import TierClosedError, TierError
from kvoffload_async.tiers.files.digests import DIGEST_BYTES
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.fs.blockfile import BlockFiles
from kvoffload_async.tiers.fs.digest_attribute import ATTRIBUTE
from kvoffload_async.tiers.fs.layout import Namespace, bucket_of
from kvoffload_async.tiers.fs.outcome import StoreOutcome, StoreStatus
from kvoffload_async.tiers.fs.space import RunIo

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeWriterSettings:
    """Settings of the writer; see `BlockFiles`."""

    verifies: bool
    fsync: bool
    counts_bytes: bool


@dataclass(slots=True, eq=False)
class _Draft:
    """One block being stored.

    Attributes:
        temp: Path of its temporary file; empty if there is none.
        is_recycled: Whether that file exists and was a victim's.
        is_ready: Whether native code may write it.
        is_open: Whether its result is not known yet.
    """

    outcome: StoreOutcome
    path: str
    temp: str = ""
    is_recycled: bool = False
    is_ready: bool = False
    is_open: bool = True


@dataclass(slots=True, eq=False)
class _Job:
    """The blocks of one job.

    Attributes:
        check: Checks the root, unless that was already done for this job.
    """

    drafts: Sequence[_Draft]
    check: Callable[[], None]


class NativeWriter:
    """Stores blocks of one namespace. Call on the loop's thread unless documented otherwise."""

    def __init__(
        self,
        file_io: FileIo,
        ops: FileOps,
        namespace: Namespace,
        files: BlockFiles,
        *,
        settings: NativeWriterSettings,
        run: RunIo,
    ) -> None:
        """Create the writer; `run` runs a call on an I/O thread, batched with other jobs' calls."""
        self._file_io = file_io
        self._ops = ops
        self._namespace = namespace
        self._writer = files.writer
        self._digest_cache = files.digest_cache
        self._settings = settings
        self._attribute = Attribute(ATTRIBUTE, files.digester.prefix)
        self._run = run

    @property
    def is_usable(self) -> bool:
        """Whether the filesystem has all features that the fast path needs, as far as known."""
        return self._ops.can_refuse_to_replace and not self._writer.lacks_attributes

    async def store(
        self, outcomes: Sequence[StoreOutcome], check: Callable[[], None]
    ) -> list[StoreOutcome]:
        """Store blocks; return the outcomes that `BlockWriter` has to process.

        The other outcomes are filled in, even if this is cancelled.

        Args:
            outcomes: The blocks.
            check: Raises TierUnavailableError if the root was replaced by another directory.
        """
        paths = self._namespace.names_of([outcome.item.key for outcome in outcomes], 0)
        job = _Job(list(map(_Draft, outcomes, paths)), check)
        try:
            await self._run(partial(self._prepare, job))
            await self._look([draft for draft in job.drafts if not draft.outcome.item.may_write])
            await self._write([draft for draft in job.drafts if draft.is_ready])
        finally:
            if self._settings.fsync or any(draft.temp for draft in job.drafts):
                await self._end_on_thread(job)
        return [draft.outcome for draft in job.drafts if draft.is_open]

    # -- on the loop ----------------------------------------------------------------------------

    async def _end_on_thread(self, job: _Job) -> None:
        """End a job. If no thread is available, temporary files stay and blocks are not durable."""
        try:
            await self._run(partial(self._end, job))
        except asyncio.CancelledError:  # `_end` may not have run
            self._leave_temps(job)
            raise
        except TierError as error:
            logger.warning("temporary files of a job not removed yet: %s", str(error))
            self._leave_temps(job)
            for draft in job.drafts if self._settings.fsync else ():
                draft.outcome.status, draft.outcome.error = StoreStatus.FAILED, error

    def _leave_temps(self, job: _Job) -> None:
        """Queue temporary files for later removal."""
        self._writer.litter += [draft.temp for draft in job.drafts if draft.temp]

    async def _look(self, drafts: Sequence[_Draft]) -> None:
        """Look up the blocks that may not be written."""
        if drafts:
            root, names = self._located([draft.path for draft in drafts])
            found = await self._file_io.has_files(root, names)
            for draft, is_there in zip(drafts, found, strict=True):
                if is_there:
                    _end_with(draft, StoreStatus.PRESENT)

    async def _write(self, drafts: Sequence[_Draft]) -> None:
        """Write the prepared blocks."""
        if not drafts:
            return
        settings = self._settings
        recycled = bytes(draft.is_recycled for draft in drafts)
        # A victim's checksum must be replaced, even without verification.
        attribute = self._attribute if settings.verifies or any(recycled) else None
        root, names = self._located([draft.path for draft in drafts])
        _, temps = self._located([draft.temp for draft in drafts])
        files = FileBatch(
            root,
            names,
            [draft.outcome.item.key for draft in drafts],
            [draft.outcome.item.slot for draft in drafts],
        )
        how = FileStores(
            temps,
            recycled,
            attribute,
            self._ops.locate(self._namespace.folder)[0].modes.file_mode,
            settings.fsync,
            settings.counts_bytes,
        )
        ended: list[StoredFiles] = []
        try:
            await self._file_io.store_files(files, how, ended)
        finally:
            for stored in ended:
                self._take(drafts, stored)

    def _take(self, drafts: Sequence[_Draft], stored: StoredFiles) -> None:
        """Process the results of a batch."""
        prefix, digests = self._attribute.prefix, stored.digests
        for index, draft in enumerate(drafts):
            outcome, status = draft.outcome, stored.statuses[index]
            if status == FILE_WRITTEN:
                if self._settings.counts_bytes:
                    outcome.change.add(bucket_of(outcome.item.key), stored.disk_bytes[index])
                if digests:
                    start = index * DIGEST_BYTES
                    value = prefix + digests[start : start + DIGEST_BYTES]
                    self._digest_cache.remember(outcome.item.key, value)
                draft.temp = ""
                _end_with(draft, StoreStatus.WRITTEN)
            elif status == FILE_PRESENT:
                if not draft.is_recycled:
                    draft.temp = ""
                _end_with(draft, StoreStatus.PRESENT)
            elif status == FILE_NOT_BEGUN:
                outcome.error = TierClosedError("the block was not begun")
                _end_with(draft, StoreStatus.FAILED)

    def _located(self, paths: Sequence[str]) -> tuple[tuple[int, str], list[str]]:
        """Return the root, and the files' names relative to it."""
        folder = self._namespace.folder
        root, name = self._ops.locate(folder)
        start = len(folder) - len(name)
        return (root.fd, root.path), [path[start:] for path in paths]

    # -- on an I/O thread -----------------------------------------------------------------------

    def _prepare(self, job: _Job) -> None:
        """Prepare the files of a job. Runs on an I/O thread."""
        job.check()
        for draft in job.drafts:
            if draft.outcome.item.may_write:
                # After an error, `BlockWriter` stores the block from the start.
                with contextlib.suppress(OSError), self._ops.batch():
                    self._prepare_one(draft)

    def _prepare_one(self, draft: _Draft) -> None:
        outcome, writer = draft.outcome, self._writer
        item = outcome.item
        if item.victim is not None and self._ops.has_file(draft.path):
            _end_with(draft, StoreStatus.PRESENT)
            return
        temp = writer.temp_of(draft.path)
        if item.victim is not None:
            if not writer.take_victim(item.victim, temp, outcome):
                _end_with(draft, StoreStatus.VICTIM_GONE)
                return
            draft.temp = temp
            draft.is_recycled = writer.may_overwrite(temp)
        draft.temp = temp
        draft.is_ready = True

    def _end(self, job: _Job) -> None:
        """Delete temporary files, and sync folders. On an I/O thread."""
        for draft in job.drafts:
            if draft.temp:
                self._writer.discard(draft.temp)
        self._writer.sync_names([draft.outcome for draft in job.drafts])


def _end_with(draft: _Draft, status: StoreStatus) -> None:
    draft.outcome.status = status
    draft.is_open = draft.is_ready = False
