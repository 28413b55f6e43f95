"""Who replays the events of a run knows what is where, whatever happened in it and when."""

import logging

import pytest
from facade.replay_world import Fleet, ReplayWorld
from facade.worlds import HIT, k, ks
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kvoffload_async.types import Medium

NUMBERS = st.integers(0, 19)
BATCHES = st.lists(NUMBERS, min_size=1, max_size=3)


@pytest.fixture(autouse=True)
def quiet():
    """Files that vanish are warned of, thousands of times."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Events(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.world = ReplayWorld()
        self.manager = self.world.manager
        self.world.begin("a")
        self.world.begin("b")

    requests = st.sampled_from("ab")

    @rule(numbers=BATCHES, req_id=requests)
    def begin_copy(self, numbers, req_id):
        self.world.begin_copy(numbers, req_id)

    @rule(numbers=BATCHES, req_id=requests)
    def store(self, numbers, req_id):
        self.world.begin_copy(numbers, req_id)
        while self.world.copies:
            self.world.end_copy(self.world.copies[-1], success=True)

    @precondition(lambda self: self.world.copies)
    @rule(data=st.data(), success=st.booleans())
    def end_copy(self, data, success):
        self.world.end_copy(data.draw(st.sampled_from(self.world.copies)), success=success)

    @rule(numbers=BATCHES, req_id=requests)
    def load(self, numbers, req_id):
        for number in numbers:
            if self.world.lookup(number, req_id) is HIT:
                self.world.load(number, req_id=req_id)

    @rule()
    def step(self):
        self.manager.on_schedule_end()
        self.world.runner.run_ready()

    @precondition(lambda self: self.world.calls())
    @rule(data=st.data(), turns=st.booleans(), fails=st.sampled_from(["", "", "before", "after"]))
    def finish_call(self, data, turns, fails):
        # Not the call: what hypothesis has drawn it keeps, and views of the primary with it.
        calls = self.world.calls()
        pool, call = calls[data.draw(st.integers(0, len(calls) - 1), "call")]
        error = OSError(5, "injected") if fails else None
        pool.finish(call, error, after_run=fails == "after")
        if turns:
            self.world.runner.run_ready()

    @precondition(lambda self: self.world.job_tasks())
    @rule(data=st.data())
    def cancel(self, data):
        tasks = self.world.job_tasks()
        tasks[data.draw(st.sampled_from(sorted(tasks)), "task")].cancel()

    @rule(batch=st.sampled_from([None, 1, 3]))
    def take(self, batch):
        self.world.batch = batch
        self.world.take()

    @rule(sure=st.integers(0, 2))
    def reset(self, sure):
        if sure == 0:
            self.world.finish_all()
            self.manager.reset_cache()
            self.manager.on_reset_flushed()
            self.world.copies.clear()

    @rule(sure=st.integers(0, 2))
    def calm(self, sure):
        if sure == 0:
            self.world.check()

    def teardown(self):
        try:
            self.world.check()
            self.world.remove_a_file()
            self.world.rescan()
            self.world.check()
        finally:
            self.world.end()


class FleetEvents(Events):
    """The same on two hosts that share the directory of `fs`; `other_host` changes the host."""

    def __init__(self):
        RuleBasedStateMachine.__init__(self)
        self.fleet = Fleet()
        for number in range(2):
            self.turn_to(number)
            self.begin()

    def turn_to(self, number):
        self.number = number
        self.world = self.fleet.hosts[number]
        self.manager = self.world.manager

    def begin(self):
        self.world.begin("a")
        self.world.begin("b")

    @rule()
    def other_host(self):
        self.turn_to(1 - self.number)

    @rule(sure=st.integers(0, 5))
    def crash(self, sure):
        if sure == 0:
            self.fleet.crash(self.number)
            self.turn_to(self.number)
            self.begin()

    @rule(numbers=BATCHES, looks=st.booleans())
    def evict_what_both_know(self, numbers, looks):
        self.fleet.walk()
        self.store(numbers, "a")
        self.world.check()
        self.other_host()
        if looks:
            self.look_for_the_removed()

    def look_for_the_removed(self):
        """Whom a look-up tells that a block is gone tells its consumer."""
        self.world.check()
        removed = self.world.in_fs - self.world.on_disk()
        for req_id in "ab":  # what they have asked is not asked again
            self.world.finish(req_id)
        self.begin()
        self.world.begin("looking")
        for number in range(20):
            if k(number) in removed:
                self.world.settled_lookup(number, "looking")
        self.world.take()
        missed = self.world.secondaries[0].tier_state.index.lacks(list(removed))
        assert self.world.in_fs.isdisjoint(missed)
        self.world.finish("looking")

    def teardown(self):
        try:
            self.fleet.check()
            self.fleet.walk()
        finally:
            self.fleet.end()


TestFleetEvents = pytest.mark.stateful(FleetEvents.TestCase)
TestFleetEvents.settings = settings(
    derandomize=True, stateful_step_count=40, max_examples=settings().max_examples // 3
)
TestEvents = pytest.mark.stateful(Events.TestCase)
TestEvents.settings = settings(  # with real files, a run costs a tenth of a second
    derandomize=True, stateful_step_count=40, max_examples=settings().max_examples // 3
)


def test_every_tier_of_this_world_stores_what_it_is_given():
    world = ReplayWorld()
    try:
        world.begin("a")
        world.begin_copy([1, 2], "a")
        world.check()
        fs = world.secondaries[0].ownership
        locations = (Medium.STORAGE, fs), (Medium.STORAGE, "tier1"), (Medium.CPU, "tier2")
        assert [world.replay.at(*location) for location in locations] == [set(ks(1, 2))] * 3
    finally:
        world.end()
