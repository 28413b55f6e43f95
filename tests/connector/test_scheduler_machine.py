"""Scheduler, adapter, workers and tiers together, in whatever order; see `serving`."""

import pytest
from connector.beside_hung import check_work_beside_the_hung_tier
from connector.serving import MAX_WORKERS, Serving
from facade.worlds import EXCLUSIVE, PROBED, REQUEST_LEVEL
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvoffload_async.errors import TierUnavailableError
from kvoffload_async.facade.connector.protocol import KVGroup

pytestmark = pytest.mark.stateful

FULL, WIDE = KVGroup(2), KVGroup(4)
WINDOW, WIDE_WINDOW = KVGroup(2, sliding_window_tokens=3), KVGroup(4, sliding_window_tokens=4)
GROUPS = st.sampled_from(
    [(FULL,), (FULL, WINDOW), (WINDOW,), (FULL, WIDE), (WIDE, WINDOW), (WINDOW, WIDE_WINDOW)]
)
PAIRS = [(EXCLUSIVE, EXCLUSIVE), (PROBED, EXCLUSIVE)]
SETUPS = st.fixed_dictionaries(
    {
        "groups": GROUPS,
        "num_blocks": st.sampled_from([24, 16, 12]),
        "num_slots": st.sampled_from([16, 8, 4]),
        "tiers": st.sampled_from([(), (EXCLUSIVE,), (PROBED,), (REQUEST_LEVEL,), *PAIRS, *PAIRS]),
        "num_workers": st.integers(1, min(2, MAX_WORKERS)),
        "blocks_per_chunk": st.sampled_from([1, 1, 2]),
        "offload_prompt_only": st.booleans(),
        "max_load_tokens": st.sampled_from([None, None, 5]),
        "max_offload_tokens": st.sampled_from([None, None, 6]),
        "lag": st.sampled_from([0, 2, 100]),
        "prefix_cache": st.sampled_from([None, "filled", "all"]),
        "promises": st.booleans(),
    }
)
TEXTS = st.builds(
    lambda stem, length, ending: (stem * 4)[:length] + ending,
    st.sampled_from(["abcd", "abab"]),
    st.integers(0, 8),
    st.sampled_from(["", "x", "xyzx"]),
).filter(bool)


class SchedulerMachine(RuleBasedStateMachine):
    """Few rules with much in each: then hypothesis spends its steps on what interacts."""

    @initialize(setup=SETUPS)
    def build(self, setup):
        self.serving = Serving(setup.pop("groups"), limits={"copies_each": None}, **setup)
        self.has_worked = False
        for text in ("abcdabc", "abcdab", "ababab"):
            self.serving.arrive(text)

    @precondition(lambda self: len(self.serving.live) < 6)
    @rule(text=TEXTS, max_tokens=st.integers(1, 5), reuses=st.booleans())
    def arrive(self, text, max_tokens, reuses):
        self.serving.arrive(text, max_tokens, reuses=reuses)

    @rule(
        budget=st.sampled_from([4, 8, 1, 3]),
        preempts=st.sampled_from([False, False, True]),
        admits=st.sampled_from([2, 4, 1, 0]),
        declines=st.sampled_from([False, False, False, True]),
        reverses=st.booleans(),
        finishes=st.booleans(),
    )
    def step(self, finishes, **how):
        self.serving.step(**how)
        if finishes:
            self.serving.world.finish_all()

    @precondition(lambda self: any(c.outcome is None for c in self.serving.copies))
    @rule(data=st.data(), success=st.sampled_from([True, True, True, False]))
    def perform(self, data, success):
        waiting = [copy for copy in self.serving.copies if copy.outcome is None]
        copy = waiting[data.draw(st.integers(0, len(waiting) - 1))]
        self.serving.perform(copy, success=success)

    @precondition(lambda self: any(c.outcome is not None for c in self.serving.copies))
    @rule(data=st.data())
    def report_one(self, data):
        ended = [copy for copy in self.serving.copies if copy.outcome is not None]
        self.serving.report(ended[data.draw(st.integers(0, len(ended) - 1))])

    @precondition(lambda self: self.serving.copies)
    @rule(performs=st.booleans())
    def report_all(self, performs):
        for copy in self.serving.copies:
            if performs and copy.outcome is None:
                self.serving.perform(copy)
        self.serving.report(*[c for c in self.serving.copies if c.outcome is not None])

    @precondition(lambda self: self.serving.live)
    @rule(data=st.data())
    def abort(self, data):
        live = [request for request in self.serving.live if not request.ended]
        if live:
            self.serving.finish(live[data.draw(st.integers(0, len(live) - 1))])

    @precondition(lambda self: self.serving.connector._jobs)
    @rule(forgets=st.booleans())
    def reset(self, forgets):
        self.serving.world.finish_all()  # the tiers drain: that is what the manager waits for
        self.serving.connector.reset_cache()
        if forgets:
            self.serving.pool.forget()
        self.serving.check()

    @precondition(lambda self: any(t.parked for t in self.serving.world.healthy.values()))
    @rule(fails=st.sampled_from([False, False, True]))
    def finish_a_tier(self, fails):
        world = self.serving.world
        index = next(index for index, tier in world.healthy.items() if tier.parked)
        world.finish_job(index, error=TierUnavailableError("drawn") if fails else None)

    @precondition(lambda self: len(self.serving.world.tiers) > 1)
    @rule(tier=st.sampled_from([0, 1, None]))
    def hang(self, tier):
        """Nothing ends any more in a tier, or it is released, and what has hung ends."""
        self.serving.world.hung = tier

    @precondition(lambda self: self.serving.world.hung is not None and not self.has_worked)
    @rule()
    def work_beside_the_hung_tier(self):
        self.has_worked = True  # once a run: it costs
        check_work_beside_the_hung_tier(self.serving)

    def teardown(self):
        if hasattr(self, "serving"):
            try:
                self.serving.rest()
            finally:
                self.serving.end()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(stateful_step_count=40, print_blob=False)
