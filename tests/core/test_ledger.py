import ast
import inspect
import itertools
import re
from pathlib import Path

import pytest
from core.terms import job, ks, released, results

import kvoffload_async
from kvoffload_async.abc.events import JobFinished, JobOverdue
from kvoffload_async.core import ledger as module
from kvoffload_async.core.ledger import (
    JobAbandoned,
    JobEvent,
    JobState,
    Launched,
    Ledger,
)
from kvoffload_async.errors import (
    BlockMissingError,
    IllegalTransitionError,
    StateError,
    TierClosedError,
    TierTimeoutError,
)

EVENTS = {
    "Launched": Launched(0),
    "JobFinished": JobFinished(0),
    "JobOverdue": JobOverdue(0, TierTimeoutError("late")),
    "JobAbandoned": JobAbandoned(0, TierClosedError("shutdown")),
}
PATHS = {
    JobState.QUEUED: (),
    JobState.FLYING: ("Launched",),
    JobState.ORPHANED: ("Launched", "JobOverdue"),
    JobState.FINISHED: ("Launched", "JobFinished"),
}
PAIRS = list(itertools.product(JobState, EVENTS))


def ignore(*_arguments):
    """Do nothing."""


def new_ledger(on_result=ignore, on_release=ignore):
    return Ledger(10, on_result, on_release)


def ledger_in(state, **options):
    ledger = new_ledger()
    ledger.accept(job(0, "abc", **options))
    for name in PATHS[state]:
        ledger.handle(EVENTS[name])
    assert ledger.state_of(0) is state
    return ledger


def test_jobs_are_queued_until_they_are_launched_or_given_up():
    ledger = new_ledger()
    for number in range(4):
        ledger.accept(job(number, "abc"))
    assert ledger.queued_count == 4
    ledger.handle(Launched(0))
    assert ledger.queued_count == 3
    ledger.handle(JobAbandoned(1, TierClosedError("shutdown")))
    assert ledger.queued_count == 2
    ledger.handle(JobFinished(0))
    assert ledger.queued_count == 2


def test_the_table_is_total_over_states_and_events():
    assert set(Ledger.TRANSITIONS) == set(itertools.product(JobState, JobEvent.__args__))
    assert {type(event) for event in EVENTS.values()} == set(JobEvent.__args__)


@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_every_event_has_its_effect_or_is_illegal_and_changes_nothing(state, event):
    ledger = ledger_in(state)
    ledger_results = len(results(ledger))
    if state is JobState.FINISHED:
        ledger = ledger_in(state)  # taking the result ended the job
    if Ledger.TRANSITIONS[state, type(EVENTS[event])] is None:
        with pytest.raises(IllegalTransitionError, match=state.name):
            ledger.handle(EVENTS[event])
        assert ledger.state_of(0) is state
    else:
        assert ledger.handle(EVENTS[event]).job_id == 0
        assert ledger_results + len(results(ledger)) <= 2


def test_the_diagram_in_the_docstring_shows_the_table():
    """An arrow for every change of state, and no arrow for anything else."""
    arrow = r"(?<!\w)(?=(\w+) --([\w| ]+)--> \(?(\w+)\)?)"
    drawn = {
        (source, event, target)
        for source, events, target in re.findall(arrow, module.__doc__)
        for event in events.split(" | ")
        if event != "taken"
    }
    tabled = set()
    for state, event in PAIRS:
        if Ledger.TRANSITIONS[state, type(EVENTS[event])] is None:
            continue
        ledger = ledger_in(state)
        ledger.handle(EVENTS[event])
        after = ledger.state_of(0)
        if after is not state:
            tabled.add((state.name, event, after.name if after else "released"))
    assert drawn == tabled


def test_every_handler_is_in_the_table():
    used = {handler.__name__ for handler in Ledger.TRANSITIONS.values() if handler}
    private = {name for name, _ in inspect.getmembers(Ledger, inspect.isfunction)}
    assert used == {name for name in private if name.startswith("_") and "__" not in name}


def test_a_finished_job_has_one_result_and_is_gone_when_it_is_taken():
    ledger = ledger_in(JobState.FINISHED)
    assert ledger.ended
    (result,) = results(ledger)
    assert (result.success, result.transfer_bytes, result.error) == (True, 30, None)
    assert ledger.state_of(0) is None
    assert results(ledger) == []
    with pytest.raises(IllegalTransitionError, match="unknown"):
        ledger.handle(JobFinished(0))


def test_a_partly_failed_promotion_names_what_landed_50321():
    """50321: one bad block discarded the whole batch."""
    ledger = ledger_in(JobState.FLYING, promotion=True)
    missing = BlockMissingError("c")
    ledger.handle(JobFinished(0, {2: missing}, seconds=1.5))
    (result,) = results(ledger)
    assert not result.success
    assert result.successful_keys == frozenset(ks("ab"))
    assert (result.error, result.transfer_bytes, result.transfer_time) == (missing, 20, 1.5)


def test_a_partly_failed_cascade_names_what_landed():
    ledger = ledger_in(JobState.FLYING)
    ledger.handle(JobFinished(0, {0: BlockMissingError("a")}))
    (result,) = results(ledger)
    assert (result.success, result.successful_keys) == (False, frozenset(ks("bc")))


def test_the_error_is_that_of_the_first_failed_block():
    ledger = ledger_in(JobState.FLYING)
    errors = {2: BlockMissingError("c"), 1: BlockMissingError("b")}
    ledger.handle(JobFinished(0, errors))
    assert results(ledger)[0].error is errors[1]


def test_a_job_that_failed_as_a_whole_moved_nothing():
    ledger = ledger_in(JobState.FLYING, promotion=True)
    ledger.handle(JobFinished(0, job_error=TierTimeoutError("late")))
    (result,) = results(ledger)
    assert (result.success, result.successful_keys, result.transfer_bytes) == (
        False,
        frozenset(),
        0,
    )


def test_an_overdue_job_is_reported_at_once_and_released_when_its_copy_ends():
    ledger = ledger_in(JobState.ORPHANED)
    (result,) = results(ledger)
    assert (result.success, result.orphaned) == (False, True)
    assert ledger.unfinished_count == 0
    assert ledger.ids_in(JobState.ORPHANED) == [0]
    assert released(ledger) == []
    ledger.handle(JobFinished(0))
    assert released(ledger) == [0]
    assert results(ledger) == []
    assert ledger.state_of(0) is None


def test_a_queued_job_at_shutdown_gets_a_failed_result():
    """The pool's shutdown dropped queued tasks without results."""
    ledger = ledger_in(JobState.QUEUED)
    assert ledger.unfinished_count == 1
    ledger.handle(EVENTS["JobAbandoned"])
    (result,) = results(ledger)
    assert (result.success, result.orphaned) == (False, False)
    assert ledger.state_of(0) is None


def test_an_empty_job_ends_like_any_other():
    """A job without blocks never completed."""
    ledger = new_ledger()
    ledger.accept(job(0, ""))
    ledger.handle(Launched(0))
    ledger.handle(JobFinished(0))
    assert [(r.success, r.transfer_bytes) for r in results(ledger)] == [(True, 0)]


def test_a_job_id_in_use_is_answered_with_a_failure_and_the_first_job_goes_on():
    ledger = ledger_in(JobState.FLYING)
    assert not ledger.accept(job(0, "x"))
    (refusal,) = results(ledger)
    assert isinstance(refusal.error, StateError)
    assert ledger.state_of(0) is JobState.FLYING
    ledger.handle(JobFinished(0))
    assert [r.success for r in results(ledger)] == [True]


def test_a_job_whose_tier_went_away_counts_as_still_running():
    ledger = new_ledger()
    ledger.accept(job(3))
    ledger.handle(Launched(3))
    ledger.handle(JobAbandoned(3, TierClosedError("gone")))
    (result,) = results(ledger)
    assert (result.job_id, result.success, result.orphaned) == (3, False, True)


def test_a_job_is_unreported_until_its_result_is_taken_and_orphaned_until_its_release_is():
    ledger = ledger_in(JobState.ORPHANED)
    assert [job.job_id for job in ledger.unreported()] == [0]
    assert list(ledger.orphaned()) == []
    results(ledger)
    assert list(ledger.unreported()) == []
    assert [record.job.job_id for record in ledger.orphaned()] == [0]
    ledger.handle(JobFinished(0))
    assert [record.job.job_id for record in ledger.orphaned()] == [0]
    assert released(ledger) == [0]
    assert list(ledger.orphaned()) == []


def test_nobody_else_makes_a_result_but_external_managers():
    package = Path(kvoffload_async.__file__).parent
    makers = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "JobResult"
    }
    # From what vLLM's tiers report to the link, the ledger makes the result, as for every manager.
    assert makers == {"core/ledger.py", "integrations/vllm/convert.py"}


def test_each_result_and_each_release_is_reported_when_it_comes_about():
    told = []
    ledger = new_ledger(
        lambda job, result: told.append((job.job_id, result.success, result.orphaned)),
        lambda job: told.append(job.job_id),
    )
    for number in range(3):
        ledger.accept(job(number, "abc"))
        ledger.handle(Launched(number))
    ledger.handle(JobFinished(0))
    ledger.handle(JobOverdue(1, TierTimeoutError("late")))
    ledger.handle(JobAbandoned(1, TierClosedError("shutdown")))
    assert told == [(0, True, False), (1, False, True)]
    ledger.handle(JobFinished(1))
    ledger.accept(job(2, "abc"))
    assert told[2:] == [1, (2, False, False)]
    assert [result.job_id for result in results(ledger)] == [0, 1, 2]
    assert released(ledger) == [1]
