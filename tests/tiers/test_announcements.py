"""What is said of blocks while jobs run: whose end is out of date, and what the tier is asked."""

import pytest
from tiers.actors import CONTAINS, PROBE_TIMEOUT_S

from kvoffload_async.abc.events import (
    AnnouncementRefused,
    BlocksAppeared,
    BlocksEvicted,
    JobFinished,
)
from kvoffload_async.errors import CorruptBlockError
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers._environment import Announcements
from kvoffload_async.types import OffloadKey

A, B, C = K = [key_of(number) for number in range(3)]


def test_what_is_said_during_a_call_outdates_it_and_what_was_said_before_does_not():
    announcements = Announcements()
    other = announcements.begin([C], includes_stores=False)
    announcements.note([A])
    watch = announcements.begin([A, B], includes_stores=False)
    announcements.note([B, C])
    assert announcements.end(watch) == {B}
    assert announcements.end(other) == {C}


def test_what_was_said_while_no_call_ran_is_forgotten():
    announcements = Announcements()
    announcements.note([A])
    watch = announcements.begin([A], includes_stores=True)
    assert announcements.end(watch) == frozenset()


def test_the_end_of_a_store_outdates_a_load_and_no_store():
    announcements = Announcements()
    announcements.note_stored([A])
    early = announcements.begin([A, B], includes_stores=True)
    announcements.note_stored([A])
    load = announcements.begin([A, B], includes_stores=True)
    store = announcements.begin([A, B], includes_stores=False)
    announcements.note_stored([B])
    assert announcements.end(load) == {B}
    assert announcements.end(store) == frozenset()
    assert announcements.end(early) == {A, B}


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_call_that_hangs_keeps_no_more_than_the_bound_and_misses_nothing(is_stored):
    announcements = Announcements(bound=10)
    watch = announcements.begin([A, B], includes_stores=True)
    note = announcements.note_stored if is_stored else announcements.note
    note([A])
    for number in range(3, 100):
        note([key_of(number)])
    assert len(announcements._announced) + announcements._stored_blocks <= 10
    late = announcements.begin([A, B], includes_stores=True)
    assert announcements.end(late) == frozenset()
    assert announcements.end(watch) == {A}


def test_who_does_not_look_is_told_nothing():
    announcements = Announcements()
    watch = announcements.begin([A], includes_stores=True)
    announcements.note([A])
    assert announcements.end(watch, looks=False) == frozenset()


# -- the tier is asked --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("has_it", "news"), [(True, BlocksAppeared((key_of(1),))), (False, BlocksEvicted((key_of(1),)))]
)
def test_a_tier_is_asked_what_it_has_of_what_was_evicted_while_it_was_stored(worlds, has_it, news):
    world = worlds()
    world.start(0, [1, 2])
    world.tier.env.blocks_evicted([key_of(1)])
    world.finish_job()
    assert world.events[1] == JobFinished(0, outdated=frozenset([key_of(1)]))
    (asked,) = world.tier.parked
    assert (asked.kind, asked.keys) == (CONTAINS, (key_of(1),))
    if not has_it:
        del world.tier.blocks[key_of(1)]
    world.finish_job()
    assert world.events[2:] == [news]


def test_a_tier_is_asked_for_what_a_load_found_corrupt_while_it_was_stored(worlds):
    world = worlds()
    world.start(0, [1, 2])
    store = world.tier.parked[0]
    world.tier.land(store, 0)
    world.start(1, [1], is_promotion=True)
    del world.tier.blocks[key_of(1)]
    world.finish_job(1, {0: CorruptBlockError("flipped")})
    world.finish_job()
    assert world.events[-1] == JobFinished(0, outdated=frozenset([key_of(1)]))
    assert [parked.kind for parked in world.tier.parked] == [CONTAINS]
    world.finish_job()
    assert world.events[-1] == BlocksEvicted((key_of(1),))


def test_what_is_said_while_a_tier_is_asked_is_later_than_its_answer(worlds):
    world = worlds()
    world.start(0, [1, 2])
    world.tier.env.blocks_evicted([key_of(1), key_of(2)])
    world.finish_job()
    world.tier.env.blocks_evicted([key_of(2)])
    del world.events[:]
    world.finish_job()
    assert world.events == [BlocksAppeared((key_of(1),))]


def test_a_tier_is_asked_one_question_at_a_time(worlds):
    world = worlds()
    for job_id in range(3):
        world.start(job_id, [job_id])
        world.tier.env.blocks_evicted([key_of(job_id)])
        world.finish_job(job_id > 0)
    (asked,) = world.tier.parked
    assert asked.keys == (key_of(0),)
    world.finish_job()
    (asked,) = world.tier.parked
    assert set(asked.keys) == {key_of(1), key_of(2)}


@pytest.mark.parametrize("outcome", [{"error": NotImplementedError("exclusive")}, None])
def test_a_tier_that_does_not_answer_leaves_what_it_said_last(worlds, caplog, outcome):
    world = worlds()
    world.start(0)
    world.tier.env.blocks_evicted([key_of(1)])
    world.finish_job()
    del world.events[:]
    if outcome is None:
        world.task("t:recheck").cancel()
        world.runner.run_ready()
    world.finish_job(**(outcome or {}))
    assert world.events == []
    assert "contains() failed" in caplog.text


def test_questions_that_pile_up_behind_a_hung_one_are_bounded(worlds, caplog):
    world = worlds()
    world.start(0, [0])
    world.tier.env.blocks_evicted([key_of(0)])
    world.finish_job()
    numbers = range(1, 16_400)
    world.actor._reconciler.ask([key_of(number) for number in numbers])
    assert "does not end" in caplog.text
    del world.events[:]
    world.finish_job()
    assert world.events == [BlocksAppeared((key_of(0),))]
    assert not world.tier.parked


def test_closing_waits_for_a_question_and_asks_no_other(worlds):
    world = worlds()
    for job_id in range(2):
        world.start(job_id, [job_id])
        world.tier.env.blocks_evicted([key_of(job_id)])
        world.finish_job(job_id)
    report = world.close(PROBE_TIMEOUT_S)
    assert "1 calls did not end" in str(report.error)
    world.finish_job()
    assert not world.tier.parked


def test_a_store_that_ends_while_its_tier_closes_raises_no_question(worlds):
    world = worlds()
    world.start(0, [1])
    world.tier.env.blocks_evicted([key_of(1)])
    world.runner.loop.call_later(0.5, lambda: world.tier.finish(world.tier.parked[0]))
    assert world.close(1.0).is_clean
    assert world.tier.close_count == 1


# -- what is no key -----------------------------------------------------------------------------


def test_what_is_no_key_is_refused_at_the_edge_once_logged_and_counted(worlds, caplog):
    world = worlds()
    short = OffloadKey(b"abcd")
    least = OffloadKey(b"abcde")
    world.tier.env.blocks_appeared([short, A, least])
    world.tier.env.blocks_evicted([short, "a text", None, ["a list"]])
    assert world.events == [
        AnnouncementRefused(1),
        BlocksAppeared((A, least)),
        AnnouncementRefused(4),
    ]
    assert caplog.text.count("the malformed key") == 1
