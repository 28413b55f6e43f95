"""A slow tier is asked only for as many blocks as loading pays for: on virtual time."""

import json
from dataclasses import asdict
from functools import partial

import pytest
from facade.worlds import HIT, MISS, PENDING, PROBED, RETRY, World, filled
from scripted_tier import Operation

from kvoffload_async import ConfigError, SecondaryTierFactory
from kvoffload_async.core.index import FRESH_S
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.observe.prometheus import METRICS

STORED = range(100)
RATE = 100.0
"""A block is computed in 10 ms."""


class TimedWorld(World):
    """Its tier takes `latency_s` for any call, and `block_s` more for each block of a load."""

    latency_s = block_s = 0.0

    def __init__(self, **options):
        manager = partial(SecondaryTierManager, prefill_blocks_per_s=RATE, **options)
        super().__init__(PROBED, num_slots=200, manager_class=(manager,), explain_requests=9)
        filled(self, *STORED)
        self.asked = []

    def serve(self):
        """End what the tier was asked for, each call after its time."""
        for call in list(self.tiers[0].parked):
            is_load = call.kind is Operation.LOAD
            self.runner.advance(self.latency_s + self.block_s * len(call.keys) * is_load)
            if call.kind is Operation.CONTAINS:
                self.asked.append(len(call.keys))
            self.tiers[0].finish(call)
        self.runner.run_ready()

    def find(self, name, numbers):
        """Look up as a scheduler does until the answer is final; return how many were found."""
        self.begin(name)
        while True:
            answers = [self.lookup(number, name) for number in numbers]
            if not {RETRY, PENDING} & set(answers):
                break
            self.step()
            self.serve()
        self.finish(name)
        self.evict_everything()
        return answers.count(HIT)

    @property
    def read(self):
        return self.manager.stats().tiers[0]


@pytest.fixture
def world():
    made = []

    def make(**options):
        made.append(TimedWorld(**options))
        return made[-1]

    yield make
    for each in made:
        each.end()


def test_a_slow_tier_is_asked_at_first_then_for_much_and_anew_when_that_is_old(world):
    here = world()
    here.latency_s, here.block_s = 0.1, 0.001
    # At first: nothing is known.
    assert here.find("first", STORED[:2]) == 2
    assert here.find("second", STORED[:50]) == 50
    # 9 ms are won a block, and a probe and a load are 200 ms: 23 blocks.
    assert here.read.break_even.needed_blocks == 23
    assert here.read.break_even.latency_s == pytest.approx(0.2)
    assert here.read.break_even.blocks_per_s == pytest.approx(1000.0)
    asked = len(here.asked)
    assert here.find("small", STORED[:22]) == 0
    assert len(here.asked) == asked
    assert here.find("large", STORED[:23]) == 23
    # The tier is quick now, but that is found out only when what is known is old.
    here.latency_s, here.block_s = 0.001, 0.0001
    assert here.find("still small", STORED[:10]) == 0
    here.runner.advance(FRESH_S)
    asked = len(here.asked)
    assert here.find("exploring", STORED[:10]) == 10
    assert here.read.break_even.explorations == 1
    assert len(here.asked) == asked + 1
    assert here.read.break_even.needed_blocks == 1
    assert here.find("small at last", STORED[:1]) == 1


def test_a_tier_that_is_slower_than_computing_is_tried_once_in_a_while(world):
    here = world()
    here.latency_s, here.block_s = 0.001, 0.02
    here.find("first", STORED[:2])
    here.find("second", STORED[:50])
    assert here.read.break_even.needed_blocks is None
    asked = len(here.asked)
    for number in range(5):
        assert here.find(f"none of {number}", STORED) == 0
    assert len(here.asked) == asked
    for number in range(3):
        here.runner.advance(FRESH_S)
        assert here.find(f"explorer {number}", STORED[:10]) == 10
        # Its time may have been all latency: one that is much larger finds out that it was not.
        assert here.find(f"large {number}", STORED) == 100
        assert here.find(f"larger {number}", range(150)) == 0
    assert here.read.break_even.explorations == 3
    assert len(here.asked) == asked + 6


def test_a_probe_that_times_out_does_not_make_the_tier_look_quick(world):
    here = world(probe_timeout_s=1.0)
    here.latency_s = 0.05
    here.find("first", STORED[:10])
    before_s = here.read.break_even.latency_s
    here.latency_s = 1.5
    assert here.find("stalled", STORED[:50]) == 0
    assert here.read.break_even.latency_s > before_s


def test_what_would_not_pay_is_told_apart_from_what_is_absent(world):
    here = world()
    here.latency_s = 0.1
    here.find("first", STORED[:20])
    here.find("small", STORED[:3])
    assert here.read.skipped_lookups["too_few"] == 3
    assert here.manager.stats().planner.misses["skipped"] == 3
    assert "3 not asked: too few are missed" in str(here.manager.explain("small"))
    assert here.read.misses == 0
    assert here.find("absent", range(1000, 1050)) == 0
    assert here.manager.stats().planner.misses["absent"] == 50


def samples(stats, name):
    (metric,) = [metric for metric in METRICS if metric.name == f"kvoffload_tier_{name}"]
    return [value for _, value in metric.read(stats)]


def test_what_was_measured_is_among_the_metrics(world):
    here = world()
    assert samples(here.manager.stats(), "needed_blocks") == [1]
    assert samples(here.manager.stats(), "load_latency_seconds") == []
    here.latency_s, here.block_s = 0.001, 0.02
    here.find("first", STORED[:2])
    here.find("second", STORED[:50])
    stats = here.manager.stats()
    assert samples(stats, "needed_blocks") == [float("inf")]
    assert samples(stats, "load_latency_seconds") == [pytest.approx(0.002)]
    assert samples(stats, "load_blocks_per_second") == [pytest.approx(50.0)]
    assert stats.tiers[0].break_even.explorations == 0
    assert json.dumps(asdict(stats.tiers[0].break_even), allow_nan=False)


def test_without_the_option_nothing_is_measured_and_everything_is_asked():
    here = World(PROBED)
    here.begin("r")
    assert here.lookup(1) is RETRY
    here.rest()
    assert here.lookup(1) is MISS
    stats = here.manager.stats()
    assert stats.tiers[0].break_even is None
    assert samples(stats, "needed_blocks") == []
    here.end()


@pytest.mark.parametrize(
    "value", [0, -1.0, True, "100", float("nan"), float("inf"), 10**400, [1.0]]
)
def test_a_rate_that_is_none_is_refused(value):
    wanted = r"prefill_blocks_per_s: .* must be a number above 0 and at most 1e\+12, or left out"
    with pytest.raises(ConfigError, match=wanted):
        SecondaryTierFactory.check_config({"type": "example", "prefill_blocks_per_s": value})


@pytest.mark.parametrize("value", [None, 1, 0.5, 1e12])
def test_a_rate_is_taken(value):
    SecondaryTierFactory.check_config({"type": "example", "prefill_blocks_per_s": value})
