"""Random programs find nothing; and the fuzzer finds faults that are planted."""

import functools

import pytest
from fuzz.driver import Program, search

from kvoffload_async import (
    OffloadEngine,
    SecondaryTierManager,
    SlabTierManager,
    TieringOffloadingManager,
)


@pytest.mark.parametrize(
    "world", ["scheduler", "standalone", pytest.param("serving", marks=pytest.mark.slow)]
)
def test_a_few_random_programs_break_no_law(world):
    counts, failed = search(seed=1, programs=1, worlds=(world,))
    assert counts == {world: 1}
    assert failed == []


@pytest.mark.slow
def test_more_random_programs_break_no_law():
    assert search(seed=1000, programs=50)[1] == []


def drops_results(call, self):
    return [result for result in call(self) if result.job_id % 5]


def compares_no_checksums(call, self, *arguments, **options):
    return call(self, *arguments, **{**options, "verify": "off"})


def keeps_a_pin(call, self, keys, *arguments):
    return call(self, keys[1:], *arguments)


def lets_errors_escape(call, self):
    return call(self) or bool({tier.has_pending_work() for tier in self.secondary_tiers})


def serves_blocks_that_are_written(call, self, keys, ctx):
    granted = call(self, keys, ctx)
    if granted is not None and len(granted.keys_to_store) > 2:
        self.complete_store(granted.keys_to_store, ctx)
    return granted


async def keeps_no_deadline(call, self, request, timeout_s=10.0):
    return await call(self, request, timeout_s + 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "fault", "world", "symptom", "seed"),
    [
        ((SecondaryTierManager, "get_finished_jobs"), drops_results, "standalone", "job", 1),
        # Rarely does a program damage a block and load it again: the search begins near one.
        ((SlabTierManager, "__init__"), compares_no_checksums, "standalone", "wrong bytes", 170),
        ((TieringOffloadingManager, "complete_load"), keeps_a_pin, "scheduler", "not at rest", 1),
        ((TieringOffloadingManager, "has_pending_work"), lets_errors_escape, "scheduler", "", 1),
        (
            (TieringOffloadingManager, "prepare_store"),
            serves_blocks_that_are_written,
            "scheduler",
            "slot",
            5,
        ),
        ((OffloadEngine, "lookup"), keeps_no_deadline, "serving", "after its deadline", 1),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_fault_is_found(monkeypatch, target, fault, *, world, symptom, seed):
    call = getattr(*target)
    planted = functools.wraps(call)(lambda *a, **k: fault(call, *a, **k))
    monkeypatch.setattr(*target, planted)
    _, ((program, error),) = search(seed, programs=300, worlds=(world,), most_failures=1)
    assert symptom in str(error)
    assert len(program.steps) <= 20


def test_a_program_does_the_same_every_time():
    program, logs = Program.drawn(3, ("scheduler",)), ([], [])
    for log in logs:
        assert program.failure(log.append) is None
    assert logs[0] == logs[1]
