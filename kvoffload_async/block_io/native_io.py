"""Native implementation of block I/O: the engine's threads copy; one descriptor wakes the loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Concatenate, Final, ParamSpec

from kvoffload_async.abc.tier import Direction, IoRunner
from kvoffload_async.block_io.contract import (
    NOT_DECRYPTED,
    SEAL_BYTES,
    TAG_AT,
    Attribute,
    BlockIo,
    FileBatch,
    FileCalls,
    FileStores,
    LoadedFiles,
    Moved,
    Run,
    Seals,
    StoredFiles,
    not_opened,
)
from kvoffload_async.block_io.engine import Engine, Memory, Sealing
from kvoffload_async.block_io.hashes import addresses, cipher_addresses
from kvoffload_async.errors import BusyError, TierClosedError
from kvoffload_async.types import OffloadKey
from kvoffload_async.waiting import LastingFuture

__all__ = ["Engine", "Memory", "NativeBlockIo", "open_engine"]

logger = logging.getLogger(__name__)

_QUEUED: Final = 4096
"""Maximum number of queued batches per direction."""

_SEALED_PIECE_BYTES: Final = 128 << 10
"""Maximum bytes of a system call where blocks are encrypted; tuned by measurement."""

_HUNG_AFTER_S: Final = 1.0
"""Seconds in one system call after which a thread is replaced by a spare one."""

_CLOSE_S: Final = 5.0
"""Timeout for idle threads to end, in seconds."""

Arguments = ParamSpec("Arguments")


def open_engine(threads: int, calls: FileCalls | None = None, seals: Seals | None = None) -> Engine:
    """Open a native engine with a tier's thread counts.

    Args:
        threads: Number of threads that copy; as many spare ones may replace hanging threads.
        calls: Replaces the system calls; called with the GIL.
        seals: Encrypts the blocks, if given.

    Raises:
        OSError: Threads cannot be started.
    """
    store_threads = max(1, threads // 3)
    load_threads = max(1, threads - store_threads)
    opened = partial(Engine, load_threads, store_threads, threads, _QUEUED, addresses(), calls)
    if seals is None:
        return opened()
    sealing = Sealing(cipher_addresses(), seals.secrets, seals.info)
    return opened(piece_bytes=_SEALED_PIECE_BYTES, sealing=sealing)


class NativeBlockIo(BlockIo):
    """Copies blocks with its own native engine. Thread: loop.

    Also reads and writes whole files: a fast path, which leaves errors and special cases to the
    caller.
    """

    name: ClassVar[str] = "native"

    def __init__(
        self,
        io: IoRunner,
        calls: FileCalls | None,
        kv_view: memoryview,
        prefix: bytes,
        slot_bytes: int,
        *,
        threads: int,
        seals: Seals | None = None,
    ) -> None:
        """Start the threads, on the loop that awaits them; see `create_block_io`.

        `calls`, if given, replace the system calls, and are called with the GIL. The prefix is that
        of checksums; `seals`, if given, encrypt the blocks instead.
        """
        self._io = io
        self._seals = seals
        self._prefix = prefix if seals is None else seals.prefix
        self._engine: Engine | None = open_engine(threads, calls, seals)
        self._flat = kv_view.cast("B", (kv_view.nbytes,))
        self._memory = self._engine.map(self._flat, kv_view.nbytes // len(kv_view), slot_bytes)
        self._pending: dict[int, asyncio.Future[Any]] = {}
        """Ticket of a batch -> future of its outcome."""
        self._tending: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._engine.fd, self._deliver, self._engine)

    async def extents(
        self,
        direction: Direction,
        rows: Sequence[int],
        runs: Sequence[Run],
        keys: Sequence[OffloadKey] | None,
        *,
        is_direct: bool = False,
    ) -> Moved:
        memory, seals, is_store = self._memory, self._seals, direction is Direction.STORE
        prefix, begins = self._prefix, self._begins(len(rows)) if is_store else b""
        errors, digests = await self._submit(
            Engine.extents, memory, is_store, rows, runs, keys, prefix, begins
        )
        if seals is None:
            return Moved(errors, digests)
        found = [digests[at : at + SEAL_BYTES] for at in range(0, len(digests), SEAL_BYTES)]
        for index, code in errors.items():
            if code == NOT_DECRYPTED:
                errors[index] = not_opened(seals, found[index])
        return Moved(errors, b"".join([seal[TAG_AT:] for seal in found]))

    async def load_files(
        self,
        files: FileBatch,
        expected: Sequence[bytes | None],
        attribute: Attribute,
        *,
        verify: bool,
    ) -> LoadedFiles:
        """Read files into rows; for cancellation see `BlockIo.extents`.

        Args:
            files: The files.
            expected: Known values of the attribute, which are then not read.
            attribute: Attribute with the checksum.
            verify: Whether to compare checksums. Otherwise a file is whole if it has its length,
                and no attribute or one with this prefix and length.

        Raises:
            BusyError: Too many batches are queued.
        """
        loading = self._submit(
            Engine.load_files, self._memory, files, self._prefix, expected, attribute, verify=verify
        )
        return LoadedFiles(*await loading)

    async def store_files(
        self, files: FileBatch, how: FileStores, ended: list[StoredFiles]
    ) -> None:
        """Write rows to files that do not exist yet; for cancellation see `BlockIo.extents`.

        Args:
            files: The files.
            how: See `FileStores`.
            ended: The result is appended when the batch ends, even if the call was cancelled.

        Raises:
            BusyError: Too many batches are queued.
        """
        begins = self._begins(len(files.rows))
        storing = self._submit(Engine.store_files, self._memory, files, self._prefix, how, begins)
        try:
            await storing
        finally:
            if storing.done():  # also if this task was cancelled
                statuses, digests, numbers = storing.result()
                ended.append(StoredFiles(statuses, digests, memoryview(numbers).cast("q")))

    async def has_files(self, root: tuple[int, str], names: Sequence[str]) -> bytes:
        """Return a byte for each name: 1 for a regular file, 0 if not, or if unknown.

        Raises:
            BusyError: Too many batches are queued.
        """
        found: bytes = await self._submit(Engine.has_files, root, names)
        return found

    async def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is None:
            return
        self._loop.remove_reader(engine.fd)
        if self._tending is not None:
            self._tending.cancel()
        self._memory.release()
        left = await self._io.run(Direction.METADATA, partial(engine.close, _CLOSE_S))
        if left:
            logger.warning("%d native threads are still in a system call and were abandoned", left)
        else:
            self._flat.release()

    def _begins(self, count: int) -> bytes:
        return b"" if self._seals is None else self._seals.begin(count)

    def _submit(
        self,
        submit: Callable[Concatenate[Engine, Arguments], int],
        *arguments: Arguments.args,
        **options: Arguments.kwargs,
    ) -> asyncio.Future[Any]:
        """Submit a batch; return a future of its outcome, which lasts until the batch has ended.

        A cancellation withdraws the operations not begun.
        """
        engine = self._engine
        if engine is None:
            raise TierClosedError("the block I/O is closed")
        try:
            ticket = submit(engine, *arguments, **options)
        except BlockingIOError as error:
            raise BusyError(f"{_QUEUED} batches are queued") from error
        future: LastingFuture[Any] = LastingFuture(partial(engine.withdraw, ticket))
        self._pending[ticket] = future
        if self._tending is None:
            self._tending = self._loop.call_later(_HUNG_AFTER_S, self._replace_hung, engine)
        return future

    def _deliver(self, engine: Engine) -> None:
        for ticket, outcome in engine.take():
            self._pending.pop(ticket).set_result(outcome)

    def _replace_hung(self, engine: Engine) -> None:
        """Replace hanging threads, periodically while batches are in flight."""
        self._tending = None
        if self._pending:
            engine.replace_hung(_HUNG_AFTER_S)
            self._tending = self._loop.call_later(_HUNG_AFTER_S, self._replace_hung, engine)
