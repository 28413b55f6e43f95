"""The native implementation: the engine's threads copy; one descriptor wakes the loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Final

from kvoffload_async.abc.tier import Direction, IoRunner
from kvoffload_async.block_io.contract import (
    Attribute,
    BlockDigests,
    BlockIo,
    FileBatch,
    FileCalls,
    FileStores,
    LoadedFiles,
    Moved,
    Run,
    StoredFiles,
)
from kvoffload_async.block_io.engine import Engine, Memory
from kvoffload_async.block_io.hashes import addresses
from kvoffload_async.errors import BusyError, TierClosedError
from kvoffload_async.types import OffloadKey
from kvoffload_async.waiting import LastingFuture

__all__ = ["Engine", "Memory", "NativeBlockIo", "open_engine"]

logger = logging.getLogger(__name__)

_QUEUED: Final = 4096
"""Maximum number of queued batches per direction."""

_HUNG_AFTER_S: Final = 1.0
"""Seconds in one system call after which a thread is replaced by a spare one."""

_CLOSE_S: Final = 5.0
"""Seconds for idle threads to end."""


_Take = Callable[[Any], None]
"""Receives an outcome."""


def _ignore(_outcome: object) -> None:
    pass


@contextlib.contextmanager
def _busy() -> Iterator[None]:
    """Convert the error of a full queue to a tier error."""
    try:
        yield
    except BlockingIOError as error:
        raise BusyError(f"{_QUEUED} batches are queued") from error


def open_engine(threads: int, calls: FileCalls | None = None) -> Engine:
    """Open an engine with a tier's thread counts.

    Args:
        threads: Number of threads that copy; as many spare ones may replace hanging threads.
        calls: Replaces the system calls; called with the GIL.

    Raises:
        OSError: Threads cannot be started.
    """
    store_threads = max(1, threads // 3)
    load_threads = max(1, threads - store_threads)
    return Engine(load_threads, store_threads, threads, _QUEUED, addresses(), calls)


class NativeBlockIo(BlockIo):
    """Copies blocks with its own native engine. Thread: loop."""

    name: ClassVar[str] = "native"

    def __init__(
        self,
        io: IoRunner,
        calls: FileCalls | None,
        kv_view: memoryview,
        digests: BlockDigests,
        slot_bytes: int,
        *,
        threads: int,
    ) -> None:
        """Start the threads, on the loop that awaits them; see `create_block_io`.

        `calls`, if given, replace the system calls, and are called with the GIL.
        """
        self._io = io
        self._prefix = digests.prefix
        self._engine: Engine | None = open_engine(threads, calls)
        self._flat = kv_view.cast("B", (kv_view.nbytes,))
        self._memory = self._engine.map(self._flat, kv_view.nbytes // len(kv_view), slot_bytes)
        self._pending: dict[int, tuple[asyncio.Future[Any], _Take]] = {}
        """Ticket -> future of the outcome, and a callback that receives it even after a
        cancellation."""
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
        engine, is_store = self._opened(), direction is Direction.STORE
        with _busy():
            ticket = engine.extents(self._memory, is_store, rows, runs, keys, self._prefix)
        return Moved(*await self._outcome(engine, ticket))

    async def load_files(
        self,
        files: FileBatch,
        expected: Sequence[bytes | None],
        attribute: Attribute,
        *,
        verify: bool,
    ) -> LoadedFiles:
        """See `FileIo.load_files`."""
        engine = self._opened()
        with _busy():
            ticket = engine.load_files(
                self._memory,
                files.root,
                files.names,
                files.rows,
                files.keys,
                self._prefix,
                *attribute,
                expected,
                verify=verify,
            )
        return LoadedFiles(*await self._outcome(engine, ticket))

    async def store_files(
        self, files: FileBatch, how: FileStores, ended: list[StoredFiles]
    ) -> None:
        """See `FileIo.store_files`."""
        engine = self._opened()
        with _busy():
            ticket = engine.store_files(
                *(self._memory, files.root, files.names, files.rows, files.keys, self._prefix),
                *(*how.attribute, how.victims, how.marker, how.may_write),
                *(how.temp_stem, how.first_serial),
                file_mode=-1 if how.file_mode is None else how.file_mode,
                fsync=how.fsync,
                wants_disk_bytes=how.wants_disk_bytes,
                has_digest=how.has_digest,
            )

        def take(outcome: tuple[bytes, bytes, bytes]) -> None:
            statuses, digests, numbers = outcome
            ended.append(StoredFiles(statuses, digests, memoryview(numbers).cast("q")))

        await self._outcome(engine, ticket, take)

    async def has_files(self, root: tuple[int, str], names: Sequence[str]) -> bytes:
        """See `FileIo.has_files`."""
        engine = self._opened()
        with _busy():
            ticket = engine.has_files(root, names)
        return await self._outcome(engine, ticket)  # type: ignore[no-any-return]  # the call's own

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

    def _opened(self) -> Engine:
        if self._engine is None:
            raise TierClosedError("the block I/O is closed")
        return self._engine

    async def _outcome(self, engine: Engine, ticket: int, take: _Take = _ignore) -> Any:  # noqa: ANN401 - differs by call
        """Return a batch's outcome; if cancelled, withdraw operations not begun, and wait on."""
        future: LastingFuture[Any] = LastingFuture(partial(engine.withdraw, ticket))
        self._pending[ticket] = future, take
        if self._tending is None:
            self._tending = self._loop.call_later(_HUNG_AFTER_S, self._replace_hung, engine)
        return await future

    def _deliver(self, engine: Engine) -> None:
        for ticket, outcome in engine.take():
            future, take = self._pending.pop(ticket)
            try:
                take(outcome)
            except MemoryError as error:  # the other outcomes are not lost with this one
                future.set_exception(error)
            else:
                future.set_result(outcome)

    def _replace_hung(self, engine: Engine) -> None:
        """Replace hanging threads, periodically while batches are in flight."""
        self._tending = None
        if self._pending:
            engine.replace_hung(_HUNG_AFTER_S)
            self._tending = self._loop.call_later(_HUNG_AFTER_S, self._replace_hung, engine)
