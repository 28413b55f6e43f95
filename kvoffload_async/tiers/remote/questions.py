"""Which blocks a remote store has: asked as rarely as possible."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final

from kvoffload_async.errors import TierError
from kvoffload_async.tiers.remote.calls import Calls
from kvoffload_async.tiers.remote.client import RemoteClient
from kvoffload_async.tiers.remote.memory import AnswerMemory
from kvoffload_async.tiers.remote.settings import RemoteCounters
from kvoffload_async.tiers.remote.together import run_together
from kvoffload_async.types import OffloadKey

_KEYS_A_CALL: Final = 1024
_CALLS_AT_ONCE: Final = 16


class Questions:
    """Asks a client what is there, and remembers the answers. Thread: loop."""

    def __init__(
        self, client: RemoteClient, calls: Calls, memory: AnswerMemory, counters: RemoteCounters
    ) -> None:
        self._client = client
        self._calls = calls
        self._memory = memory
        self._counters = counters

    async def ask(self, keys: Sequence[OffloadKey], deadline_s: float) -> set[OffloadKey]:
        """Return those of the keys that are there; what was answered lately is not asked again.

        Raises:
            TierError: Not every question was answered.
        """
        present: set[OffloadKey] = set()
        unknown: list[OffloadKey] = []
        for key in keys:
            remembered = self._memory.get(key)
            if remembered is None:
                unknown.append(key)
            elif remembered:
                present.add(key)
        if not unknown:
            self._counters.remembered_keys += len(keys)
            return present
        emptied = self._counters.emptied
        found = await self.ask_anew(unknown, deadline_s)
        if self._counters.emptied != emptied:  # what was remembered is not to be believed
            return found | await self.ask_anew(list(present), deadline_s)
        self._counters.remembered_keys += len(keys) - len(unknown)
        return found | present

    async def ask_anew(self, keys: Sequence[OffloadKey], deadline_s: float) -> set[OffloadKey]:
        """Return those of the keys that are there, whatever was answered before.

        Raises:
            TierError: Not every question was answered.
        """
        self._counters.probed_keys += len(keys)
        step = _KEYS_A_CALL if self._client.answers_many else 1
        present: set[OffloadKey] = set()
        errors: list[TierError] = []
        gate = asyncio.Semaphore(_CALLS_AT_ONCE)

        async def ask(portion: Sequence[OffloadKey]) -> None:
            async with gate:
                if errors:
                    return
                try:
                    found = await self._calls.run(partial(self._client.exist, portion), deadline_s)
                except TierError as error:
                    errors.append(error)
                    return
            present.update(found)
            self._memory.appeared(found)
            self._memory.vanished(found.symmetric_difference(portion))

        portions = [keys[first : first + step] for first in range(0, len(keys), step)]
        if len(portions) == 1:
            await ask(portions[0])
        else:
            await run_together(map(ask, portions), "remote:question")
        if errors:
            try:
                raise errors[0]
            finally:
                errors.clear()  # they hold this frame, and what its callers hold
        return present
