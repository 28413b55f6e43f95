"""Existence probes of a remote store, with a cache of the answers."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from kvoffload_async.errors import ShardUnavailableError, TierError, TierTimeoutError
from kvoffload_async.tiers.remote.calls import Calls, run_few
from kvoffload_async.tiers.remote.client import RemoteClient, Server
from kvoffload_async.types import OffloadKey

MOST_KEYS: Final = 1 << 18
"""Maximum number of keys of an `ExpiringKeys`; the oldest are dropped first."""


class ExpiringKeys:
    """Keys ordered by expiry, which is the order of insertion: all have the same lifetime."""

    def __init__(self, lifetime_s: float) -> None:
        """Create an empty set; with a lifetime of 0, keys are not kept."""
        self._lifetime_s = lifetime_s
        self._expiry: OrderedDict[OffloadKey, float] = OrderedDict()

    def add(self, keys: Iterable[OffloadKey], now_s: float) -> None:
        """Add keys, or restart their lifetime; drop expired and surplus keys, the oldest first.

        Drops at most two keys for each one added, so that no call takes long.
        """
        if not self._lifetime_s:
            return
        expiry_of, expiry_s = self._expiry, now_s + self._lifetime_s
        for key in keys:
            expiry_of[key] = expiry_s
            expiry_of.move_to_end(key)
            for _ in range(2):
                oldest = next(iter(expiry_of))
                if expiry_of[oldest] > now_s and len(expiry_of) <= MOST_KEYS:
                    break
                del expiry_of[oldest]

    def discard(self, keys: Iterable[OffloadKey]) -> None:
        """Remove keys."""
        for key in keys:
            self._expiry.pop(key, None)

    def clear(self) -> None:
        """Remove all keys."""
        self._expiry.clear()

    def has(self, key: OffloadKey, now_s: float) -> bool:
        """Return whether a key was added and has not expired."""
        return self._expiry.get(key, now_s) > now_s

    def others(self, keys: Iterable[OffloadKey], now_s: float) -> list[OffloadKey]:
        """Return the keys that were not added, or have expired."""
        expiry_of = self._expiry.get
        return [key for key in keys if expiry_of(key, now_s) <= now_s]


class ExistenceCache:
    """Cache of the answers to existence probes; positive and negative ones expire separately.

    Blocks stored by other hosts are found once a negative answer has expired.

    Thread: loop.
    """

    def __init__(self, present_s: float, absent_s: float, clock: Callable[[], float]) -> None:
        """Create an empty cache.

        Args:
            present_s: Lifetime of a positive answer in seconds; 0: not cached.
            absent_s: Lifetime of a negative answer in seconds; 0: not cached.
            clock: Returns monotonic seconds.
        """
        self._present = ExpiringKeys(present_s)
        self._absent = ExpiringKeys(absent_s)
        self._clock = clock

    def get(self, key: OffloadKey) -> bool | None:
        """Return whether a block exists, or None if unknown."""
        now_s = self._clock()
        if self._present.has(key, now_s):
            return True
        return False if self._absent.has(key, now_s) else None

    def unknown(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Return the keys of blocks whose existence is unknown."""
        now_s = self._clock()
        return self._absent.others(self._present.others(keys, now_s), now_s)

    def appeared(self, keys: Iterable[OffloadKey]) -> None:
        """Record that blocks exist."""
        keys = tuple(keys)
        self._absent.discard(keys)
        self._present.add(keys, self._clock())

    def vanished(self, keys: Iterable[OffloadKey]) -> None:
        """Record that blocks do not exist."""
        keys = tuple(keys)
        self._present.discard(keys)
        self._absent.add(keys, self._clock())

    def emptied(self) -> None:
        """Forget all positive answers, because the store has lost its contents."""
        self._present.clear()


_KEYS_A_CALL: Final = 1024
_CALLS_AT_ONCE: Final = 16
_SHARE_OF_TIME: Final = 0.8


@dataclass(frozen=True, slots=True)
class ExistenceProber:
    """Probes a store for the existence of keys, and caches the answers. Thread: loop."""

    _client: RemoteClient
    _calls: Calls
    _memory: ExistenceCache
    _outdated: list[set[OffloadKey]] = field(default_factory=list)
    """For each question under way, the keys that were deleted since it began."""

    def deleted(self, keys: Collection[OffloadKey]) -> None:
        """Record that blocks were deleted: answers to questions under way are outdated."""
        self._memory.vanished(keys)
        for outdated in self._outdated:
            outdated.update(keys)

    async def ask(self, keys: Sequence[OffloadKey], deadline_s: float) -> set[OffloadKey]:
        """Return the keys that exist, from the cache or the server.

        Raises:
            TierError: No server answered all of its requests, and not only for lack of time.
        """
        remembered = {key: self._memory.get(key) for key in keys}
        present = {key for key, exists in remembered.items() if exists}
        unknown = [key for key, exists in remembered.items() if exists is None]
        if not unknown:
            self._calls.counters.remembered_keys += len(keys)
            return present
        emptied = self._calls.counters.emptied
        try:
            found = await self.ask_anew(unknown, deadline_s)
        except ShardUnavailableError:  # a miss: the caller's next probe decides
            found = set()
        if self._calls.counters.emptied != emptied:  # cached answers are invalid
            return found | await self.ask_anew(list(present), deadline_s)
        self._calls.counters.remembered_keys += len(keys) - len(unknown)
        return found | present

    async def ask_anew(self, keys: Sequence[OffloadKey], deadline_s: float) -> set[OffloadKey]:
        """Return the keys that exist, bypassing the cache.

        Keys of a server that does not answer are unknown: they are neither returned nor cached as
        absent, but counted.

        Raises:
            TierError: No server answered all of its requests, and not only for lack of time.
        """
        self._calls.counters.probed_keys += len(keys)
        step = _KEYS_A_CALL if self._client.answers_many else 1
        present: set[OffloadKey] = set()
        num_answered = 0
        portions = self._client.portions(keys, step)
        num_servers = len({self._client.server_of(keys[portion[0]]) for portion in portions})
        errors: dict[Server, TierError] = {}
        if len(portions) > 1:  # leaves time to use the answers that have arrived
            now_s = asyncio.get_running_loop().time()
            deadline_s = now_s + _SHARE_OF_TIME * (deadline_s - now_s)
        outdated: set[OffloadKey] = set()

        async def ask(portion: Sequence[OffloadKey]) -> None:
            nonlocal num_answered
            server = self._client.server_of(portion[0])
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
            found = found - outdated
            present.update(found)
            self._memory.appeared(found)
            self._memory.vanished(found.symmetric_difference(portion))

        self._outdated.append(outdated)
        try:
            asking = (ask([keys[i] for i in portion]) for portion in portions)
            await run_few(asking, min(_CALLS_AT_ONCE, len(portions)), "remote:question")
        finally:
            del self._outdated[[each is outdated for each in self._outdated].index(True)]
        self._calls.counters.unanswered_keys += len(keys) - num_answered
        try:
            is_late = num_answered and all(isinstance(e, TierTimeoutError) for e in errors.values())
            if errors and len(errors) == num_servers and not is_late:
                raise next(iter(errors.values()))
        finally:
            errors.clear()  # avoid a reference cycle of exceptions and frame
        return present
