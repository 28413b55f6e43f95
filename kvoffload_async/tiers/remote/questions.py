"""Which blocks a remote store has: asked as rarely as possible."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final

from kvoffload_async.errors import ShardUnavailableError, TierError
from kvoffload_async.tiers.remote.calls import Calls
from kvoffload_async.tiers.remote.client import RemoteClient, Server
from kvoffload_async.tiers.remote.memory import AnswerMemory
from kvoffload_async.tiers.remote.settings import RemoteCounters
from kvoffload_async.tiers.remote.together import run_together
from kvoffload_async.types import OffloadKey

_KEYS_A_CALL: Final = 1024
_CALLS_AT_ONCE: Final = 16
_SHARE_OF_TIME: Final = 0.8


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
            TierError: No server answered every question.
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
        try:
            found = await self.ask_anew(unknown, deadline_s)
        except ShardUnavailableError:  # a miss: who asks again gets no answer, and never decides
            found = set()
        if self._counters.emptied != emptied:  # what was remembered is not to be believed
            return found | await self.ask_anew(list(present), deadline_s)
        self._counters.remembered_keys += len(keys) - len(unknown)
        return found | present

    async def ask_anew(self, keys: Sequence[OffloadKey], deadline_s: float) -> set[OffloadKey]:
        """Return those of the keys that are there, whatever was answered before.

        Where one of several servers does not answer, nobody knows of its keys: they are not
        returned, nor remembered as absent, and counted.

        Raises:
            TierError: No server answered every question.
        """
        self._counters.probed_keys += len(keys)
        step = _KEYS_A_CALL if self._client.answers_many else 1
        present: set[OffloadKey] = set()
        num_answered = 0
        servers = self._client.by_server(keys)
        errors: dict[Server, TierError] = {}
        if len(servers) > 1:  # who waits for all of them has then the answers of those that answer
            now_s = asyncio.get_running_loop().time()
            deadline_s = now_s + _SHARE_OF_TIME * (deadline_s - now_s)
        gate = asyncio.Semaphore(_CALLS_AT_ONCE)

        async def ask(server: Server, portion: Sequence[OffloadKey]) -> None:
            nonlocal num_answered
            async with gate:
                if server in errors:
                    return
                call = partial(self._client.exist, portion)
                try:
                    if server is not None:
                        await self._calls.check([server], deadline_s)
                    found = await self._calls.run(call, deadline_s, server=server)
                except TierError as error:
                    errors.setdefault(server, self._calls.fault_of(server, error))
                    return
            num_answered += len(portion)
            present.update(found)
            self._memory.appeared(found)
            self._memory.vanished(found.symmetric_difference(portion))

        portions = [
            (server, [keys[i] for i in indices[first : first + step]])
            for server, indices in servers.items()
            for first in range(0, len(indices), step)
        ]
        if len(portions) == 1:
            await ask(*portions[0])
        else:
            await run_together((ask(*portion) for portion in portions), "remote:question")
        self._counters.unanswered_keys += len(keys) - num_answered
        try:
            if errors and len(errors) == len(servers):
                raise next(iter(errors.values()))
        finally:
            errors.clear()  # they hold this frame, and what its callers hold
        return present
