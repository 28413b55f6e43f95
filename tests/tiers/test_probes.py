"""Probes of a tier that hangs or fails: bounded, cancelled, and told of as faults."""

import asyncio

import pytest
from tiers.actors import PROBE_TIMEOUT_S

from kvoffload_async.abc.events import JobFinished
from kvoffload_async.errors import (
    JobCancelledError,
    TierClosedError,
    TierTimeoutError,
    TierUnavailableError,
)
from kvoffload_async.testing.harness import key_of


def errors(world):
    return [type(event.error) for event in world.events]


def probes(world):
    return [t for t in asyncio.all_tasks(world.runner.loop) if ":probe:" in t.get_name()]


def test_a_probe_is_cancelled_at_its_deadline_and_told_of_as_a_fault(worlds, caplog):
    world = worlds()
    ended = []

    async def contains(keys):
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append(keys)

    world.tier.contains = contains
    world.probe(5)
    world.runner.advance(PROBE_TIMEOUT_S)
    assert errors(world) == [TierTimeoutError]
    assert ended == [[key_of(1)]]
    assert not probes(world)
    assert caplog.text.count("probe 5") == 1


def test_hung_probes_count_against_the_bound_until_they_end(worlds):
    """60 hung probes left 60 tasks, and each request waited for a deadline of its own."""
    world = worlds(concurrent_probes=2)
    for generation in range(60):
        world.probe(generation)
        world.runner.advance(PROBE_TIMEOUT_S)
    assert len(probes(world)) == 2
    assert errors(world) == [TierTimeoutError] * 60
    assert "2 probes hang" in str(world.events[-1].error)
    world.finish_job()
    world.probe(60)
    world.finish_job(1)
    assert errors(world)[60:] == [type(None)]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(5, "io"), TierUnavailableError),
        (SystemExit(1), TierUnavailableError),
        (KeyboardInterrupt(), TierUnavailableError),
        (asyncio.CancelledError(), JobCancelledError),
    ],
)
def test_a_probe_that_fails_tells_why(worlds, error, expected):
    world = worlds()
    world.probe(5)
    world.finish_job(0, error=error)
    assert errors(world) == [expected]


def test_an_answer_that_cannot_be_read_is_a_fault(worlds):
    world = worlds()

    async def contains(keys):
        return [keys]  # a list cannot be hashed

    world.tier.contains = contains
    world.probe(5)
    assert errors(world) == [TierUnavailableError]


def test_a_probe_after_the_shutdown_is_no_fault(worlds):
    world = worlds()
    world.close()
    world.probe(5)
    assert errors(world) == [TierClosedError]


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("drawn")


class Unreadable:
    def __getattr__(self, name):
        raise Unspeakable


def test_a_tier_whose_bounds_cannot_be_read_fails_its_jobs_and_probes(worlds):
    world = worlds()
    world.tier.bounds = Unreadable()
    world.start(0)
    world.probe(5)
    finished, answered = world.events
    assert isinstance(finished.job_error, TierUnavailableError)
    assert isinstance(answered.error, TierUnavailableError)


def test_a_job_that_cannot_be_started_is_finished_once(worlds):
    world = worlds()
    bounds = world.tier.bounds

    class HalfReadable:
        queued_jobs = bounds.queued_jobs

    world.tier.bounds = HalfReadable()
    world.start(0)
    world.tier.bounds = bounds
    world.start(1)
    world.finish_job()
    assert [e.job_id for e in world.events if isinstance(e, JobFinished)] == [0, 1]


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit()])
def test_a_touch_that_wants_to_end_the_loop_is_only_logged(worlds, error, caplog):
    world = worlds()

    def touch(keys):
        raise error

    world.tier.touch = touch
    world.runner.call_soon(world.actor.touch, [key_of(1)])
    world.runner.run_ready()
    world.start(0)
    world.finish_job()
    assert world.finished()[0].job_error is None
    assert "touch failed" in caplog.text


def test_a_probe_with_chains_asks_for_their_longest_heads(worlds):
    world = worlds()
    asked = []

    async def longest_prefixes(chains):
        asked.append(chains)
        return [2, 0]

    world.tier.longest_prefixes = longest_prefixes
    chains = ((key_of(1), key_of(2), key_of(3)), (key_of(4),))
    keys = [key for chain in chains for key in chain]
    world.runner.call_soon(world.actor.probes.start, 1, keys, chains)
    world.runner.run_ready()
    assert asked == [chains]
    assert [event.present for event in world.events] == [{key_of(1), key_of(2)}]


def test_an_answer_for_other_chains_than_were_asked_for_is_a_fault(worlds):
    world = worlds()

    async def longest_prefixes(chains):
        return [1]

    world.tier.longest_prefixes = longest_prefixes
    world.runner.call_soon(world.actor.probes.start, 1, [], ((key_of(1),), (key_of(2),)))
    world.runner.run_ready()
    assert errors(world) == [TierUnavailableError]


def test_a_tier_finds_the_longest_heads_by_what_it_contains(worlds):
    world = worlds()

    async def contains(keys):
        return frozenset(key_of(number) for number in (1, 2, 4, 5)).intersection(keys)

    world.tier.contains = contains
    chains = [[key_of(1), key_of(2), key_of(3), key_of(4)], [key_of(4), key_of(5)], []]
    assert world.runner.run(world.tier.longest_prefixes(chains), 1.0) == [2, 2, 0]


def test_an_answer_says_how_long_the_tier_took_for_it(worlds):
    world = worlds()
    world.probe(1)
    world.runner.advance(0.25)
    world.finish_job()
    world.probe(2)
    world.runner.advance(PROBE_TIMEOUT_S)
    assert [event.seconds for event in world.events] == [0.25, PROBE_TIMEOUT_S]
