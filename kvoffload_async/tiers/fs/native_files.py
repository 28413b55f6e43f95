"""Fast path for loading, storing and looking up blocks: one native batch per job.

The batch makes all system calls of its blocks, those on victims included, on threads that never
take the GIL. Errors and special cases fall back to `BlockFiles`. Call only from the event loop's
thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from itertools import compress
from typing import TYPE_CHECKING

from kvoffload_async.block_io.contract import (
    DIGEST_BYTES,
    FILE_NOT_BEGUN,
    FILE_PRESENT,
    FILE_VICTIM_GONE,
    FILE_WRITTEN,
    SEAL_BYTES,
    Attribute,
    FileBatch,
    FileStores,
    StoredFiles,
)
from kvoffload_async.errors import TierClosedError, TierError, TierUnavailableError
from kvoffload_async.tiers.files.ops import Root
from kvoffload_async.tiers.fs.blockfile import BlockFiles
from kvoffload_async.tiers.fs.digest_attribute import ATTRIBUTE
from kvoffload_async.tiers.fs.layout import TEMP_SUFFIX
from kvoffload_async.tiers.fs.operations import StoreItem, StoreStatus, Verify
from kvoffload_async.tiers.fs.space import RunIo
from kvoffload_async.tiers.fs.writing import UNVERIFIED_MARKER
from kvoffload_async.types import OffloadKey

if TYPE_CHECKING:
    from kvoffload_async.block_io.native_io import NativeBlockIo

logger = logging.getLogger(__name__)

_STATUSES = {
    FILE_WRITTEN: StoreStatus.WRITTEN,
    FILE_PRESENT: StoreStatus.PRESENT,
    FILE_VICTIM_GONE: StoreStatus.VICTIM_GONE,
    FILE_NOT_BEGUN: StoreStatus.FAILED,
}


class NativeFiles:
    """Native I/O on the block files of one namespace."""

    def __init__(self, file_io: NativeBlockIo, files: BlockFiles, run_store: RunIo) -> None:
        """Use `file_io` for the blocks; `run_store` runs the other I/O calls of stores."""
        self._file_io = file_io
        self._files = files
        self._attribute = Attribute(ATTRIBUTE, files.digester.prefix)
        self._digest_bytes = DIGEST_BYTES if files.digester.seals is None else SEAL_BYTES
        self._verifies = files.settings.verify is not Verify.OFF
        self._run_store = run_store

    async def load(self, keys: Sequence[OffloadKey], rows: Sequence[int]) -> Sequence[int]:
        """Load blocks into rows; return the indices that must be loaded by `BlockFiles`."""
        root, _, names = self._located(keys)
        recall, remember = self._files.digest_cache.recall, self._files.digest_cache.remember
        expected = [recall(key) for key in keys]
        batch = FileBatch((root.fd, root.path), names, keys, rows)
        statuses, digests = await self._file_io.load_files(
            batch, expected, self._attribute, verify=self._verifies
        )
        prefix, end, size = self._attribute.prefix, len(digests), self._digest_bytes
        values = [prefix + digests[at : at + size] for at in range(0, end, size)]
        if values != expected:
            for key, value, status in zip(keys, values, statuses, strict=False):
                if not status:
                    remember(key, value)
        return [index for index, status in enumerate(statuses) if status] if any(statuses) else ()

    async def store(self, items: Sequence[StoreItem]) -> Sequence[StoreItem]:
        """Store blocks; return those that `BlockWriter` has to process.

        The results of the others are filled in, even if this is cancelled.
        """
        files, settings = self._files, self._files.settings
        if files.lacks_attributes or not files.ops.can_refuse_to_replace:
            return items
        keys = [item.key for item in items]
        root, folder, names = self._located(keys)
        stem, serial = files.temp_names()
        overwrites = self._verifies and not settings.trust_vllm_directory
        how = FileStores(
            self._located([item.victim for item in items])[2],
            f"{folder}/{UNVERIFIED_MARKER}" if overwrites else "",
            bytes([item.may_write for item in items]),
            stem,
            serial,
            self._attribute,
            root.modes.file_mode,
            settings.fsync,
            settings.capacity_bytes is not None,
            self._verifies,
        )
        batch = FileBatch((root.fd, root.path), names, keys, [item.slot for item in items])
        ended: list[StoredFiles] = []
        left: list[StoreItem] = []
        try:
            await self._file_io.store_files(batch, how, ended)
        finally:
            for stored in ended:
                left = self._take(items, stored)
                path_of = files.namespace.get_file_name
                temps = {
                    f"{path_of(item.key)}{stem}{serial + index}{TEMP_SUFFIX}": item
                    for index, item in enumerate(items if left else ())
                    if item.may_write and item in left
                }
                if temps or settings.fsync:
                    await self._finish(items, list(temps))
                for temp in temps.keys() & files.leftover_temps:  # no room for a second one
                    temps[temp].error = TierUnavailableError(
                        "a temporary file could not be removed"
                    )
                left = [item for item in left if item.error is None]
        return left

    async def present(self, keys: Sequence[OffloadKey]) -> frozenset[OffloadKey]:
        """Return the keys that have a file; a key whose check fails counts as absent."""
        root, _, names = self._located(keys)
        found = await self._file_io.has_files((root.fd, root.path), names)
        return frozenset(compress(keys, found))

    async def close(self) -> None:
        """Wait until all operations have ended, and close the native I/O."""
        await self._file_io.close()

    # -- inside ---------------------------------------------------------------------------------

    def _located(self, keys: Sequence[OffloadKey | None]) -> tuple[Root, str, list[str]]:
        """Return the root, to be kept open, and the paths of folder and files relative to it."""
        namespace = self._files.namespace
        root, folder = self._files.ops.locate(namespace.folder)
        return root, folder, namespace.names_of(keys, len(namespace.folder) - len(folder))

    def _take(self, items: Sequence[StoreItem], stored: StoredFiles) -> list[StoreItem]:
        """Fill in the results of a batch; return the blocks that `BlockWriter` has to process."""
        left = []
        prefix, remember = self._attribute.prefix, self._files.digest_cache.remember
        numbers, count = stored.disk_bytes, len(items)
        for index, (item, status) in enumerate(zip(items, stored.statuses, strict=True)):
            if numbers[count + index] >= 0:
                item.freed_bytes = numbers[count + index]
            if status not in _STATUSES:
                left.append(item)
                continue
            item.status = _STATUSES[status]
            if status == FILE_WRITTEN:
                item.added_bytes = numbers[index]
                if stored.digests:
                    start = index * self._digest_bytes
                    digest = stored.digests[start : start + self._digest_bytes]
                    remember(item.key, prefix + digest)
            elif status == FILE_NOT_BEGUN:
                item.error = TierClosedError("the block was not begun")
        return left

    async def _finish(self, items: Sequence[StoreItem], temps: Sequence[str]) -> None:
        """Remove leftover temporary files, and sync the names of stored blocks.

        If no thread can run this, the files are removed later, and stores with `fsync` fail.
        """

        def finish() -> None:
            for temp in temps:
                self._files.discard_temp(temp)
            self._files.sync_names(items)

        try:
            await self._run_store(finish)
        except asyncio.CancelledError:  # it may not have run
            self._files.leftover_temps += temps
            raise
        except TierError as error:
            logger.warning("temporary files of a job not removed yet: %s", str(error))
            self._files.leftover_temps += temps
            for item in items if self._files.settings.fsync else ():
                item.status, item.error = StoreStatus.FAILED, error
