"""Existence probes on the loop: limited, cancelled at their timeout, answered exactly once.

The reconciler makes probes of its own, for blocks whose state is not clear from announcements.

Not thread-safe; call only from the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import Final

from kvoffload_async.abc.events import BlocksAppeared, BlocksEvicted, ProbeAnswered, TierEvent
from kvoffload_async.abc.tier import AsyncTier
from kvoffload_async.errors import (
    TierClosedError,
    TierError,
    TierTimeoutError,
    TierUnavailableError,
    Trouble,
    drop_tracebacks,
    remedy_of,
    text_of,
)
from kvoffload_async.tiers._environment import Announcements, Watch, error_of, guarded
from kvoffload_async.types import OffloadKey

logger = logging.getLogger(__name__)

_BOUND: Final = 16_384


class Reconciler:
    """Asks a tier for blocks whose state announcements leave unclear; one call at a time."""

    def __init__(
        self,
        name: str,
        tier: AsyncTier,
        announcements: Announcements,
        post: Callable[[TierEvent], None],
    ) -> None:
        """Probe `tier`, and post its answers as announcements."""
        self._name = name
        self._tier = tier
        self._announcements = announcements
        self._post = post
        self._waiting: dict[OffloadKey, None] = {}
        self.tasks: list[asyncio.Task[frozenset[OffloadKey]]] = []
        """The running call of `contains`, if any."""
        self._closing = False

    def ask(self, keys: Collection[OffloadKey]) -> None:
        """Probe for blocks; if the tier does not answer, the last announcement holds."""
        if self._closing:
            return
        self._waiting.update(dict.fromkeys(keys))
        if not self.tasks:
            self._start()
        elif len(self._waiting) > _BOUND:
            logger.warning(
                "%s: contains() does not end; %d blocks that were evicted during their store "
                "count as evicted",
                self._name,
                len(self._waiting),
            )
            self._waiting.clear()

    def close(self) -> None:
        """Make no further calls of the tier; a running call continues."""
        self._closing = True
        self._waiting.clear()

    def _start(self) -> None:
        keys = tuple(islice(self._waiting, _BOUND))
        for key in keys:
            del self._waiting[key]
        watch = self._announcements.begin(keys, includes_stores=True)
        task = asyncio.get_running_loop().create_task(
            guarded(self._tier.contains, keys), name=f"{self._name}:recheck"
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
            drop_tracebacks(error)  # before logging, because log records may be kept
            logger.warning("%s: contains() failed: %s", self._name, error or found)
        if self._waiting:
            self._start()


_NOTHING: frozenset[OffloadKey] = frozenset()


class Probes:
    """The existence probes of one tier; hanging ones count against the limit of concurrent probes.

    Thread: loop.
    """

    def __init__(
        self,
        name: str,
        tier: AsyncTier,
        post: Callable[[ProbeAnswered], None],
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        """Start without probes.

        Args:
            name: For task names and log lines.
            tier: The tier to probe.
            post: Receives every answer.
            timeout_s: Seconds until a probe is cancelled and its keys count as absent.
            clock: Monotonic seconds, for durations.
        """
        self._name = name
        self._tier = tier
        self._post = post
        self._timeout_s = timeout_s
        self._clock = clock
        self._unanswered: dict[int, tuple[asyncio.TimerHandle, float]] = {}
        """Generation of an unanswered probe -> its timeout handle and its start time."""
        self.tasks: dict[asyncio.Task[frozenset[OffloadKey]], None] = {}
        """Running probes, including cancelled ones until they end."""
        self._closing = False

    def start(
        self,
        generation: int,
        keys: Sequence[OffloadKey],
        chains: Sequence[Sequence[OffloadKey]] = (),
    ) -> None:
        """Probe the tier for keys; answered exactly once, at the timeout at the latest.

        With `chains`, which contain the same keys, calls `longest_prefixes`.
        """
        if (error := self._refusal()) is not None:
            self._post(ProbeAnswered(generation, _NOTHING, error))
            return
        loop = asyncio.get_running_loop()
        question = guarded(self._prefixes, chains) if chains else guarded(self._tier.contains, keys)
        task = loop.create_task(question, name=f"{self._name}:probe:{generation}")
        self.tasks[task] = None
        deadline = loop.call_later(self._timeout_s, self._deadline_passed, generation, task)
        self._unanswered[generation] = (deadline, self._clock())
        task.add_done_callback(lambda ended: self._ended(ended, generation))

    def close(self) -> None:
        """Refuse new probes."""
        self._closing = True

    # -- internal -------------------------------------------------------------------------------

    async def _prefixes(self, chains: Sequence[Sequence[OffloadKey]]) -> frozenset[OffloadKey]:
        lengths = await self._tier.longest_prefixes(chains)
        prefixes = zip(chains, lengths, strict=True)
        return frozenset(key for chain, length in prefixes for key in chain[:length])

    def _refusal(self) -> TierError | None:
        if self._closing:
            return TierClosedError(f"{self._name} is closed")
        try:
            bound = self._tier.bounds.concurrent_probes
        except Exception as error:  # noqa: BLE001 - third-party code; the probe must be answered
            return TierUnavailableError(
                f"{self._name}: reading its bounds failed: {text_of(error)}"
            )
        if len(self.tasks) < bound:
            return None
        # The owner respects the limit: these were answered and cancelled, but did not end.
        return TierTimeoutError(f"{self._name}: {len(self.tasks)} probes hang")

    def _deadline_passed(self, generation: int, task: asyncio.Task[frozenset[OffloadKey]]) -> None:
        task.cancel()  # before the answer, since the owner may then start the next probe
        error = TierTimeoutError(
            f"{self._name}: probe {generation} timed out after {self._timeout_s} s"
        )
        self._answer(generation, _NOTHING, error)
        logger.warning("%s (%s)", error, remedy_of(Trouble.PROBE_TIMEOUT, self._tier.remedies))

    def _ended(self, task: asyncio.Task[frozenset[OffloadKey]], generation: int) -> None:
        del self.tasks[task]
        if generation not in self._unanswered:
            return  # cancelled at the timeout, which has answered
        present, error = self._validated(task)
        if error is not None and not self._closing:
            logger.warning("%s: probe %s failed: %s", self._name, generation, text_of(error))
        drop_tracebacks(error)
        self._answer(generation, present, error)

    def _validated(
        self, task: asyncio.Task[frozenset[OffloadKey]]
    ) -> tuple[frozenset[OffloadKey], TierError | None]:
        if task.cancelled() or task.exception() is not None:
            return _NOTHING, error_of(task)
        found: object = task.result()
        try:
            if isinstance(found, Collection):
                return frozenset(found), None
        except Exception as error:  # noqa: BLE001 - third-party code; the probe must be answered
            return _NOTHING, TierUnavailableError(f"the tier broke its contract: {text_of(error)}")
        return _NOTHING, TierUnavailableError(f"the tier broke its contract: it returned {found!r}")

    def _answer(
        self, generation: int, present: frozenset[OffloadKey], error: TierError | None
    ) -> None:
        deadline, began_s = self._unanswered.pop(generation)
        deadline.cancel()
        self._post(ProbeAnswered(generation, present, error, self._clock() - began_s))
