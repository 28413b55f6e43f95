"""Going on after somebody has removed the namespace, or this writer's entry in it."""

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
    """Registers a tier again that was removed from among the writers. Thread: loop.

    That happens when the namespace, or its folder of writers, is removed beneath a running tier,
    and when others have taken the tier for dead, as after ten minutes of suspension.
    """

    def __init__(
        self,
        writers: WriterRegistry,
        run: RunIo,
        enter: Callable[[], None],
        recount: Callable[[], Awaitable[None]],
    ) -> None:
        """Describe how.

        Args:
            writers: Where the tier is registered.
            run: Runs a call on an I/O thread.
            enter: Registers the tier under a new id, and makes what must be there. Thread: I/O.
            recount: Finds out anew what is on disk.
        """
        self._writers = writers
        self._run = run
        self._enter = enter
        self._recount = recount
        self._mutex = asyncio.Lock()
        self._count = 0

    async def beat(self) -> bool:
        """Show that the tier lives, or register it again; tell whether that was done since.

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
                "%s: its entry as a writer was removed, by somebody who removed the folder or took "
                "it for dead; registered again, and counting anew",
                old_id,
            )
            await self._recount()
            return True

    async def try_beat(self) -> bool:
        """Do the same for a store that has failed; what fails here is logged, and means no."""
        try:
            return await self.beat()
        except (OSError, OffloadError) as error:
            logger.warning("registering again failed: %s", str(error))
            return False
