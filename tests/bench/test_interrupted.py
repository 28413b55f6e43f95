"""What a bench keeps that somebody has stopped, and how it is shown on a narrow terminal."""

import io

import pytest
from rich.console import Console

from kvoffload_async.bench.plan import Jobs, Plan, Work
from kvoffload_async.bench.rounds import Samples
from kvoffload_async.bench.run import run_bench
from kvoffload_async.cli.bench import print_tables

ROUNDS = 3
TURNS_A_ROUND = 2  # memcpy and the tier; memory has no baseline


def measured(num_turns, sizes="4KiB", tier="example"):
    """Return the report of a bench that is stopped after so many turns."""
    plan = Plan.parse(
        sizes,
        "128KiB",
        keys_per_job=4,
        one_job=8,
        in_flight=2,
        rounds=ROUNDS,
        threads=2,
        warm_up=False,
    )
    done = []
    return run_bench(
        plan,
        [{"type": tier}],
        advance=done.append,
        should_stop=lambda: len(done) >= num_turns,
    )


@pytest.mark.parametrize("num_turns", [0, 1, 3, ROUNDS * TURNS_A_ROUND])
def test_the_rounds_before_it_was_stopped_are_kept(num_turns):
    report = measured(num_turns)
    rounds = num_turns // TURNS_A_ROUND
    assert [size.rounds for size in report.sizes] == ([rounds] if rounds else [])
    assert report.interrupted is (rounds < ROUNDS)
    assert not report.complaints


def test_what_was_measured_in_a_round_that_did_not_end_is_forgotten():
    samples = Samples(Work(Jobs(1, 1, 4096), None), rounds=2)
    samples.passes["memcpy", "copy"] = [{"gib_per_s": float(number)} for number in range(3)]
    samples.forget_incomplete_round()
    assert samples.passes["memcpy", "copy"] == [{"gib_per_s": 0.0}, {"gib_per_s": 1.0}]


def test_block_sizes_that_were_not_begun_are_left_out():
    report = measured(ROUNDS * TURNS_A_ROUND + TURNS_A_ROUND, "4KiB,8KiB,16KiB")
    assert [(size.block_bytes, size.rounds) for size in report.sizes] == [(4096, 3), (8192, 1)]
    assert report.interrupted


@pytest.mark.parametrize("width", [80, 176])
@pytest.mark.parametrize("tier", ["example", "slab"])
def test_every_figure_is_shown_whole_on_a_terminal(width, tier):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    print_tables(measured(ROUNDS * 4, tier=tier), console)
    shown = console.file.getvalue()
    assert "GiB/s" in shown
    assert ("switches\n" in shown.replace(" ", "")) == (width == 176)
    assert ("base, plain" in shown) == (tier == "slab")
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= width
