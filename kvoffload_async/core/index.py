"""What an owner knows of a tier's contents, so that a lookup never leaves the owner's thread.

A tier that is changed by this instance alone has an exact index. Any other tier is probed: one
batched existence probe for the keys that are new in a step, shared between requests.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable
from itertools import islice

from kvoffload_async.core.effects import StartProbe
from kvoffload_async.types import LookupResult, OffloadKey


class KeyIndex(ABC):
    """Answers whether a tier has a key.

    Thread: owner.
    """

    @abstractmethod
    def lookup(self, key: OffloadKey, req_id: str) -> LookupResult:
        """Return HIT, MISS or RETRY."""

    @abstractmethod
    def appeared(self, keys: Iterable[OffloadKey]) -> None:
        """Blocks were stored, or found."""

    @abstractmethod
    def vanished(self, keys: Iterable[OffloadKey], *, surely: bool) -> None:
        """Blocks are gone (`surely`), or could not be loaded for a reason that may pass."""

    def next_probe(self) -> StartProbe | None:
        """Return the probe to start now, at the end of a step."""
        return None

    def answered(  # noqa: B027 - an exact index never asks
        self, generation: int, present: frozenset[OffloadKey]
    ) -> None:
        """A probe ended."""

    def forget_request(self, req_id: str) -> None:  # noqa: B027 - nor remembers who asked
        """A request ended."""

    @property
    def is_waiting(self) -> bool:
        """Whether an answer is outstanding."""
        return False


class ExactIndex(KeyIndex):
    """The contents of a tier that nobody else changes."""

    def __init__(self) -> None:
        self._present: set[OffloadKey] = set()

    def lookup(self, key: OffloadKey, req_id: str) -> LookupResult:
        """Return HIT or MISS."""
        return LookupResult.HIT if key in self._present else LookupResult.MISS

    def appeared(self, keys: Iterable[OffloadKey]) -> None:
        """Add keys."""
        self._present.update(keys)

    def vanished(self, keys: Iterable[OffloadKey], *, surely: bool) -> None:
        """Drop keys that are surely gone; the others may well load next time."""
        if surely:
            self._present.difference_update(keys)

    def __len__(self) -> int:
        return len(self._present)


class _Phase(enum.Enum):
    PENDING = enum.auto()
    IN_FLIGHT = enum.auto()
    RESOLVED = enum.auto()


class _Probe:
    """What is known of one key, and for which requests."""

    __slots__ = ("generation", "phase", "present", "requests")

    def __init__(self) -> None:
        self.phase = _Phase.PENDING
        self.generation = 0
        self.present = False
        self.requests: set[str] = set()


class ProbedIndex(KeyIndex):
    """The contents of a shared tier, as far as live requests have asked.

    A verdict lives as long as a request that asked for it. A probe in flight is kept when its
    requests end, so that a newcomer shares it; its answer carries the probe's generation, and a
    generation is answered once, so that a late answer is never taken for that of a later probe.
    """

    def __init__(self, concurrent_probes: int, keys_per_probe: int = 4096) -> None:
        """Start empty.

        Args:
            concurrent_probes: Probes in flight at once; a hung one delays no other.
            keys_per_probe: Bound on one batch; the rest waits for the next step.
        """
        self._concurrent_probes = concurrent_probes
        self._keys_per_probe = keys_per_probe
        self._probes: dict[OffloadKey, _Probe] = {}
        self._by_request: dict[str, set[OffloadKey]] = {}
        self._pending: dict[OffloadKey, None] = {}
        self._in_flight: dict[int, tuple[OffloadKey, ...]] = {}
        self._generation = 0

    def lookup(self, key: OffloadKey, req_id: str) -> LookupResult:
        """Return HIT, MISS, or RETRY while a probe is queued or under way."""
        probe = self._probes.get(key)
        if probe is None:
            probe = self._probes[key] = _Probe()
            self._pending[key] = None
        if req_id not in probe.requests:
            probe.requests.add(req_id)
            self._by_request.setdefault(req_id, set()).add(key)
        if probe.phase is not _Phase.RESOLVED:
            return LookupResult.RETRY
        return LookupResult.HIT if probe.present else LookupResult.MISS

    def appeared(self, keys: Iterable[OffloadKey]) -> None:
        """Flip the verdicts that live requests hold to present."""
        self._flip(keys, present=True)

    def vanished(self, keys: Iterable[OffloadKey], *, surely: bool) -> None:
        """Flip the verdicts that live requests hold to absent, so that none asks for ever."""
        self._flip(keys, present=False)

    def next_probe(self) -> StartProbe | None:
        """Batch the queued keys, unless as many probes are in flight as may be."""
        if not self._pending or len(self._in_flight) >= self._concurrent_probes:
            return None
        self._generation += 1
        keys = tuple(islice(self._pending, self._keys_per_probe))
        for key in keys:
            del self._pending[key]
            probe = self._probes[key]
            probe.phase = _Phase.IN_FLIGHT
            probe.generation = self._generation
        self._in_flight[self._generation] = keys
        return StartProbe(self._generation, keys)

    def answered(self, generation: int, present: frozenset[OffloadKey]) -> None:
        """Resolve the keys that were asked in this generation and are still waiting for it."""
        for key in self._in_flight.pop(generation, ()):
            probe = self._probes[key]
            probe.phase = _Phase.RESOLVED
            probe.present = key in present
            if not probe.requests:
                del self._probes[key]

    def forget_request(self, req_id: str) -> None:
        """Drop the request's share of every verdict; a probe in flight is kept."""
        for key in self._by_request.pop(req_id, ()):
            probe = self._probes[key]
            probe.requests.discard(req_id)
            if not probe.requests and probe.phase is not _Phase.IN_FLIGHT:
                del self._probes[key]
                self._pending.pop(key, None)

    @property
    def is_waiting(self) -> bool:
        """Whether a key is queued or in flight."""
        return bool(self._in_flight) or bool(self._pending)

    def __len__(self) -> int:
        return len(self._probes)

    def _flip(self, keys: Iterable[OffloadKey], *, present: bool) -> None:
        for key in keys:
            probe = self._probes.get(key)
            if probe is not None and probe.phase is _Phase.RESOLVED:
                probe.present = present
