"""What an owner knows of a tier's contents, so that a lookup never leaves the owner's thread.

A tier that is changed by this instance alone has an exact index. Any other tier is probed: one
batched existence probe for the keys that are new in a step, shared between requests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import islice, repeat
from typing import Final

from kvoffload_async.core.effects import StartProbe
from kvoffload_async.core.heads import nearest_before
from kvoffload_async.tables.keymap import KeyMap
from kvoffload_async.types import (
    LookupResult,
    OffloadKey,
    ReqContext,
    get_offload_group_idx,
)

KeysDecided = Callable[[Sequence[OffloadKey]], object]
"""Told of keys of which more is known now; must call nothing of the core."""


class KeyIndex(ABC):
    """Answers whether a tier has a key.

    Thread: owner.

    Attributes:
        decided: Told of the keys that a probe has answered.
    """

    decided: KeysDecided | None = None

    @abstractmethod
    def lookup(self, key: OffloadKey, request: Hashable) -> LookupResult:
        """Return HIT, MISS or RETRY."""

    @abstractmethod
    def appeared(self, keys: Sequence[OffloadKey] | KeyMap) -> None:
        """Blocks were stored, or found; a `KeyMap` may be kept."""

    @abstractmethod
    def vanished(self, keys: Sequence[OffloadKey], *, surely: bool) -> None:
        """Blocks are gone (`surely`), or could not be loaded for a reason that may pass."""

    @abstractmethod
    def lacks(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those of the keys that are known to be absent. Asks nobody."""

    @abstractmethod
    def peek(self, key: OffloadKey) -> LookupResult:
        """Return HIT, or MISS, or RETRY while an answer is outstanding. Asks nobody."""

    def next_probe(self) -> StartProbe | None:
        """Return the probe to start now, at the end of a step."""
        return None

    def answered(  # noqa: B027 - an exact index never asks
        self, generation: int, present: frozenset[OffloadKey]
    ) -> None:
        """A probe ended."""

    def left_alone(self) -> None:  # noqa: B027 - nobody waits for an exact index
        """No probe may be started now: lookups skip the tier."""

    def forget_request(self, request: Hashable) -> None:  # noqa: B027 - nor remembers who asked
        """A request ended."""

    @property
    def is_exact(self) -> bool:
        """Whether all of the tier's contents are known here."""
        return False

    @property
    def is_waiting(self) -> bool:
        """Whether an answer is outstanding."""
        return False

    @property
    def probes_outstanding(self) -> int:
        """Probes that have no answer yet."""
        return 0


class ExactIndex(KeyIndex):
    """The contents of a tier that nobody else changes.

    Bytes a block: 38 at a million and 30 at ten, up to twice that once blocks have come and gone;
    and 69 for a key of 36, unless it is the object that the primary has too.
    """

    def __init__(self) -> None:
        self._present = KeyMap()

    def lookup(self, key: OffloadKey, request: Hashable) -> LookupResult:
        """Return HIT or MISS."""
        return LookupResult.MISS if self._present.get(key) is None else LookupResult.HIT

    def peek(self, key: OffloadKey) -> LookupResult:
        """Return HIT or MISS."""
        return LookupResult.MISS if self._present.get(key) is None else LookupResult.HIT

    def appeared(self, keys: Sequence[OffloadKey] | KeyMap) -> None:
        """Add keys."""
        if isinstance(keys, KeyMap):
            keys.merge(self._present)  # what is known so far is little: a tier tells all at once
            self._present = keys
        else:
            self._present.update(keys, repeat(0))

    def vanished(self, keys: Sequence[OffloadKey], *, surely: bool) -> None:
        """Drop keys that are surely gone; the others may well load next time."""
        if surely:
            self._present.discard(keys)

    def lacks(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those that are not there."""
        found = self._present.find(keys)
        return [key for key, number in zip(keys, found, strict=True) if number is None]

    @property
    def is_exact(self) -> bool:
        """True."""
        return True

    def __len__(self) -> int:
        return len(self._present)


_PENDING, _IN_FLIGHT, _ABSENT, _PRESENT = range(4)
_PHASES: Final = 4
"""A verdict is one integer: the phase, and `_PHASES` more for each request that asked."""

_ANSWERS: Final = (LookupResult.RETRY, LookupResult.RETRY, LookupResult.MISS, LookupResult.HIT)


_Chains = dict[tuple[Hashable, int, int], list[OffloadKey]]
"""Chains by request, KV-cache group, and number among those of both."""


class ProbedIndex(KeyIndex):
    """The contents of a shared tier, as far as live requests have asked.

    A verdict lives as long as a request that asked for it. A probe in flight is kept when its
    requests end, so that a newcomer shares it; its answer carries the probe's generation, and a
    generation is answered once, so that a late answer is never taken for that of a later probe.
    """

    def __init__(
        self,
        concurrent_probes: int,
        keys_per_probe: int = 4096,
        *,
        keeps_order: bool = False,
        keys_before: int = 0,
    ) -> None:
        """Start empty.

        Args:
            concurrent_probes: Probes in flight at once; a hung one delays no other.
            keys_per_probe: Bound on one batch; the rest waits for the next step.
            keeps_order: Whether probes say which keys are a chain; see `_chains`.
            keys_before: How many of the keys before each chain they say, at most; see `_before`.
        """
        self._concurrent_probes = concurrent_probes
        self._keys_per_probe = keys_per_probe
        self._keeps_order = keeps_order
        self._keys_before = keys_before
        self._verdicts = KeyMap()
        self._by_request: dict[Hashable, dict[OffloadKey, None]] = {}
        self._pending: dict[OffloadKey, Hashable] = {}
        """Queued keys in the order of their lookups, with the first request that asked."""
        self._is_awaited = False
        """Whether somebody was told to wait for a queued key, and not yet that none is probed."""
        self._in_flight: dict[int, tuple[OffloadKey, ...]] = {}
        self._generation = 0

    def lookup(self, key: OffloadKey, request: Hashable) -> LookupResult:
        """Return HIT, MISS, or RETRY while a probe is queued or under way."""
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = _PENDING
            self._pending[key] = request
        asked = self._by_request.setdefault(request, {})
        if key not in asked:
            asked[key] = None
            self._verdicts.set(key, verdict + _PHASES)
        phase = verdict % _PHASES
        self._is_awaited |= phase == _PENDING
        return _ANSWERS[phase]

    def appeared(self, keys: Sequence[OffloadKey] | KeyMap) -> None:
        """Flip the verdicts that live requests hold to present."""
        self._flip(tuple(keys), _PRESENT)

    def vanished(self, keys: Sequence[OffloadKey], *, surely: bool) -> None:
        """Flip the verdicts that live requests hold to absent, so that none asks for ever."""
        self._flip(keys, _ABSENT)

    def lacks(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those for which a live request has the answer that they are absent."""
        return [key for key, verdict in self._known(keys) if verdict % _PHASES == _ABSENT]

    def peek(self, key: OffloadKey) -> LookupResult:
        """Return what live requests have found out, MISS where none has asked."""
        verdict = self._verdicts.get(key)
        return LookupResult.MISS if verdict is None else _ANSWERS[verdict % _PHASES]

    def next_probe(self) -> StartProbe | None:
        """Batch the queued keys, unless as many probes are in flight as may be."""
        if not self._pending or len(self._in_flight) >= self._concurrent_probes:
            return None
        self._generation += 1
        keys = tuple(islice(self._pending, self._keys_per_probe))
        chains = self._chains(keys) if self._keeps_order else {}
        for key in keys:
            del self._pending[key]
        self._enter(keys, _IN_FLIGHT)
        self._in_flight[self._generation] = keys
        in_order = tuple(map(tuple, chains.values()))
        return StartProbe(self._generation, keys, in_order, self._before(chains))

    def answered(self, generation: int, present: frozenset[OffloadKey]) -> None:
        """Resolve the keys that were asked in this generation and are still waiting for it."""
        keys = self._in_flight.pop(generation, ())
        self._enter([key for key in keys if key in present], _PRESENT)
        self._enter([key for key in keys if key not in present], _ABSENT)
        self._forget_unasked(keys)
        if self.decided is not None:
            self.decided(keys)

    def left_alone(self) -> None:
        """Let who waits for queued keys ask again, once; the keys stay queued.

        Told in every step, who waits for one of them elsewhere would ask in every step.
        """
        if self._is_awaited and self.decided is not None:
            self._is_awaited = False
            self.decided(tuple(self._pending))

    def forget_request(self, request: Hashable) -> None:
        """Drop the request's share of every verdict; a probe in flight is kept."""
        keys = list(self._by_request.pop(request, ()))
        for key, verdict in self._known(keys):
            self._verdicts.set(key, verdict - _PHASES)
        self._forget_unasked(keys)

    @property
    def is_waiting(self) -> bool:
        """Whether a key is queued or in flight."""
        return bool(self._in_flight) or bool(self._pending)

    @property
    def probes_outstanding(self) -> int:
        """Probes that have no answer yet."""
        return len(self._in_flight)

    def __len__(self) -> int:
        return len(self._verdicts)

    def _chains(self, keys: Sequence[OffloadKey]) -> _Chains:
        """Return queued keys as chains: of one request and KV-cache group, head to tail.

        A group that is looked up from its tail on, for a sliding window, has chains of one key:
        there a block may be present, and of use, without those before it.
        """
        chains: _Chains = {}
        last: dict[tuple[Hashable, int], tuple[int, int]] = {}
        for key in keys:
            request, group = self._pending[key], get_offload_group_idx(key)
            position = request.key_positions.get(key, 0) if isinstance(request, ReqContext) else 0
            number, before = last.get((request, group), (0, position))
            if position < before:
                number += 1
            last[request, group] = (number, position)
            chains.setdefault((request, group, number), []).append(key)
        return chains

    def _before(self, chains: _Chains) -> tuple[tuple[OffloadKey, ...], ...]:
        """Return for each chain the keys right before it, whether they were ever asked for or not.

        None before the chains of a group that is looked up from its tail on: there are several.
        """
        if self._keys_before <= 0:
            return ()
        return tuple(
            nearest_before(chain[0], request.key_positions, self._keys_before)
            if isinstance(request, ReqContext) and (request, group, 1) not in chains
            else ()
            for (request, group, _), chain in chains.items()
        )

    def _known(self, keys: Sequence[OffloadKey]) -> Iterator[tuple[OffloadKey, int]]:
        """Yield those of the keys that have a verdict, with it."""
        for key, verdict in zip(keys, self._verdicts.find(keys), strict=True):
            if verdict is not None:
                yield key, verdict

    def _enter(self, keys: Sequence[OffloadKey], phase: int) -> None:
        for key, verdict in self._known(keys):
            self._verdicts.set(key, verdict - verdict % _PHASES + phase)

    def _flip(self, keys: Sequence[OffloadKey], phase: int) -> None:
        resolved = [key for key, verdict in self._known(keys) if verdict % _PHASES >= _ABSENT]
        self._enter(resolved, phase)

    def _forget_unasked(self, keys: Sequence[OffloadKey]) -> None:
        """Forget the verdicts that no request holds any more, unless a probe is to bring them."""
        for key, verdict in self._known(keys):
            if verdict < _PHASES and verdict != _IN_FLIGHT:
                self._verdicts.discard([key])
                self._pending.pop(key, None)
