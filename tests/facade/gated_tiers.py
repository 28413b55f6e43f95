"""Tiers whose copies and probes wait for a test, for a configuration to name."""

import threading
from contextlib import contextmanager

from kvoffload_async import ExampleSecondaryTierManager
from kvoffload_async.abc.tier import Direction, TierCapabilities
from kvoffload_async.errors import TierUnavailableError
from kvoffload_async.tiers.example import ExampleTier

DEADLINE_S = 60.0


class Gate:
    """Holds up copies and probes while it is shut.

    Attributes:
        entered: Set when something waits.
        content: Bytes to write into the first row of a load that waited, before its end.
    """

    def __init__(self):
        self._open = threading.Event()
        self._open.set()
        self.entered = threading.Event()
        self.content = None

    def shut(self):
        self._open.clear()

    def open(self):
        self._open.set()

    def wait(self):
        if not self._open.is_set():
            self.entered.set()
            assert self._open.wait(DEADLINE_S)


class GatedTier(ExampleTier):
    """Keeps blocks in memory; its copies wait at the gate of its class."""

    gate = Gate()

    async def store(self, job):
        env, _ = self._opened()
        await env.io.run(Direction.STORE, self.gate.wait)
        return await super().store(job)

    async def load(self, job):
        env, rows = self._opened()
        gate = self.gate
        await env.io.run(Direction.LOAD, gate.wait)
        if gate.content is not None:
            rows[job.block_ids[0]] = gate.content
        return await super().load(job)


class ProbedTier(GatedTier):
    """Is probed; a probe waits at the gate."""

    capabilities = TierCapabilities(exclusive=False)
    gate = Gate()

    async def contains(self, keys):
        env, _ = self._opened()
        await env.io.run(Direction.METADATA, self.gate.wait)
        return await super().contains(keys)


@contextmanager
def new_gates(monkeypatch):
    """Yield new gates of `GatedTier` and of `ProbedTier`, which end open."""
    gates = Gate(), Gate()
    monkeypatch.setattr(GatedTier, "gate", gates[0])
    monkeypatch.setattr(ProbedTier, "gate", gates[1])
    try:
        yield gates
    finally:
        for gate in gates:
            gate.open()


class OwnManager(ExampleSecondaryTierManager):
    """Overrides the contract."""

    def lookup(self, key, req_context):
        return super().lookup(key, req_context)


class DownTier(ExampleTier):
    """Is down: every copy fails."""

    async def store(self, job):
        raise TierUnavailableError("injected")

    async def load(self, job):
        raise TierUnavailableError("injected")
