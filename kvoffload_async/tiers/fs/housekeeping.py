"""Housekeeping of a namespace: its folders, its writers, its count, its size."""

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
from kvoffload_async.errors import ConfigError, OffloadError
from kvoffload_async.tables.arrays import MAX_NUMBERS
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.fs.blockfile import BlockFiles
from kvoffload_async.tiers.fs.format import require_known_format
from kvoffload_async.tiers.fs.inventory import (
    Inventory,
    sweep_folders,
    sweep_temps,
    take_inventory,
)
from kvoffload_async.tiers.fs.layout import TEMP_SUFFIX, Namespace
from kvoffload_async.tiers.fs.outcome import Verify
from kvoffload_async.tiers.fs.recovery import Recovery
from kvoffload_async.tiers.fs.space import Footprint, Space, SpaceSettings
from kvoffload_async.tiers.fs.usage import Usage, UsageFile
from kvoffload_async.tiers.fs.writers import HEARTBEAT_S, WriterRegistry
from kvoffload_async.tiers.fs.writing import UNVERIFIED_MARKER

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CREATE = os.O_WRONLY | os.O_CREAT
_LEAVE_TIMEOUT_S = 1.0
_REST = 5.0
"""How many times as long as a walk took, none is made on demand."""


def _unchecked() -> None:
    """Check nothing, before it is known what there is to check."""


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
        self._verify = Verify.OFF
        self._check_root: Callable[[], None] = _unchecked
        self._capacity_bytes = 0
        self._task: asyncio.Task[None] | None = None
        self._walking = asyncio.Lock()
        self._recovery = Recovery(writers, self._run, self._enter_again, self._recount)
        self._walks = 0
        self._next_walk_s = 0.0

    def enter(self, verify: Verify) -> None:
        """Make the folders, register, and sweep the stale files of dead writers.

        Raises:
            OSError: The directory cannot be made or written.
            ConfigError: The filesystem lacks what `verify` requires, or a newer release has changed
                what is in the directory.

        Thread: an I/O thread.
        """
        self._verify = verify
        self._ops.make_folders(self._namespace.folder)
        require_known_format(self._ops, self._namespace.folder)
        self._writers.register()  # before any other file: temporary ones name their writer
        self._write_config()
        if verify is Verify.OFF:
            marker = f"{self._namespace.folder}/{UNVERIFIED_MARKER}"
            self._ops.close(self._ops.open_own(marker, os.O_WRONLY))
        if verify is Verify.REQUIRED:
            self._require_attributes()
        self._files.writer.sync_root()
        self._sweep_stale()

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
        footprint = Footprint.of(status, row_bytes)
        footprint.check(settings.capacity_bytes)
        block_bytes, folder_bytes = footprint.block_bytes, footprint.folder_bytes
        usage = UsageFile(
            self._ops,
            self._namespace.folder,
            self._writers.writer_id,
            lambda: self._settled_bytes(self._take_stock()),
        )
        await self._run(usage.open)
        self._usage = usage
        self._capacity_bytes = settings.capacity_bytes
        inventory = await self._run(self._take_stock)
        await self._run(partial(self._join_count, usage, inventory))
        self._space = Space(
            settings,
            create_policy(min(settings.capacity_bytes // block_bytes, MAX_NUMBERS)),
            usage,
            self._files,
            block_bytes=block_bytes,
            folder_bytes=folder_bytes,
            announce=self._env.blocks_evicted,
        )
        await self._space.remove(self._space.learn(inventory, ()), self._run)
        await self._trim(usage, self._space)
        return self._space

    def start(self, rescan_interval_s: float, check_root: Callable[[], None]) -> None:
        """Start housekeeping in the background.

        Args:
            rescan_interval_s: Seconds between two walks.
            check_root: Raises OSError if the root is not the directory that was opened.
        """
        self._check_root = check_root
        self._task = asyncio.get_running_loop().create_task(
            self._run_periodically(rescan_interval_s), name="fs:housekeeping"
        )

    async def look_for_blocks(self) -> bool:
        """Walk, unless that was done a moment ago, for blocks of others that could be evicted.

        Returns:
            Whether a walk has ended since the call.
        """
        if self._usage is None or self._space is None:
            return False
        walks = self._walks
        async with self._walking:
            if self._walks != walks:
                return True
            if asyncio.get_running_loop().time() < self._next_walk_s:
                return False
            try:
                await self._rescan(self._usage, self._space)
            except (OSError, OffloadError) as error:
                logger.warning(
                    "%s: looking for room failed: %s", self._namespace.folder, str(error)
                )
                return False
            return True

    async def recover(self) -> bool:
        """Tell, when a store has failed, whether the tier had to register and has done so."""
        return await self._recovery.try_beat()

    async def leave(self) -> None:
        """Stop, give back what was reserved, and unregister."""
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

    def _sweep_stale(self) -> None:
        """Sweep the stale files of dead writers. Thread: an I/O thread."""
        _, dead = self._writers.others()
        if dead:
            inventory = self._take_stock()
            swept = sweep_temps(self._ops, inventory.temps, dead)
            sweep_folders(self._ops, inventory, swept)
            for writer_id in dead:
                self._writers.forget(writer_id)

    def _enter_again(self) -> None:
        """Register, and make what must be there, as at the opening. Thread: an I/O thread."""
        self._check_root()
        self._writers.renew_id()
        self._files.rename_writer(self._writers.writer_id)
        if self._usage is not None:
            self._usage.rename_writer(self._writers.writer_id)
        self.enter(self._verify)

    async def _recount(self) -> None:
        if self._usage is not None and self._space is not None:
            async with self._walking:
                await self._rescan(self._usage, self._space)

    def _take_stock(self) -> Inventory:
        return take_inventory(self._ops, self._namespace)

    def _settled_bytes(self, inventory: Inventory) -> int:
        return inventory.settled_bytes({*self._writers.living(), self._writers.writer_id})

    def _join_count(self, usage: UsageFile, inventory: Inventory) -> None:
        settled_bytes = self._settled_bytes(inventory)
        usage.start(self._writers.living, settled_bytes, self._writers.entry_bytes())

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
        """Show that this tier lives, and keep the count true to the disk."""
        loop = asyncio.get_running_loop()
        rescan_at_s = loop.time() + rescan_interval_s
        while True:
            await asyncio.sleep(min(HEARTBEAT_S, rescan_interval_s))
            try:
                await self._recovery.beat()
                if self._space is None or self._usage is None:
                    continue
                if loop.time() >= rescan_at_s:
                    rescan_at_s = loop.time() + rescan_interval_s
                    async with self._walking:
                        await self._rescan(self._usage, self._space)
                await self._trim(self._usage, self._space)
            except (OSError, OffloadError) as error:
                logger.warning("%s: housekeeping failed: %s", self._namespace.folder, str(error))

    async def _rescan(self, usage: UsageFile, space: Space) -> None:
        """Learn what others have added and removed, and correct the count by it."""
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        await self._run(self._sweep_stale)
        known = space.known()
        before = await self._run(usage.read)
        inventory = await self._run(self._take_stock)
        await self._run(partial(sweep_folders, self._ops, inventory, ()))
        surplus = space.learn(inventory, known)
        await self._run(partial(self._correct, usage, before, inventory))
        await space.remove(surplus, self._run)
        self._walks += 1
        self._next_walk_s = loop.time() + _REST * (loop.time() - begun_s)

    def _correct(self, usage: UsageFile, before: Usage, inventory: Inventory) -> None:
        usage.correct(before, self._settled_bytes(inventory), self._writers.living)

    async def _trim(self, usage: UsageFile, space: Space) -> None:
        """Remove blocks while the count is above the watermark."""
        before = now = await self._run(usage.read)
        num_blocks = 0
        while victims := space.trim_batch(now, trimming=num_blocks > 0):
            await space.remove(victims, self._run)
            num_blocks += len(victims)
            now = await self._run(usage.read)
        if num_blocks and before.total_bytes > self._capacity_bytes:
            logger.warning(
                "%s: %d bytes were there, and capacity_bytes is %d: %d blocks were removed, the "
                "least valuable first, and %d bytes are there now",
                self._namespace.folder,
                before.total_bytes,
                self._capacity_bytes,
                num_blocks,
                now.total_bytes,
            )
