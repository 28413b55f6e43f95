"""Background maintenance of a namespace: heartbeats, walks, the shared count, and eviction."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Container, Sequence
from functools import partial
from itertools import islice
from typing import TypeVar

from kvoffload_async.abc.tier import Direction, TierEnvironment
from kvoffload_async.error_log import ErrorLog
from kvoffload_async.errors import OffloadError
from kvoffload_async.tables.arrays import MAX_NUMBERS
from kvoffload_async.tiers.fs.blockfile import BlockFiles
from kvoffload_async.tiers.fs.namespace_init import enter_namespace
from kvoffload_async.tiers.fs.space import Space
from kvoffload_async.tiers.fs.usage import UsageFile
from kvoffload_async.tiers.fs.walk import NamespaceWalk, Step
from kvoffload_async.tiers.fs.writers import HEARTBEAT_S
from kvoffload_async.types import OffloadKey

logger = logging.getLogger(__name__)

T = TypeVar("T")


_LEAVE_TIMEOUT_S = 1.0

_SHARE = 0.02
"""Average share of one CPU that walks may use."""
_SHARE_UNKNOWN = 0.5
"""Share of one CPU for walks while blocks or the count are unknown, or the count is too high."""
_REST = 5.0
"""Minimum pause between walks, as a multiple of the last walk's duration."""
_LEAST_REST_S = 0.02
_STEP_S = 0.02
"""CPU time after which a step of a walk begins no further bucket."""
_OPENING_S = 0.2
"""Maximum time to walk at opening, or for a job that finds no room."""
_PORTION = 512
"""Number of blocks processed at a time, so that the loop is blocked only for milliseconds."""
_MOST_DISCARDS = 65_536
"""Maximum number of blocks queued for removal; further blocks are not removed."""


class Housekeeping:
    """Maintains a namespace in the background.

    Call from the event loop's thread unless documented otherwise.
    """

    def __init__(
        self,
        files: BlockFiles,
        env: TierEnvironment,
        check_root: Callable[[], None],
        *,
        pinned: Container[OffloadKey],
    ) -> None:
        """Create the housekeeping; it begins with `open_space` and `start`.

        Args:
            files: The block files.
            env: The tier's environment.
            check_root: Raises OSError if the root is not the directory that was opened.
            pinned: Blocks that must not be discarded.
        """
        self._files = files
        self._folder = files.namespace.folder
        self._writers = files.writers
        self._env = env
        self._check_root = check_root
        self._pinned = pinned
        self._errors = ErrorLog(logger, f"{self._folder}: housekeeping")
        """Logs unexpected errors, which must not end the heartbeats of a living writer."""
        self._usage: UsageFile | None = None
        self._space: Space | None = None
        self._registering = asyncio.Lock()
        self._num_registered = 1
        self._walk = NamespaceWalk(files.ops, files.namespace, files.writers, None)
        self._task: asyncio.Task[None] | None = None
        self._walking = asyncio.Lock()
        self._unwanted: dict[OffloadKey, None] = {}
        self._discarding: asyncio.Task[None] | None = None
        self._is_leaving = threading.Event()
        self._walks = 0
        self._cycle_begun_s = 0.0
        self._next_step_s = 0.0
        self._next_look_s = 0.0

    async def open_space(self, capacity_bytes: int) -> Space:
        """Join the shared count, and return the `Space` that enforces the capacity.

        Raises:
            ConfigError: The capacity is less than one block, or the count's format is newer.
            OSError: The count's file cannot be used.
        """
        files = self._files
        status = await self._run(partial(files.ops.stat, self._folder))
        block_bytes = files.settings.allocated_bytes(files.block_bytes, status)
        usage = UsageFile(
            files.ops,
            self._folder,
            self._writers.writer_id,
            self._writers.living,
            leftover_bytes=lambda: len(files.leftover_temps) * block_bytes,
        )
        self._usage = usage  # first: if this is cancelled, the count was joined nevertheless
        await self._run(lambda: usage.open(self._writers.entry_bytes()))
        self._walk = NamespaceWalk(files.ops, files.namespace, self._writers, usage)
        settings, capacity = files.settings, min(capacity_bytes // block_bytes, MAX_NUMBERS)
        policy, parts = settings.create_policy(capacity), settings.parts(block_bytes)
        if settings.quotas is not None:
            policy = settings.quotas.policies(settings.create_policy, capacity)
        self._space = Space(
            policy,
            usage,
            files,
            self._env,
            capacity_bytes=capacity_bytes,
            block_bytes=block_bytes,
            parts=parts,
        )
        return self._space

    async def look_around(self) -> None:
        """Walk over the namespace for a limited time, at most a cycle; then evict if necessary.

        Raises:
            OSError: The namespace or its count cannot be used.
        """
        async with self._walking:
            await self._walk_for(_OPENING_S, lambda step: step.ends_cycle)
        await self._trim()

    def start(self) -> None:
        """Start housekeeping in the background."""
        self._task = asyncio.get_running_loop().create_task(
            self._run_periodically(), name="fs:housekeeping"
        )

    async def look_for_blocks(self, space: Space, count: int) -> bool:
        """Walk for a limited time to find `count` evictable blocks, unless a walk has just ended.

        Returns:
            Whether a walk was made since the call.
        """
        walks = self._walks
        async with self._walking:
            if self._walks != walks:
                return True
            loop = asyncio.get_running_loop()
            begun_s = loop.time()
            if begun_s < self._next_look_s:
                return False
            try:
                await self._walk_for(
                    _OPENING_S, lambda step: space.can_evict(count) or step.ends_cycle
                )
            except (OSError, OffloadError) as error:
                logger.warning("%s: looking for room failed: %s", self._folder, str(error))
                return False
            self._next_look_s = loop.time() + _REST * (loop.time() - begun_s)
            return True

    async def recover(self) -> bool:
        """Register the writer again if needed after a failed store; return whether it was."""
        try:
            return await self._beat()
        except (OSError, OffloadError) as error:
            logger.warning("registering again failed: %s", str(error))
            return False

    def discard(self, keys: Collection[OffloadKey]) -> None:
        """Remove blocks in the background, except those that are pinned or that a job uses."""
        waiting = self._unwanted
        waiting.update(dict.fromkeys(islice(keys, max(0, _MOST_DISCARDS - len(waiting)))))
        if (num_kept := sum(key not in waiting for key in keys)) > 0:
            logger.warning(
                "%s: %d blocks are not removed, because %d others wait for it; ask again later",
                *(self._folder, num_kept, len(waiting)),
            )
        if waiting and self._discarding is None:
            task = asyncio.get_running_loop().create_task(self._discard(), name="fs:discard")
            self._discarding = task

    async def leave(self) -> None:
        """Stop housekeeping, release reservations, and unregister the writer."""
        self._is_leaving.set()
        tasks = {task for task in (self._task, self._discarding) if task is not None}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_LEAVE_TIMEOUT_S)
        await self._run(self._close)

    # -- inside ---------------------------------------------------------------------------------

    async def _run(self, call: Callable[[], T], /) -> T:
        return await self._env.io.run(Direction.METADATA, call)

    async def _beat(self) -> bool:
        """Send a heartbeat, or register the writer again; return whether it was registered again.

        This writer's entry is removed together with the namespace or its folder of writers, or by
        another writer that assumed this one dead, for instance after ten minutes of suspension.

        Raises:
            OSError: It cannot be registered now, or its root is lost.
        """
        num_registered = self._num_registered
        async with self._registering:
            if self._num_registered != num_registered:
                return True
            if await self._run(self._writers.heartbeat):
                return False
            old_id = self._writers.writer_id
            await self._run(self._enter_again)
            self._num_registered += 1
            logger.warning(
                "%s: its writer entry was removed, with its folder or by a writer that assumed "
                "it dead; registered again, counting again",
                old_id,
            )
            await self._begin_anew()
            return True

    def _enter_again(self) -> None:
        """Register the writer and create the folders again, as at opening. On an I/O thread."""
        self._check_root()
        self._writers.renew_id()
        self._files.forget_synced()
        enter_namespace(self._files)
        if self._usage is not None:  # a writer must register before it joins the count
            self._usage.rename_writer(self._writers.writer_id)

    async def _begin_anew(self) -> None:
        """Begin a new cycle of walks, because the namespace or its count was created again."""
        async with self._walking:
            self._walk.begin_anew()
        await self.look_around()

    def _close(self) -> None:
        """Leave the count and unregister the writer, each even if the other fails.

        Runs on an I/O thread.
        """
        with contextlib.ExitStack() as steps:
            steps.callback(self._unregister)
            if self._usage is not None:
                steps.callback(self._usage.close)

    def _unregister(self) -> None:
        try:
            self._files.sweep_leftover_temps()
        except OSError:
            self._writers.die()  # the next start finds this writer dead, and sweeps its files
            raise
        self._writers.unregister()

    async def _run_periodically(self) -> None:
        """Send heartbeats, and walk in small steps."""
        loop = asyncio.get_running_loop()
        rescan_interval_s = self._files.settings.rescan_interval_s
        tick_s = min(HEARTBEAT_S, rescan_interval_s)
        tick_at_s = loop.time() + tick_s
        while True:
            walk_at_s = self._next_step_s
            if self._is_known and not self._walk.is_in_cycle:
                walk_at_s = max(walk_at_s, self._cycle_begun_s + rescan_interval_s)
            await asyncio.sleep(min(walk_at_s, tick_at_s) - loop.time())
            try:
                if loop.time() >= tick_at_s:
                    tick_at_s = loop.time() + tick_s
                    await self._tick()
                elif loop.time() >= walk_at_s:
                    async with self._walking:
                        await self._take_step(self._is_leaving.is_set)
                    await self._trim()
            except (OSError, OffloadError) as error:
                self._next_step_s = max(self._next_step_s, loop.time() + tick_s)
                logger.warning("%s: housekeeping failed: %s", self._folder, str(error))
            except Exception as error:  # noqa: BLE001 - see the attribute
                self._next_step_s = max(self._next_step_s, loop.time() + tick_s)
                self._errors.note(error)

    async def _tick(self) -> None:
        """Send a heartbeat, retry the removal of temporary files, and evict if necessary.

        Raises:
            OSError: One of them failed.
        """
        await self._beat()
        try:
            await self._run(self._files.sweep_leftover_temps)
        finally:
            await self._trim()

    async def _discard(self) -> None:
        """Remove the blocks queued by `discard`, a portion at a time."""
        try:
            while keys := list(islice(self._unwanted, _PORTION)):
                for key in keys:  # first, because a request that comes meanwhile is a new one
                    del self._unwanted[key]
                with self._errors.survived():
                    try:
                        await self.remove(keys)
                    except (OSError, OffloadError) as error:
                        logger.warning("%s: blocks were not removed: %s", self._folder, str(error))
        finally:
            self._discarding = None

    async def remove(self, keys: Sequence[OffloadKey]) -> dict[OffloadKey, OSError | None]:
        """Remove the files of blocks that are not pinned or in use, and announce the eviction.

        Returns:
            The keys that still have a file, or may have one, with the error that says so.

        Raises:
            OSError: The root is lost, or the shared count cannot be used.
        """

        def find() -> frozenset[OffloadKey]:
            self._check_root()
            return self._files.present(keys)

        found = await self._run(find)
        if self._space is not None:  # others may have removed known ones
            gone = found.union(self._space.present(keys))
            await self._space.remove(self._space.withdraw(gone), self._run)
        elif idle := [key for key in found if key not in self._pinned]:
            await self._run(lambda: self._files.remove(idle))
            self._env.blocks_evicted(idle)
        return await self._run(lambda: self._files.left(keys))

    async def _walk_for(self, seconds: float, is_enough: Callable[[Step], bool]) -> None:
        """Walk until `is_enough` is true, or for `seconds`. Call with the lock of walks held."""
        loop = asyncio.get_running_loop()
        begun_s, cpu_s = loop.time(), 0.0
        until_s = time.monotonic() + seconds

        def should_stop() -> bool:
            return self._is_leaving.is_set() or time.monotonic() > until_s

        while not should_stop():
            step = await self._take_step(should_stop)
            cpu_s += step.cpu_s
            if is_enough(step):
                break
        self._rest(begun_s, cpu_s)
        self._walks += 1

    async def _take_step(self, should_stop: Callable[[], bool]) -> Step:
        """Walk over a few buckets, and add the blocks found. Call with the lock of walks held."""
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        space = self._space
        if not self._walk.is_in_cycle:
            self._cycle_begun_s = begun_s
            if space is not None:
                space.blocks.begin_cycle()
        if space is None:
            step = await self._run(partial(self._walk.step, _STEP_S, should_stop))
        else:
            space.blocks.begin_walk()
            try:
                step = await self._run(partial(self._walk.step, _STEP_S, should_stop))
                step.cpu_s += await self._learn(space, step)
            finally:
                space.blocks.end_walk()
        self._rest(begun_s, step.cpu_s)
        if step.error is not None:
            logger.warning("%s: a part is unreadable: %s", self._folder, str(step.error))
        return step

    async def _learn(self, space: Space, step: Step) -> float:
        """Add the blocks found by a step to the known blocks; return the CPU seconds used."""
        cpu_s = 0.0
        found = list(step.found)
        surplus: list[OffloadKey] = []
        for first in range(0, len(found), _PORTION):
            begun_s = time.thread_time()
            surplus += space.blocks.learn(found[first : first + _PORTION], step.found)
            cpu_s += time.thread_time() - begun_s
            await asyncio.sleep(0)
        more: int | None = 0 if step.ends_cycle else None
        while more is not None:
            begun_s = time.thread_time()
            more = space.drop_vanished(more, step.unwalked)
            cpu_s += time.thread_time() - begun_s
            await asyncio.sleep(0)
        if step.ends_cycle:
            space.blocks.is_first_cycle = False
        for first in range(0, len(surplus), _PORTION):  # last, because removing may fail
            await space.remove(space.withdraw(surplus[first : first + _PORTION]), self._run)
        return cpu_s

    @property
    def _is_known(self) -> bool:
        """Whether all blocks are known and new ones can be stored, so that walks are not urgent."""
        space = self._space
        return space is None or (space.can_store and not space.blocks.is_first_cycle)

    def _rest(self, begun_s: float, cpu_s: float) -> None:
        """Schedule the next step so that walks stay within their share of a CPU."""
        now_s = asyncio.get_running_loop().time()
        rest_s = cpu_s * (1 / (_SHARE if self._is_known else _SHARE_UNKNOWN) - 1)
        if self._is_known:
            rest_s = max(rest_s, _REST * (now_s - begun_s))
        self._next_step_s = now_s + max(rest_s, _LEAST_REST_S)

    async def _trim(self) -> None:
        if self._space is not None:
            await self._space.trim(self._run)
