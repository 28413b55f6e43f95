"""`explain` of a manager, and who else is told of timelines."""

import pytest
from facade.worlds import EXCLUSIVE, World, filled

from kvoffload_async.config import OffloadConfig
from kvoffload_async.core.planner import Planner
from kvoffload_async.errors import BlockMissingError, ConfigError, StateError
from kvoffload_async.timeline import JobEnded, JobStarted, Note


@pytest.fixture
def world():
    here = World(EXCLUSIVE, explain_requests=3)
    here.begin("r")
    yield here
    here.end()


def test_where_nothing_is_recorded_the_planner_is_the_plain_one_and_it_says_what_to_set():
    world = World(EXCLUSIVE)
    try:
        assert type(world.manager.planner) is Planner
        for ask in (lambda: world.manager.explain("r"), world.manager.timelines):
            with pytest.raises(StateError, match="set explain_requests"):
                ask()
        with pytest.raises(StateError, match="set explain_requests"):
            world.manager.watch_timelines(print)
    finally:
        world.end()


def test_a_promotion_is_explained_with_the_time_that_the_tier_took(world):
    filled(world, 1, 2)
    world.lookup(1)
    world.lookup(2)
    world.rest()
    timeline = world.manager.explain("r")
    ends = [event for event in timeline.events if isinstance(event, JobEnded)]
    assert [(end.job.tier, end.job.direction, end.landed_blocks) for end in ends][-1] == (
        "tier0",
        "load",
        2,
    )
    assert ends[-1].seconds is not None
    assert ends[-1].queue_s is not None
    assert ends[-1].num_bytes == ends[-1].job.num_bytes > 0
    assert world.manager.explain("another") is None


def test_a_job_that_fails_is_explained_with_its_error(world):
    world.store(1)
    world.step()
    world.finish_job(error=BlockMissingError("the disk is gone"))
    world.poll()
    errors = [
        event.error for event in world.manager.explain("r").events if isinstance(event, JobEnded)
    ]
    assert errors[0] == "the disk is gone"


def test_things_happen_when_the_clock_says_so_and_not_when_their_step_began(world):
    world.lookup(1)
    world.manager.planner.recorder.advance(99.0)
    world.store(2)
    notes = [event for event in world.manager.explain("r").events if isinstance(event, Note)]
    assert {note.at_s for note in notes} == {99.0}


def test_timelines_are_handed_over_at_the_end_of_the_step_in_which_they_are_complete(world):
    told = []
    world.manager.watch_timelines(told.append)
    world.store(1)
    world.step()
    world.finish("r")
    world.step()
    assert told == []
    world.finish_all()
    world.step()
    world.step()
    assert [timeline.req_id for timeline in told] == ["r"]
    assert [type(event) for event in told[0].events[-2:]] == [JobStarted, JobEnded]
    assert world.manager.timelines() == tuple(told)


def test_the_shutdown_hands_over_what_is_in_flight():
    world = World(EXCLUSIVE, explain_requests=3)
    told = []
    world.manager.watch_timelines(told.append)
    world.begin("live")
    world.end()
    assert [(timeline.req_id, timeline.ended_s) for timeline in told] == [("live", None)]


def test_a_listener_that_raises_is_logged_once_and_called_no_more(world, caplog):
    told = []

    def broken(timeline):
        told.append(timeline.req_id)
        raise ValueError("defect")

    others = []
    world.manager.watch_timelines(broken)
    world.manager.watch_timelines(others.append)
    for req_id in ("a", "b"):
        world.begin(req_id)
        world.finish(req_id)
        world.step()
    assert told == ["a"]
    assert len(others) == 2
    (record,) = [r for r in caplog.records if "listener" in r.getMessage()]
    assert "request a" in record.getMessage()


@pytest.mark.parametrize("value", [-1, "many", 100_001, True])
def test_an_impossible_number_of_requests_is_refused(value):
    with pytest.raises(ConfigError, match="explain_requests"):
        OffloadConfig.parse({"cpu_bytes_to_use": 1, "block_bytes": 1, "explain_requests": value})
