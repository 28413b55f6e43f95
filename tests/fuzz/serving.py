"""A world in which an asyncio server's requests share an `OffloadEngine`."""

import asyncio
import random
import selectors
import time
from contextlib import suppress

import numpy as np
import torch
from fuzz.common import (
    BLOCK_BYTES,
    GRACE_S,
    HEALTHY_S,
    IN_MEMORY,
    ON_DISK,
    calm,
    check_sums,
    content,
    damage,
    draw_config,
    holds,
    is_at_rest,
    law,
    prompt,
)

from kvoffload_async import (
    BusyError,
    ClosedError,
    Direction,
    InvalidatedError,
    OffloadEngine,
    OffloadError,
    TransportError,
)
from kvoffload_async.abc.transport import Transfer, TransferOutcome, Transport, hold_pages
from kvoffload_async.async_engine.transfers import EngineBounds

JUNK = 0xAA
DEVICE_BLOCKS = 24
LONGEST_S = 300.0
"""Seconds after which nothing that any call or copy waits for can still be to come."""

MOST_TURNS = 3_000
"""Turns of the loop, one after the other, in which something is ready."""

TURN_S = 1e-7
"""What a turn takes: after a timer has run, its time has passed."""


class LeapingLoop(asyncio.SelectorEventLoop):
    """A loop whose clock stands still while anything happens, and leaps where nothing does.

    Attributes:
        patience_s: Real seconds that it waits for threads before it leaps; None: it never does.
    """

    def __init__(self, *, leaps):
        super().__init__(_LeapingSelector(self))
        self.now_s = 0.0
        self.patience_s = 0.005 if leaps else None
        self.unhandled = []
        self.set_exception_handler(lambda _loop, context: self.unhandled.append(context))

    def time(self):
        return self.now_s


class _LeapingSelector(selectors.DefaultSelector):
    def __init__(self, loop):
        super().__init__()
        self.loop = loop
        self.turns = 0

    def select(self, timeout=None):
        loop, began_s = self.loop, time.monotonic()
        patience_s = GRACE_S if timeout is None or loop.patience_s is None else loop.patience_s
        limit_s = patience_s if timeout is None else min(timeout, patience_s)
        events = super().select(limit_s)
        law(events or timeout is not None, "nothing is ready, and nothing will be")
        self.turns = 0 if timeout or self.turns == MOST_TURNS else self.turns + 1
        law(self.turns < MOST_TURNS, "the loop spins")
        loop.now_s += TURN_S
        if timeout:
            leaps = not events and loop.patience_s is not None
            loop.now_s += timeout if leaps else time.monotonic() - began_s
        return events


class Copy(Transfer):
    def __init__(self, loop):
        self.end = loop.create_future()

    async def outcome(self):
        return await asyncio.shield(self.end)

    def synchronize(self, timeout_s):
        return self.end.done()


class MemoryTransport(Transport):
    """Copies between an array and the primary in virtual time; fails, and hangs, by chance."""

    def __init__(self, device, kv_view, chance, trouble):
        self.device, self.rows = device, np.asarray(kv_view)
        self.chance, self.trouble = chance, trouble
        self.release_pages = hold_pages(kv_view, "the fuzzer's device")
        self.loop = None
        self.ends_s = dict.fromkeys(Direction, 0.0)
        self.running = {}
        self.is_closed = False

    def record_compute(self):
        return None

    def submit(self, copies, after):
        self.loop = asyncio.get_running_loop()
        if self.chance.random() < self.trouble:
            raise RuntimeError("drawn")
        copy = Copy(self.loop)
        seconds = self.chance.choice((0.0, 0.001, 0.2))
        if self.chance.random() < self.trouble:
            seconds = 100.0
        end_s = max(self.ends_s[copies.direction], self.loop.time() + seconds)
        self.ends_s[copies.direction] = end_s
        self.running[copy] = self.loop.call_at(end_s, self._perform, copies, copy)
        return copy

    def _perform(self, copies, copy):
        error = None
        for block, slot in zip(copies.device.block_ids, copies.host.block_ids, strict=True):
            if self.chance.random() < self.trouble / 4:
                error = TransportError("drawn")
                break
            if copies.direction is Direction.STORE:
                self.rows[slot] = self.device[block]
            else:
                self.device[block] = self.rows[slot]
        del self.running[copy]
        copy.end.set_result(TransferOutcome(BLOCK_BYTES, 0.0, error))
        if self.is_closed and not self.running:
            self._release()

    def calm(self):
        self.trouble = 0.0

    def close(self, timeout_s):
        self.is_closed = True
        if self.running:
            return False
        self._release()
        return True

    def _release(self):
        self.rows = None
        self.release_pages()


class Serving:
    """The world; a step's name is a method's, and a number from which it draws the rest."""

    STEPS = {  # noqa: RUF012 - never changed
        "begin": 10,
        "turn": 8,
        "wait": 8,
        "cancel": 4,
        "reset": 0.7,
        "invalidate": 0.3,
        "damage": 1,
        "observe": 1,
        "heal": 0.3,
        "close": 0.3,
    }

    def __init__(self, chance, folder):
        self.folder = folder
        self.is_virtual = chance.random() < 0.9
        self.config = draw_config(chance, folder, IN_MEMORY if self.is_virtual else ON_DISK)
        if not self.is_virtual:
            self.config["breaker_retry_s"] = 0.05
        self.bounds = EngineBounds(
            concurrent_loads=chance.choice((1, 4)),
            concurrent_stores=chance.choice((1, 4)),
            waiting_calls=chance.choice((0, 2, 1024)),
        )
        self.device = np.full((DEVICE_BLOCKS, BLOCK_BYTES), JUNK, np.uint8)
        self.free = list(range(DEVICE_BLOCKS))
        self.chance = random.Random(chance.randrange(10**6))
        self.trouble = chance.choice((0.0, 0.1))
        self.transport = None
        self.offered = set()
        self.tasks, self.cancelled, self.reclaiming = set(), set(), set()
        self.was_emptied = self.is_closing = False

    def play(self, steps):
        with asyncio.Runner(loop_factory=lambda: LeapingLoop(leaps=self.is_virtual)) as runner:
            runner.run(self._play(steps))
            law(not runner.get_loop().unhandled, f"nobody saw: {runner.get_loop().unhandled}")

    async def _play(self, steps):
        self.loop = asyncio.get_running_loop()
        if self.is_virtual:
            self.engine = OffloadEngine(self.config, self._create_transport, self.bounds)
        else:
            caches = {"layer": torch.from_numpy(self.device)}
            self.engine = OffloadEngine(self.config, bounds=self.bounds, kv_caches=caches)
        await self.engine.__aenter__()
        try:
            self._expect_threads(is_possible=False)
            for name, number in steps:
                await getattr(self, name)(random.Random(number))
                if self.is_closing:
                    break
            await self._rest()
        except BaseException:
            self.is_closing = True
            with suppress(Exception):
                self._expect_threads(is_possible=True)
                await self.engine.close(1.0)
            raise

    def _create_transport(self, kv_view):
        self.transport = MemoryTransport(self.device, kv_view, self.chance, self.trouble)
        return self.transport

    def _expect_threads(self, *, is_possible):
        if self.is_virtual:
            self.loop.patience_s = 0.005 if is_possible else 0.0

    # -- requests -------------------------------------------------------------------------------

    async def begin(self, chance):
        self._start(self._serve, chance)

    def _start(self, call, *arguments):
        self.tasks.add(asyncio.create_task(self._checked(call, *arguments)))

    async def _checked(self, call, *arguments):
        """Run a call; what it may raise depends on what else has happened."""
        try:
            await call(*arguments)
        except (BusyError, TimeoutError, TransportError):
            pass
        except InvalidatedError:
            law(self.was_emptied, "invalidated without a reset")
        except ClosedError:
            law(self.is_closing, "closed, and nobody has closed it")
        except asyncio.CancelledError:
            law(asyncio.current_task() in self.cancelled, "cancelled, and nobody has cancelled it")

    async def _within(self, call, timeout_s):
        """Await a call that has to end within so many seconds."""
        try:
            async with asyncio.timeout(timeout_s + (0.1 if self.is_virtual else GRACE_S)) as scope:
                return await call
        finally:
            law(not scope.expired(), f"{call.__qualname__} goes on after its deadline")

    async def _serve(self, chance):
        hashes = prompt(chance)
        if len(hashes) > len(self.free):
            return
        blocks = [self.free.pop() for _ in hashes]
        law((self.device[blocks] == JUNK).all(), "a block was written that was nobody's any more")
        request = None
        try:
            async with self.engine.request(str(chance.randrange(4)), hashes) as request:
                await self._serve_one(chance, request, blocks)
        finally:
            if request is None:
                self.free += blocks
            else:
                self.reclaiming.add(asyncio.create_task(self._reclaim(request, blocks)))

    async def _serve_one(self, chance, request, blocks):
        engine, first = self.engine, 0
        if chance.random() < 0.8:
            seconds = chance.choice((0.0, 0.1, 10.0))
            found = await self._within(engine.lookup(request, seconds), seconds)
            known = all(key in self.offered for key in request.keys[:found])
            law(known, "a block is found that nobody has stored")
            count = chance.randint(0, found)
            seconds = chance.choice((0.0, 0.1, 30.0))
            first = await self._within(engine.load(request, blocks[:count], seconds), seconds)
            law(first <= count, f"{first} blocks of {count} are loaded")
            for block, key in zip(blocks[:first], request.keys, strict=False):
                law(holds(self.device[block], key), "wrong bytes are loaded")
        await self._sleep(chance.choice((0.0, 0.1, 5.0)))
        for block, key in zip(blocks[first:], request.keys[first:], strict=True):
            self.device[block] = content(key)
        self.offered |= set(request.keys)
        seconds = chance.choice((0.0, 0.1, 30.0))
        stored = await self._within(engine.store(request, blocks[first:], first, seconds), seconds)
        law(0 <= stored <= len(blocks) - first, f"{stored} blocks are stored")
        left_out = list(request.left_out)
        tail = [key for key in request.keys if key in set(left_out)]
        law(tail == left_out, "what is left out of a store is none of its keys")

    async def _reclaim(self, request, blocks):
        """Take device blocks back as soon as no copy uses them; others' data comes there."""
        while not await request.released(10.0):
            if self.is_closing:
                return
        law(not request.occupied_blocks, "released, and still occupied")
        self.device[blocks] = JUNK
        self.free += blocks

    # -- the engine -----------------------------------------------------------------------------

    async def turn(self, chance):
        for _ in range(chance.randint(1, 8)):
            await asyncio.sleep(0)

    async def wait(self, chance):
        await self._sleep(chance.choice((0.001, 0.1, 1.0, 6.0, 40.0)))

    async def _sleep(self, seconds):
        await asyncio.sleep(seconds if self.is_virtual else min(seconds, 0.005))

    async def cancel(self, chance):
        running = [task for task in self.tasks if not task.done()]
        if running:
            task = running[chance.randrange(len(running))]
            self.cancelled.add(task)
            task.cancel()

    async def reset(self, chance):
        self.was_emptied = True
        self._start(self._reset, chance.choice((0.0, 0.1, 10.0)))

    async def _reset(self, seconds):
        await self._within(self.engine.reset(seconds), seconds)

    async def invalidate(self, chance):
        self.was_emptied = True
        self.engine.invalidate(chance.randrange(3))

    async def damage(self, chance):
        damage(chance, self.folder)

    async def observe(self, _chance):
        stats = self.engine.stats()
        check_sums(stats)
        repr(self.engine)

    async def heal(self, _chance):
        calm(self.engine.driver.secondary_tiers)
        if self.transport is not None:
            self.transport.calm()

    async def close(self, chance):
        self.is_closing = True
        self._expect_threads(is_possible=True)
        seconds = chance.choice((0.0, 1.0)) if self.is_virtual else GRACE_S / 2
        self.tasks.add(asyncio.create_task(self._close(seconds)))

    async def _close(self, timeout_s):
        began_s = time.monotonic()
        try:
            await self.engine.close(timeout_s)
        except OffloadError as error:
            law("tiers did not shut down" in str(error), f"close: {error!r}")
        law(time.monotonic() - began_s < GRACE_S, "closing goes on after its deadline")

    # -- the end --------------------------------------------------------------------------------

    async def _look_up_on_healthy_tiers(self):
        """Have requests look up and load nothing: all are decided, and no deferral expires."""
        expired = self.engine.stats().planner.deferrals_expired
        decided = asyncio.Barrier(4)

        async def ask():
            async with self.engine.request("healthy", prompt(self.chance)) as request:
                with suppress(BusyError):
                    await self._within(self.engine.lookup(request, HEALTHY_S), HEALTHY_S)
                await decided.wait()

        began_s = self.loop.time()
        async with asyncio.TaskGroup() as group:
            for _ in range(decided.parties):
                group.create_task(ask())
        law(self.loop.time() - began_s < HEALTHY_S, "undecided on healthy tiers")
        now = self.engine.stats().planner.deferrals_expired
        law(now == expired, "expired on healthy tiers")

    async def _rest(self):
        """Let everything end; then nothing is in use, and the loop has no task of the engine's."""
        await self.heal(None)
        await self._all_end(self.tasks)
        if not self.is_closing:
            await self._all_end(self.reclaiming)
            await self._come_to_rest()
            if self.is_virtual and self.config["deferral_timeout_s"] >= HEALTHY_S:
                await self._look_up_on_healthy_tiers()
            await self.close(self.chance)
            await self._all_end(self.tasks)
        await self._all_end(self.reclaiming)
        stats = self.engine.stats()
        check_sums(stats)
        law(not any(tier.jobs_in_flight for tier in stats.tiers), "no result")
        if self.is_virtual:
            await asyncio.sleep(LONGEST_S)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        law(not left, f"tasks are left: {left}")

    async def _all_end(self, tasks):
        if tasks:
            # While threads work, the clock leaps at any time: the loop itself watches then.
            limit_s = None if self.is_virtual and self.is_closing else LONGEST_S
            done, pending = await asyncio.wait(tasks, timeout=limit_s)
            law(not pending, f"calls that do not end: {pending}")
            for task in done:
                law(not task.cancelled() or task in self.cancelled, "cancelled by the engine")
                task.cancelled() or task.result()

    async def _come_to_rest(self):
        deadline_s = self.loop.time() + LONGEST_S
        while True:
            stats = self.engine.stats()
            if is_at_rest(stats) and not (
                stats.copies
                or stats.waiting_loads
                or stats.waiting_stores
                or self.engine.driver.has_pending_work()
            ):
                break
            law(self.loop.time() < deadline_s, f"not at rest: {stats.primary.slots}")
            await self.engine.wait_for_progress(1.0)
        law(len(self.free) == DEVICE_BLOCKS, "device blocks stay occupied")
        await self.observe(None)
