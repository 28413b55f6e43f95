"""An engine on a loop whose clock can jump, a device whose copies park, and tiers that park too.

Nothing here runs on a thread once the engine is open: what happens, and when, is the test's choice.
"""

import asyncio
import functools
import hashlib
import selectors
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from planner_invariants import check_quiescent
from scripted_tier import ScriptedTier

from kvoffload_async.abc.tier import Direction, TierCapabilities
from kvoffload_async.abc.transport import TransferOutcome, Transport
from kvoffload_async.async_engine.surface import OffloadEngine
from kvoffload_async.errors import TransportError
from kvoffload_async.facade.tier_factory import SecondaryTierFactory
from kvoffload_async.transport.completion import CompletableTransfer, failed
from kvoffload_async.transport.layout import register_kv_caches
from kvoffload_async.types import LookupResult, make_offload_key

STORE, LOAD = Direction.STORE, Direction.LOAD
PAGE_BYTES = 32
SCRIPTED = {"type": "scripted"}
PROBED = {"type": "scripted", "probed": True}
SLOT_BYTES = 4096
FAR_S = 1000.0
JUMP_S = FAR_S + 1


class JumpLoop(asyncio.SelectorEventLoop):
    """A real loop whose clock stands still while anything happens.

    The test sets it ahead. Otherwise it goes on only where the loop has slept until its next timer
    and nothing came, by as much as that: how long the loop computes has no part in what it does.
    """

    def __init__(self):
        super().__init__(PatientSelector(self.jump))
        self.now_s = 0.0
        self.unhandled = []
        self.set_exception_handler(lambda _loop, context: self.unhandled.append(context))

    def time(self):
        return self.now_s

    def jump(self, seconds):
        self.now_s += seconds


class PatientSelector(selectors.DefaultSelector):
    """Reports how long it has slept in vain."""

    def __init__(self, slept):
        super().__init__()
        self.slept = slept

    def select(self, timeout=None):
        events = super().select(timeout)
        if timeout and not events:
            self.slept(timeout)
        return events


def on_loop(test):
    """Run an async test on a `JumpLoop`; nothing may be left unhandled, and no task."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        with asyncio.Runner(loop_factory=JumpLoop) as runner:
            runner.run(test(*args, **kwargs))
            loop = runner.get_loop()
            assert not asyncio.all_tasks(loop)
            assert not loop.unhandled

    return run


async def turns(count=30):
    """Let whatever can run without time passing, run."""
    for _ in range(count):
        await asyncio.sleep(0)


async def jump(seconds=JUMP_S):
    asyncio.get_running_loop().jump(seconds)
    await turns()


def hashes(text):
    """Chained hashes: one a letter, each a function of the text up to there."""
    return [text[: i + 1].encode() for i in range(len(text))]


def key(text):
    return make_offload_key(text.encode())


def content(block_hash):
    digest = hashlib.blake2b(block_hash, digest_size=PAGE_BYTES).digest()
    return np.frombuffer(digest, dtype=np.uint8)


@dataclass(eq=False)
class ParkedCopy:
    """A copy that waits for the test; its bytes move when it is completed, and not before."""

    direction: Direction
    parts: object
    transfer: CompletableTransfer


class ParkedTransport(Transport):
    """Parks every copy until the test completes it."""

    def __init__(self, layout, kv_view):
        self.layout = layout
        self.rows = np.asarray(kv_view)
        self.parked = []
        self.refusal = None
        self.odd = None
        self.closed_with = []
        self.close_result = None

    def record_compute(self):
        return object()

    def submit(self, copies, after):
        if self.refusal is not None:
            raise self.refusal
        if self.odd is not None:
            return self.odd
        transfer = CompletableTransfer()
        try:
            parts = self.layout.resolve(copies, len(self.rows))
        except TransportError as error:
            transfer.fail(error)
            return transfer
        self.parked.append(ParkedCopy(copies.direction, parts, transfer))
        return transfer

    def complete(self, parked=None, error=None):
        """End a copy, the oldest by default."""
        parked = parked or self.parked[0]
        self.parked.remove(parked)
        if error is not None:
            parked.transfer.end(failed(error))
            return
        (part,) = parked.parts
        (table,) = self.layout.groups[0]
        pages, per_chunk = table.pages.numpy(), self.layout.blocks_per_chunk
        for block, slot, position in zip(part.blocks, part.slots, part.positions, strict=True):
            cell = self.rows[slot, position * PAGE_BYTES : (position + 1) * PAGE_BYTES]
            assert position < per_chunk
            if parked.direction is STORE:
                cell[:] = pages[block]
            else:
                pages[block] = cell
        parked.transfer.end(TransferOutcome(self.layout.num_bytes(parked.parts), 0.0))

    def complete_all(self):
        while self.parked:
            self.complete()

    def close(self, timeout_s):
        self.closed_with.append(timeout_s)
        if self.parked or self.close_result is False:
            return False
        self.rows = np.empty((0, 0), dtype=np.uint8)
        return True


class Tier(ScriptedTier):
    """A scripted tier that the configuration can name, and the test find."""

    made: ClassVar = []

    def __init__(self, probed=False):
        super().__init__(TierCapabilities(exclusive=not probed, deletes=True))
        self.made.append(self)


def register(monkeypatch, name="scripted", tier_class=Tier):
    registry = SecondaryTierFactory._registry
    loaders = {**registry._loaders, name: lambda: tier_class}
    monkeypatch.setattr(registry, "_loaders", loaders)


@dataclass(eq=False)
class World:
    """An engine, what it stands on, and short names for what is done with it.

    Attributes:
        hung: Which tier hangs: nothing ends there. None: none does.
    """

    engine: OffloadEngine
    transport: ParkedTransport
    tiers: list
    device: np.ndarray
    tensor: torch.Tensor = field(repr=False)
    hung: int | None = None

    @property
    def core(self):
        return self.engine.driver.planner

    @property
    def counts(self):
        return {name: n for name, n in self.core.primary.counts.items() if n}

    @property
    def parked(self):
        return self.transport.parked

    def fill(self, block_hashes, blocks):
        """Let the device compute blocks."""
        for block_hash, block in zip(block_hashes, blocks, strict=True):
            self.device[block] = content(block_hash)

    def holds(self, block_hashes, blocks):
        return all(
            np.array_equal(self.device[block], content(block_hash))
            for block_hash, block in zip(block_hashes, blocks, strict=True)
        )

    @property
    def healthy(self):
        """The tiers that do not hang, by their numbers."""
        return {index: tier for index, tier in enumerate(self.tiers) if index != self.hung}

    def finish_everything(self):
        self.transport.complete_all()
        for tier in self.healthy.values():
            tier.finish_all()

    async def calm(self):
        """Finish jobs until nothing parks any more, nor waits for a tier that has failed."""
        while True:
            await turns(10)
            if self.parked or any(tier.parked for tier in self.healthy.values()):
                self.finish_everything()
            elif any(self.core.cascades.queues[index].count for index in self.healthy):
                await jump(6.0)
            else:
                return

    async def during(self, call):
        """Run a call, or see a task, to its end, with everything ending well."""
        task = call if isinstance(call, asyncio.Task) else asyncio.create_task(call)
        await self.until(task.done)
        return await task

    async def until(self, is_done):
        """Turn the loop, with everything ending well; helper threads work beside it."""
        while not is_done():
            await turns(3)
            self.finish_everything()

    async def put(self, text, req_id="put", first=0):
        """Store a text's blocks, and let them cascade."""
        blocks = range(first, first + len(text))
        self.fill(hashes(text), blocks)
        async with self.engine.request(req_id, hashes(text)) as request:
            stored = await self.during(self.engine.store(request, list(blocks)))
        await self.calm()
        return stored

    async def check_rest(self):
        await self.calm()
        check_quiescent(self.core)
        for manager, tier in zip(self.engine.driver.secondary_tiers, self.tiers, strict=True):
            if tier.capabilities.exclusive and isinstance(tier, ScriptedTier):
                index = manager.tier_state.index
                assert len(index) == len(tier.blocks)
                assert all(index.lookup(key, "") is LookupResult.HIT for key in tier.blocks)


@asynccontextmanager
async def opened(
    slots=8,
    tiers=(),
    bounds=None,
    device_blocks=64,
    per_chunk=1,
    *,
    copies_each=1_000,
    reserved=None,
    **config,
):
    """Open an engine; at the end it is closed, and must have left nothing behind."""
    tensor = torch.zeros(device_blocks, PAGE_BYTES, dtype=torch.uint8)
    layout = register_kv_caches({"l": tensor}, blocks_per_chunk=per_chunk)
    made: ClassVar = []

    def create(view):
        made.append(ParkedTransport(layout, view))
        return made[0]

    settings = {
        "cpu_bytes_to_use": slots * SLOT_BYTES,
        "block_bytes": PAGE_BYTES * per_chunk,
        "blocks_per_chunk": per_chunk,
        "model": "test",
        "check_invariants": True,
        "secondary_tiers": list(tiers),
        "enable_kv_cache_events": True,
        "shutdown_timeout_s": 2.0,
        **config,
    }
    Tier.made.clear()
    async with OffloadEngine(settings, create, bounds) as engine:
        world = World(engine, made[0], list(Tier.made), tensor.numpy(), tensor)
        if copies_each is not None:
            world.core.room.copies_each = copies_each
        if reserved is not None:
            world.core.room.reserved = reserved
        try:
            yield world
        finally:
            world.hung = None
            await world.calm()


async def seed(world):
    """`ab` in the primary, `xy` in the tier alone."""
    await world.put("xy", "seed")
    await world.put("ZZZZ", "pusher")
    await world.put("ab", "again")


async def only_in_the_tier(world, text):
    """Store a text, then push it out of the primary."""
    await world.put(text, "seed")
    slots = world.core.primary.num_slots
    await world.put("Z" * slots, "pusher")
    assert not any(world.core.primary.lookup(key(text[:i])).name == "HIT" for i in (1, len(text)))


async def found(world, text, name="reader"):
    """Return how many blocks of a prompt a new request finds."""
    async with world.engine.request(name, hashes(text)) as request:
        return await world.during(world.engine.lookup(request))
