"""Keeps a helper process running: after one has ended, whoever asks has another one started."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from kvoffload_async.abc.tier import Direction, IoRunner
from kvoffload_async.errors import ConfigError, TierError, TierUnavailableError, drop_tracebacks
from kvoffload_async.tiers.mooncake.process import Helper
from kvoffload_async.tiers.mooncake.settings import HelperSettings, MooncakeConnection

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0


class HelperSupervisor:
    """Has one helper at a time. Thread: loop.

    Attributes:
        starts: Helpers that were started.
        ends: Those that have ended by themselves, or were killed.
    """

    def __init__(
        self,
        connection: MooncakeConnection,
        settings: HelperSettings,
        row_bytes: int,
        io: IoRunner,
    ) -> None:
        """Start none yet."""
        self.starts = 0
        self.ends = 0
        self._connection = connection
        self._settings = settings
        self._row_bytes = row_bytes
        self._io = io
        self._helper: Helper | None = None
        self._starting: asyncio.Task[None] | None = None
        self._pause_s = 0.0
        self._next_start_s = 0.0

    async def open(self) -> None:
        """Start the first one, and let it join; raises ConfigError, TierUnavailableError."""
        await self._start()

    def helper(self) -> Helper:
        """Return the helper that has joined.

        Raises:
            TierUnavailableError: There is none; another one is started in the background.
        """
        helper = self._helper
        if helper is not None and helper.is_joined and not helper.why_ended:
            return helper
        loop = asyncio.get_running_loop()
        if self._starting is None and loop.time() >= self._next_start_s:
            if helper is not None and helper.is_joined:
                self.ends += 1
                logger.warning("mooncake: %s (status %s)", helper.why_ended, helper.status)
            self._starting = loop.create_task(self._replace(), name="mooncake:helper")
        why = "none has been started" if helper is None else helper.why_ended or "it joins"
        raise TierUnavailableError(f"mooncake: there is no helper process: {why}")

    async def close(self) -> None:
        """End what runs; idempotent."""
        starting, self._starting = self._starting, None
        if starting is not None:
            starting.cancel()
            await asyncio.wait({starting})
        helper = self._helper
        if helper is not None:
            await helper.leave()
            await helper.gone()
            self._helper = None

    # -- inside ---------------------------------------------------------------------------------

    async def _start(self) -> None:
        old = self._helper
        if old is not None:  # its memory is free before the next one's is taken
            await old.gone()
            self._helper = None

        loop = asyncio.get_running_loop()

        def begin() -> None:  # which may go on after a cancellation, so it leaves the helper here
            self._helper = Helper(self._connection, self._settings, self._row_bytes, loop)

        helper: Helper | None = None
        try:
            await self._io.run(Direction.NONE, begin)
            self.starts += 1
            helper = self._helper
            if helper is not None:
                await helper.join()
        except BaseException as error:
            if (helper := self._helper) is not None:
                helper.end(f"it could not join ({error})")
            raise

    async def _replace(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                await self._start()
        except (ConfigError, TierError, TimeoutError) as error:
            self._pause_s = min(2 * self._pause_s or _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
            why = str(error) or "it takes too long"
            logger.warning("mooncake: no helper can be started: %s", why)
            drop_tracebacks(error)
        else:
            self._pause_s = 0.0
            logger.warning("mooncake: another helper has joined %s", self._connection.master)
        finally:
            self._next_start_s = loop.time() + self._pause_s
            self._starting = None
