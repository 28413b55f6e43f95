"""A question to a tier: which of some blocks it has, where what it has said does not tell.

Thread: loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from itertools import islice
from typing import Final

from kvoffload_async.abc.events import BlocksAppeared, BlocksEvicted, TierEvent
from kvoffload_async.abc.tier import AsyncTier
from kvoffload_async.errors import drop_tracebacks
from kvoffload_async.tiers._announcements import Announcements, Watch
from kvoffload_async.tiers._ending import contained
from kvoffload_async.types import OffloadKey

logger = logging.getLogger(__name__)

_BOUND: Final = 16_384


class Recheck:
    """Asks a tier which blocks it has, where what it has said does not tell; one call at a time."""

    def __init__(
        self,
        name: str,
        tier: AsyncTier,
        announcements: Announcements,
        post: Callable[[TierEvent], None],
    ) -> None:
        """Ask `tier`, and post what it answers as if it had announced it."""
        self._name = name
        self._tier = tier
        self._announcements = announcements
        self._post = post
        self._waiting: dict[OffloadKey, None] = {}
        self.tasks: list[asyncio.Task[frozenset[OffloadKey]]] = []
        """The call under way, if there is one."""
        self._closing = False

    def ask(self, keys: Collection[OffloadKey]) -> None:
        """Ask for blocks; if the tier does not answer, what was said of them last stands."""
        if self._closing:
            return
        self._waiting.update(dict.fromkeys(keys))
        if not self.tasks:
            self._start()
        elif len(self._waiting) > _BOUND:
            logger.warning(
                "%s: contains() does not end; %d blocks that were evicted while they were stored "
                "count as evicted",
                self._name,
                len(self._waiting),
            )
            self._waiting.clear()

    def close(self) -> None:
        """Ask for nothing more; the call under way goes on."""
        self._closing = True
        self._waiting.clear()

    def _start(self) -> None:
        keys = tuple(islice(self._waiting, _BOUND))
        for key in keys:
            del self._waiting[key]
        watch = self._announcements.begin(keys, heeds_stores=True)
        task = asyncio.get_running_loop().create_task(
            contained(self._tier.contains, keys), name=f"{self._name}:recheck"
        )
        task.add_done_callback(lambda ended: self._answered(ended, watch))
        self.tasks.append(task)

    def _answered(self, task: asyncio.Task[frozenset[OffloadKey]], watch: Watch) -> None:
        self.tasks.remove(task)
        outdated = self._announcements.end(watch)
        error = None if task.cancelled() else task.exception()
        found: object = None if task.cancelled() or error is not None else task.result()
        if isinstance(found, Collection):
            known = [key for key in watch.keys if key not in outdated]
            if present := tuple(key for key in known if key in found):
                self._post(BlocksAppeared(present))
            if absent := tuple(key for key in known if key not in found):
                self._post(BlocksEvicted(absent))
        else:
            drop_tracebacks(error)  # before it is logged, as logs may be kept
            logger.warning("%s: contains() gave no answer: %s", self._name, error or found)
        if self._waiting:
            self._start()
