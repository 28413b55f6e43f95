"""Housekeeping of a namespace: its folders, its writers, its count, its size."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from kvoffload_async.abc.policy import CachePolicy
from kvoffload_async.abc.tier import Direction, TierEnvironment
from kvoffload_async.errors import ConfigError, OffloadError
from kvoffload_async.tables.arrays import MAX_NUMBERS
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.fs.blockfile import BlockFiles
from kvoffload_async.tiers.fs.layout import TEMP_SUFFIX, Namespace
from kvoffload_async.tiers.fs.outcome import Verify
from kvoffload_async.tiers.fs.space import Footprint, Space, SpaceSettings
from kvoffload_async.tiers.fs.usage import UsageFile
from kvoffload_async.tiers.fs.walk import NamespaceWalk, Step
from kvoffload_async.tiers.fs.writers import HEARTBEAT_S, WriterRegistry
from kvoffload_async.tiers.fs.writing import UNVERIFIED_MARKER

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CREATE = os.O_WRONLY | os.O_CREAT
_LEAVE_TIMEOUT_S = 1.0

_SHARE = 0.02
"""Of a processor's time, what walks may take on average."""
_SHARE_UNKNOWN = 0.25
"""The same as long as the count is not known, and so nothing can be stored."""
_REST = 5.0
"""How many times as long as a walk took, none is made, however little processor time it took."""
_LEAST_REST_S = 0.1
_STEP_S = 0.02
"""Of processor time, what a step may take before it begins another bucket."""
_OPENING_S = 0.2
"""How long opening, or a job that finds no room, looks around."""
_PORTION = 1024
"""Blocks that are learned at a time, so that the loop is kept busy for milliseconds."""


class Housekeeping:
    """Everything about a namespace that is not a block's bytes. Thread: loop, where not said."""

    def __init__(
        self,
        ops: FileOps,
        namespace: Namespace,
        writers: WriterRegistry,
        files: BlockFiles,
        env: TierEnvironment,
    ) -> None:
        self._ops = ops
        self._namespace = namespace
        self._writers = writers
        self._files = files
        self._env = env
        self._usage: UsageFile | None = None
        self._space: Space | None = None
        self._walk = NamespaceWalk(ops, namespace, writers, None)
        self._task: asyncio.Task[None] | None = None
        self._walking = asyncio.Lock()
        self._is_leaving = threading.Event()
        self._walks = 0
        self._cycle_begun_s = 0.0
        self._next_step_s = 0.0
        self._next_look_s = 0.0

    def enter(self, verify: Verify) -> None:
        """Make the folders, and register.

        Raises:
            OSError: The directory cannot be made or written.
            ConfigError: The filesystem lacks what `verify` requires.

        Thread: an I/O thread.
        """
        self._ops.make_folders(self._namespace.folder)
        self._writers.register()  # before any other file: temporary ones name their writer
        self._write_config()
        if verify is Verify.OFF:
            marker = f"{self._namespace.folder}/{UNVERIFIED_MARKER}"
            self._ops.close(self._ops.open(marker, _CREATE))
        if verify is Verify.REQUIRED:
            self._require_attributes()

    async def open_space(
        self,
        settings: SpaceSettings,
        create_policy: Callable[[int], CachePolicy],
        row_bytes: int,
    ) -> Space:
        """Join the count.

        Raises:
            ConfigError: The capacity is below one block, or the count's format is newer.
            OSError: The count cannot be kept here.
        """
        status = await self._run(partial(self._ops.stat, self._namespace.folder))
        footprint = Footprint.of(status, row_bytes)
        footprint.check(settings.capacity_bytes)
        block_bytes, folder_bytes = footprint.block_bytes, footprint.folder_bytes
        usage = UsageFile(
            self._ops, self._namespace.folder, self._writers.writer_id, self._writers.living
        )
        await self._run(lambda: usage.open(self._writers.entry_bytes()))
        self._usage = usage
        self._walk = NamespaceWalk(self._ops, self._namespace, self._writers, usage)
        self._space = Space(
            settings,
            create_policy(min(settings.capacity_bytes // block_bytes, MAX_NUMBERS)),
            usage,
            self._files,
            block_bytes=block_bytes,
            folder_bytes=folder_bytes,
            announce=self._env.blocks_evicted,
        )
        return self._space

    async def look_around(self) -> None:
        """Walk for a moment, which is a whole cycle where there is little; make room if need be.

        Raises:
            OSError: The namespace or its count cannot be used.
        """
        async with self._walking:
            await self._walk_for(_OPENING_S, lambda step: step.ends_cycle or step.is_waiting)
        if self._usage is not None and self._space is not None:
            await self._trim(self._usage, self._space)

    def start(self, rescan_interval_s: float) -> None:
        """Start housekeeping in the background."""
        self._task = asyncio.get_running_loop().create_task(
            self._run_periodically(rescan_interval_s), name="fs:housekeeping"
        )

    async def look_for_blocks(self) -> bool:
        """Walk for a moment, unless that was just done, for blocks that could be evicted.

        Returns:
            Whether a walk has been made since the call.
        """
        space = self._space
        if space is None:
            return False
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
                    _OPENING_S, lambda step: space.can_evict or step.ends_cycle or step.is_waiting
                )
            except (OSError, OffloadError) as error:
                logger.warning(
                    "%s: looking for room failed: %s", self._namespace.folder, str(error)
                )
                return False
            self._next_look_s = loop.time() + _REST * (loop.time() - begun_s)
            return True

    async def begin_anew(self) -> None:
        """Begin another cycle: the namespace, or its count, was taken away and made again.

        Raises:
            OSError: The namespace or its count cannot be used.
        """
        async with self._walking:
            self._walk.begin_anew()
        await self.look_around()

    async def leave(self) -> None:
        """Stop, give back what was reserved, and unregister."""
        self._is_leaving.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=_LEAVE_TIMEOUT_S)
        await self._run(self._close)

    # -- inside ---------------------------------------------------------------------------------

    async def _run(self, call: Callable[[], T], /) -> T:
        return await self._env.io.run(Direction.NONE, call)

    def _write_config(self) -> None:
        """Write the run configuration down, for people; if that fails, nothing depends on it."""
        path = self._namespace.config_path
        temp = f"{self._namespace.folder}/config.json.{self._writers.writer_id}.0{TEMP_SUFFIX}"
        text = json.dumps(self._namespace.fields, indent=2, sort_keys=True)
        try:
            self._ops.make_folders(path.rpartition("/")[0])
            if self._ops.exists(path):
                return
            fd = self._ops.open(temp, _CREATE)
            try:
                written = self._ops.pwrite(fd, memoryview(text.encode()), 0)
            finally:
                self._ops.close(fd)
            if written == len(text):
                self._ops.rename(temp, path)
            else:
                self._files.writer.discard(temp)
        except OSError as error:
            logger.warning("%s is not written: %s", path, str(error))
            self._files.writer.discard(temp)

    def _require_attributes(self) -> None:
        probe = f"{self._namespace.folder}/probe.bin.{self._writers.writer_id}.0{TEMP_SUFFIX}"
        fd = self._ops.open(probe, _CREATE)
        try:
            self._ops.set_xattr(fd, "user.kvoffload.probe", b"1")
        except OSError as error:
            raise ConfigError(
                f"verify: 'required' needs extended attributes, which {probe!r} cannot have "
                f"({error}); use 'when_present', or another filesystem"
            ) from error
        finally:
            self._ops.close(fd)
            self._files.writer.discard(probe)

    def _close(self) -> None:
        """Each step has its chance. Thread: an I/O thread."""
        with contextlib.ExitStack() as steps:
            steps.callback(self._unregister)
            if self._usage is not None:
                steps.callback(self._usage.close)

    def _unregister(self) -> None:
        try:
            self._files.writer.sweep_litter()
        except OSError:
            self._writers.die()  # the next start finds this writer dead, and sweeps
            raise
        self._writers.unregister()

    async def _run_periodically(self, rescan_interval_s: float) -> None:
        """Show that this tier lives, and walk, a little at a time."""
        loop = asyncio.get_running_loop()
        tick_s = min(HEARTBEAT_S, rescan_interval_s)
        tick_at_s = loop.time() + tick_s
        while True:
            walk_at_s = self._next_step_s
            is_known = self._usage is None or self._usage.is_complete
            if is_known and not self._walk.is_in_cycle:
                walk_at_s = max(walk_at_s, self._cycle_begun_s + rescan_interval_s)
            await asyncio.sleep(max(0.0, min(walk_at_s, tick_at_s) - loop.time()))
            try:
                if loop.time() >= tick_at_s:
                    tick_at_s = loop.time() + tick_s
                    await self._run(self._writers.heartbeat)
                    if self._space is not None and self._usage is not None:
                        await self._trim(self._usage, self._space)
                elif loop.time() >= walk_at_s:
                    async with self._walking:
                        await self._take_step(self._is_leaving.is_set)
                    if self._space is not None and self._usage is not None:
                        await self._trim(self._usage, self._space)
            except (OSError, OffloadError) as error:
                self._next_step_s = max(self._next_step_s, loop.time() + tick_s)
                logger.warning("%s: housekeeping failed: %s", self._namespace.folder, str(error))

    async def _walk_for(self, seconds: float, is_enough: Callable[[Step], bool]) -> None:
        """Walk until it is enough, or for so long. Under the lock of walks."""
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
        """Walk over a few buckets, and learn what is in them. Under the lock of walks."""
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
            logger.warning("%s: not all can be read: %s", self._namespace.folder, str(step.error))
        return step

    async def _learn(self, space: Space, step: Step) -> float:
        """Take in what a step has found, in portions; return the processor time it took."""
        cpu_s = 0.0
        for first in range(0, len(step.found), _PORTION):
            begun_s = time.thread_time()
            surplus = space.blocks.learn(step.found[first : first + _PORTION])
            cpu_s += time.thread_time() - begun_s
            await asyncio.sleep(0)
            await space.remove(surplus, self._run)
        more: int | None = 0 if step.ends_cycle else None
        while more is not None:
            begun_s = time.thread_time()
            more = space.drop_vanished(more, step.unwalked)
            cpu_s += time.thread_time() - begun_s
            await asyncio.sleep(0)
        return cpu_s

    def _rest(self, begun_s: float, cpu_s: float) -> None:
        """Say when the next step is to be."""
        now_s = asyncio.get_running_loop().time()
        is_known = self._usage is None or self._usage.is_complete
        rest_s = cpu_s / (_SHARE if is_known else _SHARE_UNKNOWN)
        if is_known:
            rest_s = max(rest_s, _REST * (now_s - begun_s))
        self._next_step_s = now_s + max(rest_s, _LEAST_REST_S)

    async def _trim(self, usage: UsageFile, space: Space) -> None:
        """Remove blocks while the count is above the watermark."""
        trimming = False
        while victims := space.trim_batch(await self._run(usage.read), trimming=trimming):
            trimming = True
            await space.remove(victims, self._run)
