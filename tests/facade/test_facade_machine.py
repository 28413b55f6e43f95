"""The whole facade as a state machine: hypothesis draws what ends when, and how.

Real actors run on a virtual loop; every copy is parked until a rule finishes it. Bytes are real: a
slot that is handed out too early shows as wrong bytes on some later hit, or in some tier.
"""

import asyncio
import contextlib
import logging
from collections import Counter

import pytest
from facade.full_world import LOOSE_SLOTS, FullWorld
from facade.worlds import HIT, SLOT_BYTES, Counting, DeviceCopy, k, ks
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from planner_invariants import check_quiescent

from kvoffload_async.core.invariants import check_state
from kvoffload_async.core.ledger import JobState
from kvoffload_async.errors import CorruptBlockError, OffloadError, TierUnavailableError
from kvoffload_async.testing.harness import content_of, make_job
from kvoffload_async.types import ALL_TIERS

NUMBERS = st.integers(0, 8)
BATCHES = st.lists(NUMBERS, min_size=1, max_size=4)
ERRORS = st.sampled_from(
    [OSError(5, "io"), TierUnavailableError("down"), SystemExit(1), asyncio.CancelledError()]
)


@pytest.fixture(autouse=True)
def quiet():
    """Thousands of injected faults would be logged, which costs more than everything else."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Facade(RuleBasedStateMachine):
    def build(self, external, copies_each=None):
        self.world = FullWorld(external, copies_each)
        self.manager = self.world.manager
        self.runner = self.world.runner
        self.born = 0
        self.closed = False
        self.has_worked = self.has_asked = False

    @initialize(
        external=st.sampled_from([(), (0, 1, 2), (1,), (0, 2)]),
        num_requests=st.integers(1, 3),
        is_warm=st.sampled_from([True, True, False]),
        copies_each=st.sampled_from([None, 2, 1]),
    )
    def start(self, external, num_requests, is_warm, copies_each):
        """Begin with requests and, mostly, with blocks in the tiers, so that much can happen."""
        self.build(external, copies_each)
        for _ in range(num_requests):
            self.begin(ALL_TIERS, 0)
        if is_warm:
            self.world.warm()

    # -- the scheduler ----------------------------------------------------------------------

    is_open = precondition(lambda self: not self.closed)
    has_request = precondition(lambda self: not self.closed and self.world.contexts)

    @precondition(lambda self: not self.closed and len(self.world.contexts) < 4)
    @rule(filters=st.sampled_from([ALL_TIERS] * 4 + [frozenset()]), number=st.integers(0, 3))
    def begin(self, filters, number):
        """An id is used again as soon as its request has finished, or its copies still run."""
        self.born += 1
        req_id = f"r{number or self.born}"
        if req_id not in self.world.contexts:
            self.world.begin(req_id, load_tier_filter=filters)

    @has_request
    @rule(data=st.data(), touched=st.lists(NUMBERS, max_size=2))
    def finish(self, data, touched):
        ctx = self._request(data)
        self.manager.touch(ks(*touched), ctx)
        self.world.finish(ctx.req_id)

    @has_request
    @rule(data=st.data(), numbers=BATCHES, steps=st.booleans())
    def look_up(self, data, numbers, steps):
        ctx = self._request(data)
        hits = []
        for key in ks(*dict.fromkeys(numbers)):
            if self.manager.lookup(key, ctx) is HIT:
                self.world.check_bytes(key, self.world.primary.core.slot_of(key))
                hits.append(key)
        if hits and data.draw(st.booleans(), "load them"):
            spec = self.manager.prepare_load(hits, ctx)
            slots = dict(zip(hits, spec.block_ids.tolist(), strict=True))
            self.world.loads.append(DeviceCopy(ctx, slots, spec.generation))
        if steps:
            self.step(turns=True, observes=False)

    @precondition(lambda self: self.world.loads)
    @rule(data=st.data())
    def end_load(self, data):
        loads = self.world.loads
        load = loads.pop(data.draw(st.integers(0, len(loads) - 1), "load"))
        if not self.world.is_stale(load):
            for key, slot in load.slots.items():
                self.world.check_bytes(key, slot)
        self.manager.complete_load(list(load.slots), load.ctx, load.generation)

    @has_request
    @rule(data=st.data(), numbers=BATCHES, ends=st.booleans(), steps=st.booleans())
    def begin_store(self, data, numbers, ends, steps):
        ctx = self._request(data)
        output = self.manager.prepare_store(ks(*numbers), ctx)
        if output is not None and output.keys_to_store:
            spec = output.store_spec
            slots = dict(zip(output.keys_to_store, spec.block_ids.tolist(), strict=True))
            copy = DeviceCopy(ctx, slots, spec.generation)
            if ends:
                self._end_store(copy, success=True)
            else:
                self.world.stores.append(copy)
        if steps:
            self.step(turns=True, observes=False)

    @precondition(lambda self: self.world.stores)
    @rule(data=st.data(), success=st.sampled_from([True, True, True, False]))
    def end_store(self, data, success):
        stores = self.world.stores
        store = stores.pop(data.draw(st.integers(0, len(stores) - 1), "store"))
        self._end_store(store, success=success)

    @rule(turns=st.booleans(), observes=st.booleans())
    def step(self, turns, observes):
        self.manager.on_schedule_end()
        if observes:
            list(self.manager.take_events())
            self.manager.has_pending_work()
        if turns:
            self.runner.run_ready()

    @is_open
    @rule(sure=st.integers(0, 3))
    def maybe_reset(self, sure):
        if sure == 0:
            self.reset()

    def reset(self):
        """The device's copies from before are fenced by the scheduler, but their ends reported."""
        self.manager.reset_cache()

    @is_open
    @rule()
    def flushed(self):
        self.manager.on_reset_flushed()

    @is_open
    @rule(index=st.integers(0, 2))
    def refuse_submissions(self, index):
        secondary = self.world.secondaries[index]
        if isinstance(secondary, Counting):
            secondary.refuses = not secondary.refuses

    @precondition(lambda self: not self.closed and self.born > 3)
    @rule(sure=st.integers(0, 9))
    def shut_down(self, sure):
        if sure == 0:
            self.closed = True
            with contextlib.suppress(OffloadError):  # a probe hangs: that tier was not closed
                self.manager.shutdown(1.0)
            assert not self.manager.planner.jobs

    # -- the loop and the tiers -------------------------------------------------------------

    @rule()
    def turn(self):
        self.runner.run_ready()

    @rule(seconds=st.sampled_from([0.5, 2.5, 6.0]))
    def time_passes(self, seconds):
        self.runner.advance(seconds)

    @rule(sure=st.integers(0, 3))
    def calm(self, sure):
        """Everything under way ends well: what was pinned becomes idle, and can be evicted."""
        if sure != 0:
            return
        self.step(turns=True, observes=False)
        self.world.finish_everything()
        self.world.poll()

    @precondition(lambda self: self.world.operations())
    @rule(data=st.data(), turns=st.booleans())
    def finish_well(self, data, turns):
        tier, parked = data.draw(st.sampled_from(self.world.operations()), "operation")
        tier.finish(parked)
        if turns:
            self.runner.run_ready()

    @precondition(lambda self: self.world.fallible())
    @rule(data=st.data(), error=ERRORS)
    def finish_badly(self, data, error):
        tier, parked = data.draw(st.sampled_from(self.world.fallible()), "operation")
        if data.draw(st.booleans(), "some blocks only") and parked.job and parked.keys:
            failed = data.draw(st.sets(st.integers(0, len(parked.keys) - 1), min_size=1))
            failed -= parked.landed
            if not parked.job.is_promotion:
                tier.finish(parked, {index: CorruptBlockError("bad") for index in failed})
                return
            for index in failed:
                self.world.drop(tier, parked, index)
            tier.finish(parked, {index: CorruptBlockError("bad") for index in failed})
            self.runner.run_ready()  # nothing comes between its dropping a block and its saying so
        else:
            tier.finish(parked, error=error)

    @precondition(lambda self: self.world.parked_stores())
    @rule(data=st.data(), evicts=st.booleans())
    def land_early(self, data, evicts):
        """One block of a store is there before the store ends, and may be gone before it ends."""
        tier, parked = data.draw(st.sampled_from(self.world.parked_stores()), "store")
        index = data.draw(st.integers(0, len(parked.keys) - 1), "block")
        tier.land(parked, index)
        if evicts and parked.keys[index] in tier.blocks:
            self.world.evict(tier, parked.keys[index])

    @precondition(lambda self: self.world.evictable())
    @rule(data=st.data())
    def evict(self, data):
        tier, key = data.draw(st.sampled_from(self.world.evictable()), "block")
        self.world.evict(tier, key)

    @precondition(lambda self: self.world.calls())
    @rule(
        data=st.data(),
        error=st.sampled_from([None, None, OSError(5, "io")]),
        after_run=st.booleans(),
        turns=st.booleans(),
    )
    def finish_call(self, data, error, after_run, turns):
        # Not the call: what hypothesis has drawn it keeps, and views of the primary with it.
        calls = self.world.calls()
        pool, call = calls[data.draw(st.integers(0, len(calls) - 1), "call")]
        pool.finish(call, error, after_run=after_run)
        if turns:
            self.runner.run_ready()

    @precondition(lambda self: self.world.job_tasks())
    @rule(data=st.data())
    def cancel(self, data):
        tasks = self.world.job_tasks()
        tasks[data.draw(st.sampled_from(sorted(tasks)), "task")].cancel()

    # -- a tier that hangs: what ends there, ends after its release ---------------------------

    @precondition(lambda self: not self.closed and self.world.hung is None)
    @rule(tier=st.sampled_from([None, None, 0, 1, 2]))
    def hang(self, tier):
        self.world.hung = tier

    @precondition(lambda self: self.world.hung is not None)
    @rule(works=st.booleans(), source=st.integers(0, 1))
    def release(self, works, source):
        """Once a run, as it costs: with the tier hanging, the others work and the rest is free."""
        if works and not self.closed and not self.has_worked:
            self.has_worked = True
            self.world.work_beside_the_hung_tier(source)
        self.world.hung = None

    @precondition(lambda self: not (self.closed or self.has_asked or self.world.hung is not None))
    @rule(prompts=st.lists(st.lists(NUMBERS, min_size=1, max_size=6, unique=True), max_size=3))
    def ask_on_healthy_tiers(self, prompts):
        """Once a run, as it costs."""
        self.has_asked = True
        self.world.decide_all(prompts)

    # -- a tier alone: duplicate ids, empty jobs, jobs after its shutdown ---------------------

    @rule(
        job_id=st.integers(0, 4),
        numbers=st.lists(NUMBERS, max_size=LOOSE_SLOTS, unique=True),
        is_promotion=st.booleans(),
        polls=st.booleans(),
    )
    def submit_loose(self, job_id, numbers, is_promotion, polls):
        job = make_job(job_id, ks(*numbers), range(len(numbers)), is_promotion=is_promotion)
        loose = self.world.loose
        (loose.submit_load if is_promotion else loose.submit_store)(job)
        if polls:
            loose.get_finished_jobs()
            loose.get_released_jobs()

    @rule(sure=st.integers(0, 9))
    def shut_down_loose(self, sure):
        if sure == 0:
            self.world.loose.shutdown(0.5)

    # -- what always holds ------------------------------------------------------------------

    @invariant()
    def invariants_hold(self):
        check_state(self.manager.planner)

    @invariant()
    def statistics_tell_what_is(self):
        """Everything that is counted as it happens is what a walk over everything finds."""
        read, planner = self.manager.stats(), self.manager.planner
        found = Counter(refs for _, _, refs in planner.primary.resident())
        slots, pool = read.primary.slots, planner.primary.pool
        assert (slots.writing, slots.idle) == (found[-1], found[0])
        assert slots.pinned == found.total() - found[-1] - found[0]
        assert (slots.held, slots.free) == (len(pool.holds), pool.unused.count)
        under_way = read.planner.jobs_submitted - read.planner.job_results
        assert sum(tier.jobs_in_flight for tier in read.tiers) == under_way
        for tier, state in zip(read.tiers, planner.tiers, strict=True):
            assert tier.queued_jobs >= len(state.jobs.ids_in(JobState.QUEUED))
            under_way = list(state.jobs.unreported())
            assert tier.jobs_in_flight == len(under_way) == tier.submitted_jobs - tier.finished_jobs
            assert tier.loads_in_flight == sum(job.is_promotion for job in under_way)
            for of in (tier.load_seconds, tier.store_seconds):
                assert of.queue.count == of.copy.count <= of.total.count
            assert tier.overdue_jobs == len(state.jobs.ids_in(JobState.ORPHANED))
        loose = self.world.loose.stats()
        assert loose.submitted_jobs == loose.finished_jobs + loose.jobs_in_flight

    @invariant()
    def tiers_have_the_bytes_of_their_keys(self):
        for blocks in self.world.blocks_of_tiers:
            for key, block in blocks.items():
                assert bytes(block) == bytes(content_of(key, SLOT_BYTES))

    def teardown(self):
        if not self.closed:
            self.world.come_to_rest()
            check_quiescent(self.manager.planner)
            self.world.check_indexes()
            self.world.check_nothing_is_lost_unseen()
            self.world.rows = None
            self.manager.shutdown(1.0)
        self.world.hung = None
        self.world.loose.shutdown(1.0)
        self.world.finish_everything()
        managers = [*self.world.secondaries, self.world.loose]
        for manager in managers:
            manager.get_finished_jobs()
            if isinstance(manager, Counting):
                assert manager.reported == manager.accepted
            assert not manager.has_pending_work()
            assert not manager.abandon_jobs(), "a copy has ended, and nobody was told"
        counters = self.manager.planner.counters
        assert counters.jobs_submitted == counters.job_results
        # Still there only if a copy was left behind by the shutdown.
        self.world.example._rows = self.world.rows = None
        for secondary in self.world.secondaries:
            secondary.link._view.release()
        self.runner.close()  # raises if a task is left
        assert self.world.buffer.release()

    # -- inside -----------------------------------------------------------------------------

    def _request(self, data):
        contexts = self.world.contexts
        return contexts[data.draw(st.sampled_from(sorted(contexts)), "request")]

    def _end_store(self, store, *, success):
        if not self.world.is_stale(store):
            self.world.write(store)
            if success:
                self.world.stored.update(store.slots)
        self.manager.complete_store(list(store.slots), store.ctx, success, store.generation)


TestFacade = pytest.mark.stateful(Facade.TestCase)
TestFacade.settings = settings(stateful_step_count=80)  # much must come together in one run


@pytest.mark.parametrize("external", [(), (0, 1, 2)], ids=["driven by the planner", "external"])
def test_the_machine_reaches_a_promotion_with_bytes(external):
    """A path that the rules must be able to take; else the machine would prove little."""
    machine = Facade()
    machine.build(external)
    machine.begin(ALL_TIERS, 0)
    ctx = machine.world.contexts["r1"]
    (slot,) = machine.manager.prepare_store(ks(1), ctx).store_spec.block_ids.tolist()
    machine.world.stores.append(DeviceCopy(ctx, {k(1): slot}, 0))
    machine.world.rows[slot] = content_of(k(1), SLOT_BYTES)
    machine.manager.complete_store(ks(1), ctx)
    machine.world.stores.clear()
    for _ in range(3):
        machine.step(turns=True, observes=False)
        machine.world.finish_everything()
    machine.reset()
    machine.flushed()
    machine.world.rows[:] = 0
    machine.manager.lookup(k(1), ctx)
    for _ in range(3):
        machine.step(turns=True, observes=False)
        machine.world.finish_everything()
    assert machine.manager.lookup(k(1), ctx) is HIT
    machine.world.check_bytes(k(1), machine.world.primary.core.slot_of(k(1)))
    machine.teardown()
