"""A world with a tier of every kind, for whoever draws what happens next."""

import asyncio
import itertools

from facade.worlds import (
    EXCLUSIVE,
    HIT,
    MISS,
    PROBED,
    REQUEST_LEVEL,
    SLOT_BYTES,
    Counting,
    DeviceCopy,
    PooledScriptedIo,
    World,
    ks,
)
from scripted_tier import Operation, ScriptedTier

from kvoffload_async.abc.tier import TierBounds
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.testing.harness import content_of
from kvoffload_async.tiers.example import ExampleTier

NUM_SLOTS = 6
BOUNDS = TierBounds(concurrent_loads=1, concurrent_stores=1, queued_jobs=2)
LOOSE_SLOTS = 4
DEFERRAL_S = 20.0
HEALTHY_STEP_S = 0.4
"""Seconds of a step: less than a turn, so that nobody loses its place while it asks."""


class FullWorld(World):
    """Three tiers below a manager, and one alone beside it; every copy is parked.

    The planner drives the tiers itself, but for those in `external`, which count what they do.

    Attributes:
        stores: Copies from the device that the scheduler waits for.
        loads: Copies to the device that it waits for.
        stored: Keys that have been stored.
        gone: What a tier had and has lost by itself: (tier, key).
        loose: The manager of the tier alone.
    """

    def __init__(self, external, copies_each=None):
        self.example = ExampleTier()
        self.probed = ScriptedTier(PROBED, BOUNDS)
        self.whole = ScriptedTier(REQUEST_LEVEL, BOUNDS)
        super().__init__(
            self.example,
            self.probed,
            self.whole,
            num_slots=NUM_SLOTS,
            manager_class=tuple(
                Counting if index in external else SecondaryTierManager for index in range(3)
            ),
            io_timeout_s=2.0,
            pool=PooledScriptedIo,
            drain_timeout_s=1.0,
            deferral_timeout_s=DEFERRAL_S,
            copies_each=copies_each,
        )
        self.loose_tier = ScriptedTier(EXCLUSIVE, BOUNDS)
        self.loose = Counting(
            None,
            memoryview(bytearray(LOOSE_SLOTS * 8)).cast("B", (LOOSE_SLOTS, 8)),
            "loose",
            self.loose_tier,
            runtime=self.bridge,
            io_timeout_s=2.0,
        )
        self.stores = []
        self.loads = []
        self.stored = set()
        self.gone = set()
        self.fresh = itertools.count(100)

    # -- bytes ------------------------------------------------------------------------------

    @property
    def blocks_of_tiers(self):
        return self.example._blocks, self.probed.blocks, self.whole.blocks

    def warm(self):
        """Put blocks into the tiers, so that much can happen."""
        example, probed, whole = ks(*range(5)), ks(7, 8), ks(*range(4, 8))
        for blocks, keys in zip(self.blocks_of_tiers, (example, probed, whole), strict=True):
            blocks.update((key, content_of(key, SLOT_BYTES)) for key in keys)
        self.example._env.blocks_appeared(example)
        self.whole._env.blocks_appeared(whole)

    def write(self, copy):
        """Put into the slots what the device has for these keys."""
        for key, slot in copy.slots.items():
            self.rows[slot] = content_of(key, SLOT_BYTES)

    def is_stale(self, copy):
        return copy.generation != self.primary.core.generation

    def check_bytes(self, key, slot):
        assert bytes(self.rows[slot]) == bytes(content_of(key, SLOT_BYTES))

    def check_nothing_is_lost_unseen(self):
        """At rest, what was stored is in each tier, or is counted there, or was lost by it."""
        tiers = (self.example, self.probed, self.whole)
        for state, tier, blocks in zip(
            self.manager.planner.tiers, tiers, self.blocks_of_tiers, strict=True
        ):
            counted = state.counters.dropped_blocks + state.counters.failed_store_blocks
            lost = {key for key in self.stored - blocks.keys() if (tier, key) not in self.gone}
            assert len(lost) <= counted

    def evict(self, tier, key):
        """Have a tier drop a block that it has, and announce that."""
        self.gone.add((tier, key))
        tier.evict([key])

    def drop(self, tier, parked, index):
        """Have a tier drop a block that its load finds corrupt; a cancelled one announces it."""
        key = parked.keys[index]
        self.gone.add((tier, key))
        if tier.blocks.pop(key, None) is not None and parked.task.cancelling():
            tier.env.blocks_evicted([key])

    # -- what is under way ------------------------------------------------------------------

    def operations(self):
        """What may end: nothing of the tier that hangs does."""
        tiers = [tier for tier in self.healthy.values() if tier is not self.example]
        return [(tier, parked) for tier in (*tiers, self.loose_tier) for parked in tier.parked]

    def fallible(self):
        """All but the questions to a tier with an exact index: nobody else knows the answer."""
        return [
            (tier, parked)
            for tier, parked in self.operations()
            if tier is self.probed or parked.kind is not Operation.CONTAINS
        ]

    def parked_stores(self):
        """The stores under way of tiers with an exact index, which announce what they evict."""
        exclusive = (self.whole, self.loose_tier)
        return [
            (tier, parked)
            for tier, parked in self.operations()
            if tier in exclusive and parked.kind is Operation.STORE and parked.keys
        ]

    def evictable(self):
        open_tiers = [tier for tier in (self.whole, self.loose_tier) if tier.is_open]
        return [(tier, key) for tier in open_tiers for key in tier.blocks]

    def check_indexes(self):
        """What is known of a tier with an exact index is what it has."""
        self.loose.get_finished_jobs()
        for manager, blocks in (
            (self.secondaries[0], self.example._blocks),
            (self.secondaries[2], self.whole.blocks),
            (self.loose, self.loose_tier.blocks),
        ):
            if manager.link._closing._attempt is None:  # else it was shut down
                index = manager.tier_state.index
                assert len(index) == len(blocks)
                assert all(index.lookup(key, "") is HIT for key in blocks)

    def calls(self):
        """The example tier's calls, if it does not hang; nobody else makes any."""
        if self.hung == 0:
            return []
        return [(pool, call) for pool in self.host.pools for call in pool.parked]

    def job_tasks(self):
        tasks = asyncio.all_tasks(self.runner.loop)
        names = {task.get_name(): task for task in tasks}
        return {name: task for name, task in names.items() if ":store:" in name or ":load:" in name}

    def finish_everything(self):
        self.runner.run_ready()
        while self.operations() or self.calls():
            for tier, parked in self.operations():
                tier.finish(parked)
            for pool, call in self.calls():
                pool.finish(call)
            self.runner.run_ready()

    def end_requests(self):
        """Have every device copy end well, and every request."""
        for copies, complete in (
            (self.stores, self.manager.complete_store),
            (self.loads, self.manager.complete_load),
        ):
            for copy in copies:
                if not self.is_stale(copy):
                    self.write(copy)
                    if copies is self.stores:
                        self.stored.update(copy.slots)
                complete(list(copy.slots), copy.ctx, generation=copy.generation)
            copies.clear()
        for req_id in list(self.contexts):
            self.finish(req_id)

    def finish_step(self, seconds=0.0):
        """Let time pass, and end a step, with all that the tiers have begun."""
        self.runner.advance(seconds)
        self.manager.on_schedule_end()
        self.runner.run_ready()
        self.finish_everything()

    def come_to_rest(self):
        self.hung = None
        for secondary in self.secondaries:
            secondary.refuses = False  # only an external one ever refuses
        self.end_requests()
        for _ in range(20):
            self.finish_step()
        for _ in range(30):  # breakers close again, and pauses pass
            has_pending = self.manager.planner.cascades.has_pending
            if not has_pending and not self.manager.has_pending_work():
                break
            self.finish_step(6.0)
            self.manager.on_schedule_end()
        self.manager.on_schedule_end()
        assert not self.manager.planner.cascades.has_pending
        assert not self.manager.has_pending_work()

    # -- on healthy tiers -------------------------------------------------------------------

    def decide_all(self, prompts):
        """Have new requests ask for `prompts` in each step; all are decided before their limit.

        No copy takes longer than a step. Decided requests stay, and are never scheduled.
        """
        self.manager.on_reset_flushed()
        self.come_to_rest()
        counters = self.manager.planner.counters
        expired, waiting = counters.deferrals_expired, {}
        for numbers in prompts:
            where = {key: at for at, key in enumerate(ks(*numbers))}
            waiting[self._begin_anew(key_positions=where)] = list(where)
        for _ in range(int(DEFERRAL_S / HEALTHY_STEP_S)):
            for ctx, keys in list(waiting.items()):
                if {*self.manager.lookup_many(keys, ctx, stop_at_miss=True)} <= {HIT, MISS}:
                    del waiting[ctx]
            self.finish_step(HEALTHY_STEP_S)
        assert not waiting, "undecided on healthy tiers"
        assert counters.deferrals_expired == expired, "expired on healthy tiers"
        self.end_requests()

    # -- beside a tier that hangs -----------------------------------------------------------

    def work_beside_the_hung_tier(self, source):
        """The others take what is stored and give what they have; `source` says which gives."""
        self.manager.on_reset_flushed()
        for secondary in self.secondaries:
            secondary.refuses = False  # a tier that refuses is not suspended at once
        self.end_requests()
        self.rest_beside_the_hung_tier()
        for _ in range(3):  # what has begun in the one that hangs is overdue each time
            self._store_beside_the_hung_tier()
        self._promote_beside_the_hung_tier(sorted(self.healthy)[source])

    def _store_beside_the_hung_tier(self):
        keys = ks(*itertools.islice(self.fresh, self.check_what_the_hung_tier_leaves()))
        ctx = self._begin_anew()
        granted = self.manager.prepare_store(keys, ctx)
        assert granted is not None
        assert granted.keys_to_store == keys
        spec = granted.store_spec
        slots = spec.block_ids.tolist()
        self.stores.append(DeviceCopy(ctx, dict(zip(keys, slots, strict=True)), spec.generation))
        self.end_requests()
        self.rest_beside_the_hung_tier()
        for index in self.healthy:
            assert self.blocks_of_tiers[index].keys() >= set(keys)

    def rest_beside_the_hung_tier(self):
        for _ in range(40):
            self.finish_step(2.5)
            is_busy = any(self.has_pending(index) for index in self.healthy)
            if not (is_busy or self._is_trusted()):
                return
        raise AssertionError("a healthy tier does not come to rest")

    def _is_trusted(self):
        """Whether blocks are kept for the tier that hangs, as it has not been found to hang."""
        queue = self.manager.planner.cascades.queues[self.hung]
        return queue.count and queue.is_wanted

    def _promote_beside_the_hung_tier(self, index):
        (key,) = ks(next(self.fresh))
        tier = self.tiers[index]
        self.blocks_of_tiers[index][key] = content_of(key, SLOT_BYTES)
        if tier is not self.probed:
            (tier._env if tier is self.example else tier.env).blocks_appeared([key])
        ctx = self._begin_anew()
        self.runner.run_ready()
        for _ in range(10):
            if self.manager.lookup(key, ctx) is HIT:
                break
            self.finish_step(0.5)
        else:
            raise AssertionError(f"a block of tier {index} alone is not promoted")
        self.check_bytes(key, self.primary.core.slot_of(key))
        self.end_requests()

    def _begin_anew(self, **fields):
        req_id = f"fresh{next(self.fresh)}"
        self.begin(req_id, **fields)
        return self.contexts[req_id]
