"""The `fs` tier: one file per block, in a directory that processes and hosts may share."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import ClassVar, TypeVar

from kvoffload_async.abc.events import BlockFailures
from kvoffload_async.abc.maintenance import StoreMaintenance
from kvoffload_async.abc.tier import (
    AsyncTier,
    Direction,
    TierBounds,
    TierCapabilities,
    TierEnvironment,
)
from kvoffload_async.block_io.choice import create_file_io
from kvoffload_async.errors import (
    CorruptBlockError,
    TierBusyError,
    TierClosedError,
    TierError,
    TierFullError,
    TierTimeoutError,
    Trouble,
)
from kvoffload_async.tables.keymap import key_of_cursor
from kvoffload_async.tiers.files.identity import DirectoryIdentity
from kvoffload_async.tiers.files.modes import warn_of_others
from kvoffload_async.tiers.files.ops import (
    FileOps,
    mapped,
    unusable,
    warn_of_capacity,
)
from kvoffload_async.tiers.fs.blockfile import BlockFiles
from kvoffload_async.tiers.fs.housekeeping import Housekeeping
from kvoffload_async.tiers.fs.layout import bucket_of
from kvoffload_async.tiers.fs.namespace_init import enter_namespace
from kvoffload_async.tiers.fs.native_files import NativeFiles
from kvoffload_async.tiers.fs.operations import LOST_ROOM, LoadFailure, StoreItem, failures_of
from kvoffload_async.tiers.fs.settings import WAITS_FOR_DEVICE, FsSettings
from kvoffload_async.tiers.fs.space import Space, unpin
from kvoffload_async.tiers.fs.usage import Operation
from kvoffload_async.tiers.fs.walk import keys_after
from kvoffload_async.tiers.fs.writers import WriterRegistry
from kvoffload_async.types import JobMetadata, OffloadKey
from kvoffload_async.waiting import SerialExecutor

T = TypeVar("T")

_ROUNDS = 64
_TURN_BYTES = 512 << 10
"""Bytes that a thread takes at a time: few enough for all threads to end at the same time."""
_SHARE_BYTES = 1 << 20
"""Minimum bytes of a job per thread; below that, waking another thread does not pay."""


class FsTier(AsyncTier):
    """A tier with one file per block, in a directory that processes and hosts may share.

    A large job runs on several I/O threads; a free thread takes the next few blocks. Each block
    succeeds or fails on its own.
    """

    declares = FsSettings
    remedies: ClassVar = {
        CorruptBlockError: "not served; if this recurs, check the disk: kvoffload store verify",
        TierFullError: "no blocks are stored until there is space: free some on the disk, or lower "
        "capacity_bytes so that the tier evicts in time",
        TierTimeoutError: "check the disk or the mount; if it is only slow, raise io_timeout_s",
        Trouble.TOO_SLOW: "raise cpu_bytes_to_use, set write_back to wait, or make the tier "
        "faster: raise n_write_threads, use a faster disk, or slab",
    }
    waits_for_device = WAITS_FOR_DEVICE

    def __init__(self, settings: FsSettings) -> None:
        """Create the tier; does no I/O before `open`."""
        self.capabilities = TierCapabilities(
            exclusive=False,
            persistent=True,
            locality=settings.locality,
            announces_removals=settings.capacity_bytes is not None,  # else none are tracked
            pins=True,
            discards=True,
            deletes=True,
            lists=True,
            ages=True,
        )
        self.bounds = TierBounds()
        self._settings = settings
        self._ops = settings.ops or FileOps()
        self._env: TierEnvironment | None = None
        self._rows: memoryview | None = None
        self._housekeeping: Housekeeping | None = None
        self._space: Space | None = None
        self._native: NativeFiles | None = None
        self._calls: SerialExecutor | None = None
        self._closing = AsyncExitStack()
        """Callbacks with which `close` undoes the steps of `open`."""
        self._pins: Counter[OffloadKey] = Counter()

    @classmethod
    def maintenance(cls) -> type[StoreMaintenance]:
        # Imported on demand, because it loads anyio.
        from kvoffload_async.tiers.fs.maintenance.store import FsMaintenance  # noqa: PLC0415

        return FsMaintenance

    async def open(self, env: TierEnvironment) -> None:
        """Create the folders, and start walking the namespace; walks continue in the background.

        Raises:
            ConfigError: The directory cannot be created or written, the filesystem lacks a feature
                that `verify` requires, or the capacity is less than one block.
            TierTimeoutError: A lock in it was not released in time.
            TierUnavailableError: Descriptors, memory or threads are exhausted.
        """
        settings, capacity_bytes = self._settings, self._settings.capacity_bytes
        self._env = env
        self._rows = env.kv_view.cast("B", (env.kv_view.nbytes,))
        self._closing.callback(self._rows.release)
        namespace, row_bytes = settings.namespace, env.kv_view.nbytes // len(env.kv_view)
        writers = WriterRegistry(self._ops, namespace.folder)
        self._files = files = BlockFiles(self._ops, namespace, writers, settings, row_bytes)
        try:
            self._root = await env.io.run(Direction.METADATA, self._enter)
            self._housekeeping = Housekeeping(files, env, self._root.check, pinned=self._pins)
            self._closing.push_async_callback(self._housekeeping.leave)
            await env.io.run(Direction.METADATA, partial(enter_namespace, files))
            if capacity_bytes is not None:
                self._space = await self._housekeeping.open_space(capacity_bytes)
            await self._housekeeping.look_around()
            if self._space is not None and self._space.can_store:  # the count is complete
                warn = partial(warn_of_capacity, self._ops, settings.root_dir)
                await env.io.run(Direction.METADATA, partial(warn, **self._space.gauges()))
        except TimeoutError as error:  # another process did not release a lock
            raise TierTimeoutError(f"root_dir: {settings.root_dir!r}: {error}") from error
        except OSError as error:
            raise unusable(settings.root_dir, error) from error
        self._calls = SerialExecutor("fs:store", lambda call: env.io.run(Direction.STORE, call))
        self._closing.push_async_callback(self._calls.close)
        if not settings.direct_io:
            file_io = create_file_io(
                *(env, self._ops, files.digester.digester, files.digester.seals),
                threads=settings.io_threads,
                is_system=type(self._ops) is FileOps,
            )
            if file_io is not None:
                self._native = NativeFiles(file_io, files, self._run_store)
                self._closing.push_async_callback(self._native.close)
        self._housekeeping.start()

    async def contains(self, keys: Sequence[OffloadKey]) -> frozenset[OffloadKey]:
        """Return the keys that have a file; known blocks without one are announced as evicted."""
        if self._native is not None:
            found = await self._native.present(keys)
        else:
            present = partial(self._files.present, keys)
            found = await self._opened().io.run(Direction.METADATA, present)
        if self._space is not None and len(found) < len(keys):
            await self._drop_removed(self._space, [key for key in keys if key not in found])
        return found

    async def store(self, job: JobMetadata) -> BlockFailures:
        """Write the blocks that have no file yet.

        Raises:
            TierUnavailableError: The root is not the directory that was opened.
        """
        keys, slots, check = job.keys, job.block_ids.tolist(), self._root.once()
        items = list(map(StoreItem, range(len(keys)), keys, slots))
        if self._space is None:
            await self._write(items, check)
            return failures_of(items)
        self._space.pin(keys)
        try:
            return await self._store_on(self._space, items, check)
        except BaseException:
            # The job fails as a whole, but the files that were written stay.
            self._opened().blocks_appeared(self._space.present(keys))
            raise
        finally:
            self._space.unpin(keys)

    async def load(self, job: JobMetadata) -> BlockFailures:
        """Read blocks directly into the job's slots, and verify them there.

        Raises:
            TierUnavailableError: The root is not the directory that was opened.
        """
        keys, slots, check = job.keys, job.block_ids.tolist(), self._root.once()
        failures: list[LoadFailure] = []

        async def read_all() -> None:
            left: Sequence[int] = range(len(keys))
            if self._native is not None:
                left = await self._native.load(keys, slots)

            def read(turn: Sequence[int]) -> None:
                self._files.load([(i, keys[i], self._row(slots[i])) for i in turn], failures)

            await self._spread(Direction.LOAD, check, left, read)

        if self._space is None:
            await read_all()
        else:
            operation = self._space.operation()
            self._space.pin(keys)
            try:
                await read_all()
            finally:
                self._space.unpin(keys)
                await self._note_loads(self._space, job, failures, operation)
        return {failure.index: failure.error for failure in failures}

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Record a use of blocks, ordered head to tail."""
        if self._space is not None:
            self._space.used(keys)

    def pin(self, keys: Sequence[OffloadKey]) -> None:
        """Keep this process from removing blocks, whether they are present or not.

        Other processes do not know of it.
        """
        self._pins.update(keys)
        if self._space is not None:
            self._space.pin(keys)

    def unpin(self, keys: Sequence[OffloadKey]) -> None:
        """Remove one pin from each block that has one."""
        pinned = [key for key in keys if key in self._pins]
        unpin(self._pins, pinned)
        if self._space is not None:
            self._space.unpin(pinned)

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Remove blocks in the background, except pinned ones; blocks that a job uses may stay."""
        if self._housekeeping is not None:
            self._housekeeping.discard(keys)

    async def delete(self, keys: Sequence[OffloadKey]) -> BlockFailures:
        """Delete the files of blocks, whoever has stored them.

        Raises:
            TierUnavailableError: The root is not the directory that was opened.
        """
        if self._housekeeping is None:
            raise TierClosedError("the fs tier is not open")
        try:
            left = await self._housekeeping.remove(keys)
        except OSError as error:
            raise mapped(error) from None
        pinned = TierBusyError(f"pinned below {self._settings.root_dir}")
        failures: dict[int, TierError] = {}
        for index, key in enumerate(keys):
            if key in left:
                why = left[key]
                failures[index] = pinned if why is None else mapped(why)
        return failures

    async def list_keys(
        self, cursor: str | None, count: int
    ) -> tuple[Sequence[OffloadKey], str | None]:
        """Return the next keys in their order; each call reads the folder of a bucket."""
        return await self.list_older(cursor, count, -math.inf)

    async def list_older(
        self, cursor: str | None, count: int, age_s: float
    ) -> tuple[Sequence[OffloadKey], str | None]:
        """As `list_keys`; a block's age is that of its file, by this host's clock."""
        walk = partial(
            keys_after,
            self._ops,
            self._settings.namespace,
            key_of_cursor(cursor),
            count,
            time.time() - age_s,
        )
        try:
            keys, last = await self._opened().io.run(Direction.METADATA, walk)
        except OSError as error:
            raise mapped(error) from None
        return keys, None if last is None else last.hex()

    async def close(self) -> None:
        """Stop housekeeping, release reservations, and unregister the writer; idempotent."""
        self._housekeeping = self._native = self._calls = None
        try:
            await self._closing.aclose()
        finally:
            self._env = self._rows = None

    def gauges(self) -> Mapping[str, float]:
        """Return the usage by all processes and the capacity; empty without a capacity."""
        if (space := self._space) is None:
            return {}
        return {**space.gauges(), **space.tenant_gauges()}

    def describe(self) -> str:
        """Return the location of the blocks."""
        return f"files below {self._settings.root_dir}"

    # -- storing within a capacity --------------------------------------------------------------

    async def _store_on(
        self, space: Space, items: list[StoreItem], check: Callable[[], None]
    ) -> BlockFailures:
        """Store blocks, retrying once if the tier had to register again meanwhile."""
        try:
            try:
                return await self._store_within(space, items, check)
            except OSError:  # the count cannot be updated in a removed folder
                if self._housekeeping is None or not await self._housekeeping.recover():
                    raise
                return await self._store_within(space, items, check)
        except OSError as error:  # a full disk is reported as such
            raise mapped(error) from None

    async def _store_within(
        self, space: Space, items: list[StoreItem], check: Callable[[], None]
    ) -> BlockFailures:
        """Store blocks, retrying those whose room was taken by other processes."""
        failures: dict[int, TierError] = {}
        is_full = has_looked = False
        for _ in range(_ROUNDS):
            plan = await space.plan(items, self._run_store, check, squeeze=is_full)
            try:
                await self._write(plan.items, check)
            finally:
                await space.account(plan, self._run_store)
            unplaced = TierFullError(f"no room below {self._settings.root_dir}, and none to make")
            failures |= {item.index: unplaced for item in plan.unplaced}
            for item in plan.items if failures else ():
                failures.pop(item.index, None)  # from the previous round
            failures |= failures_of(plan.items)
            full = [] if is_full else [i for i in plan.items if isinstance(i.error, TierFullError)]
            is_full = is_full or bool(full)  # evict, and retry once
            again = [item for item in plan.items if item.status in LOST_ROOM] + full
            if plan.unplaced and space.can_evict(1):  # others have taken the freed room
                again += plan.unplaced
            elif plan.unplaced and not has_looked and self._housekeeping is not None:
                has_looked = True
                if await self._housekeeping.look_for_blocks(space, len(plan.unplaced)):
                    again += plan.unplaced
            items = [StoreItem(item.index, item.key, item.slot) for item in again]
            if not items:
                break
        return failures

    async def _note_loads(
        self, space: Space, job: JobMetadata, failures: Sequence[LoadFailure], operation: Operation
    ) -> None:
        """Process the results of loads: blocks used, missing, or removed as corrupt."""
        if not failures:
            space.loaded(job.keys)
            return
        failed = {failure.index for failure in failures}
        gone = [failure for failure in failures if failure.freed_bytes is not None]
        space.loaded([key for index, key in enumerate(job.keys) if index not in failed])
        space.forget([job.keys[failure.index] for failure in gone])
        if gone:
            changes = [(bucket_of(job.keys[f.index]), -(f.freed_bytes or 0)) for f in gone]
            await space.settle(operation, changes, self._run_store)

    async def _drop_removed(self, space: Space, keys: Sequence[OffloadKey]) -> None:
        """Drop known blocks whose files other processes have removed; errors prove nothing."""
        if not (expected := space.idle(keys)):
            return

        def find() -> list[OffloadKey]:
            self._root.check()
            has_file, path_of = self._ops.has_file, self._files.namespace.get_file_name
            return [key for key in expected if not has_file(path_of(key))]

        with contextlib.suppress(OSError):
            space.drop_removed(expected, await self._opened().io.run(Direction.METADATA, find))

    async def _run_store(self, call: Callable[[], T], /) -> T:
        """Run a store's call that does no payload I/O, batched with calls of other jobs."""
        if self._calls is None:
            raise TierClosedError("the fs tier is not open")
        return await self._calls.run(call)

    # -- the rest -------------------------------------------------------------------------------

    def _enter(self) -> DirectoryIdentity:
        """Open the root directory, creating it if missing; return its identity.

        Runs on an I/O thread.
        """
        root_dir = self._settings.root_dir
        self._ops.enter(root_dir, self._settings.modes, sync=self._settings.fsync)
        self._closing.callback(self._ops.leave, root_dir)
        warn_of_others(root_dir, self._ops.stat(root_dir))
        return DirectoryIdentity(self._ops, root_dir)

    async def _write(self, items: Sequence[StoreItem], check: Callable[[], None]) -> None:
        """Store blocks; their results are filled in even if this raises."""
        left = items
        if self._native is not None and items:
            left = await self._native.store(items)

        store = partial(self._files.store, row_of=self._row)
        await self._spread(Direction.STORE, check, left, store)

    async def _spread(
        self,
        direction: Direction,
        check: Callable[[], None],
        blocks: Sequence[T],
        call: Callable[[Sequence[T]], None],
    ) -> None:
        """Call `call` with a few blocks at a time, on one or several threads."""
        if not blocks:
            return
        io, row_bytes, count = self._opened().io, self._files.block_bytes, len(blocks)
        by_turn = max(1, _TURN_BYTES // row_bytes)
        turns = iter(range(0, count, by_turn))

        def work() -> None:
            check()
            for first in turns:  # shared iterator: a free thread takes the next ones
                call(blocks[first : first + by_turn])

        threads = min(self._settings.io_threads, count, count * row_bytes // _SHARE_BYTES)
        await io.run(direction, work, helpers=max(0, threads - 1))

    def _row(self, slot: int) -> memoryview:
        if self._rows is None:
            raise TierClosedError("the fs tier is not open")
        row_bytes = self._files.block_bytes
        return self._rows[slot * row_bytes : (slot + 1) * row_bytes]

    def _opened(self) -> TierEnvironment:
        if self._env is None:
            raise TierClosedError("the fs tier is not open")
        return self._env
