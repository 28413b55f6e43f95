"""Keeps a namespace in order: its folders, its writers, its count, its size."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from kvoffload_async.abc.policy import CachePolicy
from kvoffload_async.abc.tier import Direction, TierEnvironment
from kvoffload_async.errors import ConfigError, TierError
from kvoffload_async.tiers.fs.blockfile import UNVERIFIED_MARKER, BlockFiles, Verify
from kvoffload_async.tiers.fs.inventory import Inventory, sweep_temps, take_inventory
from kvoffload_async.tiers.fs.layout import Namespace
from kvoffload_async.tiers.fs.ops import FileOps, disk_bytes
from kvoffload_async.tiers.fs.space import Space, SpaceSettings
from kvoffload_async.tiers.fs.usage import UsageFile
from kvoffload_async.tiers.fs.writers import HEARTBEAT_S, WriterRegistry

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CREATE = os.O_WRONLY | os.O_CREAT
_LEAVE_TIMEOUT_S = 1.0


class Keeper:
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
        self._task: asyncio.Task[None] | None = None

    def enter(self, verify: Verify) -> None:
        """Make the folders, register, and remove what dead writers left.

        Raises:
            OSError: The directory cannot be made or written.
            ConfigError: The filesystem lacks what `verify` requires.

        Thread: an I/O thread.
        """
        self._ops.make_folders(self._namespace.folder)
        self._write_config()
        self._writers.register()
        if verify is Verify.OFF:
            marker = f"{self._namespace.folder}/{UNVERIFIED_MARKER}"
            self._ops.close(self._ops.open(marker, _CREATE))
        if verify is Verify.REQUIRED:
            self._require_attributes()
        _, dead = self._writers.others()
        if dead:
            sweep_temps(self._ops, self._take_stock().temps, dead)
            for writer_id in dead:
                self._writers.forget(writer_id)

    async def open_space(
        self,
        settings: SpaceSettings,
        create_policy: Callable[[int], CachePolicy],
        row_bytes: int,
    ) -> Space:
        """Take stock, and make room if there is too little already.

        Raises:
            ConfigError: The capacity is below one block.
            OSError: The count cannot be kept here.
        """
        status = await self._run(partial(self._ops.stat, self._namespace.folder))
        grain = max(512, status.st_blksize)
        block_bytes = -(-row_bytes // grain) * grain
        folder_bytes = disk_bytes(status)
        least = block_bytes + 4 * folder_bytes
        if settings.capacity_bytes < least:
            raise ConfigError(
                f"capacity_bytes: {settings.capacity_bytes} holds no block of {block_bytes} bytes "
                f"and its folders; give at least {least}"
            )
        usage = UsageFile(
            self._ops,
            self._namespace.folder,
            self._writers.writer_id,
            lambda: self._take_stock().total_bytes,
        )
        await self._run(usage.open)
        self._usage = usage
        living, _ = await self._run(self._writers.others)
        inventory = await self._run(self._take_stock)
        await self._run(partial(usage.start, inventory.total_bytes, living))
        self._space = Space(
            settings,
            create_policy(settings.capacity_bytes // block_bytes),
            usage,
            self._files,
            block_bytes=block_bytes,
            folder_bytes=folder_bytes,
            announce=self._env.blocks_evicted,
        )
        self._space.learn(inventory)
        await self._trim(usage, self._space)
        return self._space

    def start(self, rescan_interval_s: float) -> None:
        """Begin to keep house in the background."""
        self._task = asyncio.get_running_loop().create_task(
            self._keep(rescan_interval_s), name="fs:keeper"
        )

    async def leave(self) -> None:
        """Stop, give back what was set aside, and say goodbye."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=_LEAVE_TIMEOUT_S)
        await self._run(self._say_goodbye)

    # -- inside ---------------------------------------------------------------------------------

    async def _run(self, call: Callable[[], T]) -> T:
        return await self._env.io.run(Direction.NONE, call)

    def _write_config(self) -> None:
        """Write the run configuration down, for people. Thread: an I/O thread."""
        path = self._namespace.config_path
        self._ops.make_folders(path.rpartition("/")[0])
        temp = f"{path}.{self._writers.writer_id}.tmp"
        text = json.dumps(self._namespace.fields, indent=2, sort_keys=True)
        fd = self._ops.open(temp, _CREATE | os.O_EXCL)
        try:
            self._ops.pwrite(fd, memoryview(text.encode()), 0)
        finally:
            self._ops.close(fd)
        self._ops.rename(temp, path)

    def _require_attributes(self) -> None:
        probe = f"{self._namespace.folder}/.probe.{self._writers.writer_id}"
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
            self._ops.unlink(probe)

    def _take_stock(self) -> Inventory:
        return take_inventory(self._ops, self._namespace)

    def _say_goodbye(self) -> None:
        """Each step has its chance. Thread: an I/O thread."""
        with contextlib.ExitStack() as steps:
            steps.callback(self._writers.unregister)
            if self._usage is not None:
                steps.callback(self._usage.close)

    async def _keep(self, rescan_interval_s: float) -> None:
        """Show that this tier lives, and keep the count true to the disk."""
        loop = asyncio.get_running_loop()
        rescan_at_s = loop.time() + rescan_interval_s
        while True:
            await asyncio.sleep(min(HEARTBEAT_S, rescan_interval_s))
            try:
                await self._run(self._writers.heartbeat)
                if self._space is None or self._usage is None:
                    continue
                if loop.time() >= rescan_at_s:
                    rescan_at_s = loop.time() + rescan_interval_s
                    await self._rescan(self._usage, self._space)
                await self._trim(self._usage, self._space)
            except (OSError, TierError) as error:
                logger.warning("%s: keeping house failed: %s", self._namespace.folder, error)

    async def _rescan(self, usage: UsageFile, space: Space) -> None:
        """Learn what others have added and removed, and correct the count by it."""
        before = await self._run(usage.read)
        inventory = await self._run(self._take_stock)
        space.learn(inventory)
        # What was settled during the walk may be in it as well: counted twice until the next.
        drift = inventory.total_bytes - inventory.temp_bytes - before.settled_bytes
        if drift:
            await self._run(partial(usage.settle, 0, drift))

    async def _trim(self, usage: UsageFile, space: Space) -> None:
        """Remove blocks while the count is above the watermark."""
        trimming = False
        while victims := space.trim_batch(await self._run(usage.read), trimming=trimming):
            trimming = True
            await space.remove(victims, self._run)
