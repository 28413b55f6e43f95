"""Fast path for loading, storing and looking up blocks with native code.

Errors and special cases fall back to `BlockFiles`; for storing see `native_writing`. Call only from
the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvoffload_async.abc.tier import Direction, IoRunner, TierEnvironment
from kvoffload_async.block_io.choice import create_file_io
from kvoffload_async.block_io.contract import Attribute, FileBatch, FileIo
from kvoffload_async.errors import TierUnavailableError
from kvoffload_async.tiers.files.coalescing import Coalescer
from kvoffload_async.tiers.files.digests import DIGEST_BYTES
from kvoffload_async.tiers.files.ops import FileOps, Root
from kvoffload_async.tiers.fs.blockfile import BlockFiles
from kvoffload_async.tiers.fs.digest_attribute import ATTRIBUTE
from kvoffload_async.tiers.fs.layout import Namespace
from kvoffload_async.tiers.fs.native_writing import NativeWriter, NativeWriterSettings
from kvoffload_async.tiers.fs.outcome import StoreOutcome, Verify
from kvoffload_async.tiers.fs.space import RunIo
from kvoffload_async.types import OffloadKey


class NativeFiles:
    """Native I/O on the block files of one namespace."""

    def __init__(
        self,
        file_io: FileIo,
        ops: FileOps,
        namespace: Namespace,
        files: BlockFiles,
        writer: NativeWriter,
        *,
        verify: Verify,
        check: Callable[[], None],
        io: IoRunner,
    ) -> None:
        """See `create_native_files`."""
        self._writer = writer
        self._file_io = file_io
        self._ops = ops
        self._namespace = namespace
        self._files = files
        self._attribute = Attribute(ATTRIBUTE, files.digester.prefix)
        self._verifies = verify is not Verify.OFF
        self._checks = Coalescer[None](
            "fs:check", lambda *_: check(), partial(io.run, Direction.METADATA)
        )

    async def load(self, keys: Sequence[OffloadKey], rows: Sequence[int]) -> Sequence[int]:
        """Load blocks into rows; return the indices that must be loaded by `BlockFiles`.

        Raises:
            TierUnavailableError: The root is not the directory that was opened.
        """
        # Concurrent with loading, which stays below the directory that was opened.
        checking = self._checks.begin(None)
        root, names = self._located(keys)
        recall, remember = self._files.digest_cache.recall, self._files.digest_cache.remember
        expected = [recall(key) for key in keys]
        batch = FileBatch((root.fd, root.path), names, keys, rows)
        statuses, digests = await self._file_io.load_files(
            batch, expected, self._attribute, verify=self._verifies
        )
        if not checking.done():
            await checking
        if (error := checking.result()) is not None:
            raise TierUnavailableError(str(error)) from error
        if self._verifies:
            for index, status in enumerate(statuses):
                start = index * DIGEST_BYTES
                value = self._attribute.prefix + digests[start : start + DIGEST_BYTES]
                if not status and value != expected[index]:
                    remember(keys[index], value)
        return [index for index, status in enumerate(statuses) if status] if any(statuses) else ()

    async def store(
        self, outcomes: Sequence[StoreOutcome], check: Callable[[], None]
    ) -> Sequence[StoreOutcome]:
        """See `NativeWriter.store`."""
        return await self._writer.store(outcomes, check) if self._writer.is_usable else outcomes

    async def present(self, keys: Sequence[OffloadKey]) -> frozenset[OffloadKey]:
        """Return the keys that have a file; errors count as absent."""
        root, names = self._located(keys)
        found = await self._file_io.has_files((root.fd, root.path), names)
        return frozenset(key for key, is_there in zip(keys, found, strict=True) if is_there)

    async def close(self) -> None:
        """Wait until all operations have ended."""
        await self._checks.close()
        await self._file_io.close()

    def _located(self, keys: Sequence[OffloadKey]) -> tuple[Root, list[str]]:
        """Return the root, to be kept open meanwhile, and the files' names relative to it."""
        root, folder = self._ops.locate(self._namespace.folder)
        start = len(self._namespace.folder) - len(folder)
        return root, self._namespace.names_of(keys, start)


def create_native_files(
    env: TierEnvironment,
    ops: FileOps,
    namespace: Namespace,
    files: BlockFiles,
    verify: Verify,
    *,
    threads: int,
    check: Callable[[], None],
    run_store: RunIo,
    fsync: bool,
    counts_bytes: bool,
) -> NativeFiles | None:
    """Return the native fast path; None if native code is not used.

    Args:
        env: The tier's environment.
        ops: The system calls.
        namespace: Location of the files.
        files: Block files, with their checksums.
        verify: See `Verify`.
        threads: Number of threads that move bytes.
        check: Raises OSError if the root was replaced by another directory; runs on an I/O
            thread, once for all waiting loads.
        run_store: Runs the I/O calls of stores.
        fsync: See `BlockFiles`.
        counts_bytes: See `BlockFiles`.

    Raises:
        ConfigError: Native code is required but unusable.
    """
    file_io = create_file_io(
        env, ops, files.digester.digester, threads=threads, is_system=type(ops) is FileOps
    )
    if file_io is None:
        return None
    settings = NativeWriterSettings(
        verifies=verify is not Verify.OFF, fsync=fsync, counts_bytes=counts_bytes
    )
    common = file_io, ops, namespace, files
    writer = NativeWriter(*common, settings=settings, run=run_store)
    return NativeFiles(*common, writer, verify=verify, check=check, io=env.io)
