"""Samples of the statistics during a replay: bounded, evenly spread, and right at the end."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload_async.cli.settings import ReplayFlags, ScratchFolder, resolve
from kvoffload_async.replay.drivers import ReplayOptions
from kvoffload_async.replay.report import MAX_SAMPLES, Tally, Timeline
from kvoffload_async.replay.run import replay
from kvoffload_async.replay.source import ChatWorkload


@given(steps=st.integers(0, 300), half=st.integers(1, 9))
def test_samples_are_bounded_and_evenly_spread_over_the_steps(steps, half):
    now = [0]
    timeline = Timeline(lambda: None, Tally(), most=2 * half, clock=lambda: now[0])
    for now[0] in range(1, steps + 1):
        timeline.note_step()
    *samples, last = [sample.at_s for sample in timeline.finish()]
    assert last == steps
    assert len(samples) <= 2 * half
    assert samples[0] == 0
    distances = {later - earlier for earlier, later in itertools.pairwise(samples)}
    assert len(distances) <= 1
    distance = next(iter(distances), 1)
    assert steps - samples[-1] < max(distance, 2)
    assert len(samples) >= min(half, steps + 1)


def test_a_sample_does_not_change_with_what_comes_after_it():
    tally = Tally.of_tiers(["fs"], device_keeps=False)
    timeline = Timeline(lambda: None, tally)
    tally.hits["fs"] += 1
    first, last = timeline.finish()
    assert first.hits == {"primary": 0, "fs": 0}
    assert last.hits == {"primary": 0, "fs": 1}


@pytest.mark.parametrize("engine", ["sync", "async"])
def test_the_last_sample_agrees_with_the_report(engine):
    spec = resolve(ReplayFlags(primary_blocks=100, tiers=["example"]), ScratchFolder())
    report = replay(spec, ChatWorkload(150), ReplayOptions(engine=engine, has_samples=True))
    assert 20 < len(report.samples) <= MAX_SAMPLES + 1
    first, last = report.samples[0], report.samples[-1]
    assert first.block_refs == 0
    assert (last.block_refs, dict(last.hits)) == (report.block_refs, report.hits)
    assert last.stats.primary.evicted_blocks == report.evictions > 0
    (tier,) = last.stats.tiers
    assert tier.loaded_bytes == report.tiers["example"]["loaded_bytes"] > 0
    assert tier.load_seconds.total.count > 0
    times = [sample.at_s for sample in report.samples]
    assert times == sorted(times)


def test_without_being_asked_for_there_are_none_and_the_figures_never_have_them():
    spec = resolve(ReplayFlags(tiers=["example"]), ScratchFolder())
    bare = replay(spec, ChatWorkload(3), ReplayOptions())
    assert bare.samples == ()
    assert "samples" not in bare.to_dict()
