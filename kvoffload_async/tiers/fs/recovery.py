"""Recovery after a namespace, or this writer's entry in it, was removed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from kvoffload_async.errors import OffloadError
from kvoffload_async.tiers.fs.writers import WriterRegistry

logger = logging.getLogger(__name__)

T = TypeVar("T")


class RunIo(Protocol):
    """Runs a call on an I/O thread."""

    def __call__(self, call: Callable[[], T], /) -> Awaitable[T]: ...


class Recovery:
    """Registers a tier again after its writer entry was removed. Loop thread only.

    The entry is removed together with the namespace or its folder of writers, or by another writer
    that assumed this one dead, for instance after ten minutes of suspension.
    """

    def __init__(
        self,
        writers: WriterRegistry,
        run: RunIo,
        enter: Callable[[], None],
        recount: Callable[[], Awaitable[None]],
    ) -> None:
        """Set the callbacks.

        Args:
            writers: Registry of the tier.
            run: Runs a call on an I/O thread.
            enter: Registers the tier under a new id and creates its files, on an I/O thread.
            recount: Counts the disk usage again.
        """
        self._writers = writers
        self._run = run
        self._enter = enter
        self._recount = recount
        self._mutex = asyncio.Lock()
        self._count = 0

    async def beat(self) -> bool:
        """Send a heartbeat, or register again; return whether the tier was registered again.

        Raises:
            OSError: It cannot be registered now, or its root is lost.
        """
        count = self._count
        async with self._mutex:
            if self._count != count:
                return True
            if await self._run(self._writers.heartbeat):
                return False
            old_id = self._writers.writer_id
            await self._run(self._enter)
            self._count += 1
            logger.warning(
                "%s: its writer entry was removed, with its folder or by a writer that assumed "
                "it dead; registered again, counting again",
                old_id,
            )
            await self._recount()
            return True

    async def try_beat(self) -> bool:
        """Call `beat` after a failed store; on an error, log it and return False."""
        try:
            return await self.beat()
        except (OSError, OffloadError) as error:
            logger.warning("registering again failed: %s", str(error))
            return False
