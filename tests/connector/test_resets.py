"""Resets in mid-flight: the fence, its stale completions, and the requests that go on."""

import pytest
from connector.worlds import MISS, Desk, Recorder, Request, Scripted, blocks_of, keys, only
from facade.worlds import EXCLUSIVE, World

from kvoffload_async.core.invariants import check_state
from kvoffload_async.facade.connector.protocol import KVGroup
from kvoffload_async.facade.primary import CPUPrimaryTierOffloadingManager


def storing(**options):
    """A request that runs, with its store in flight, over a manager that counts its fences."""
    desk = Desk(manager=Scripted(8), options=options)
    request = Request("r", "ab")
    job_id, _ = only(desk.prefill(request, [1, 2, 3]).store_jobs)
    return desk, request, job_id


def test_a_reset_without_copies_in_flight_lifts_the_fence_at_once():
    desk, _, job_id = storing()
    desk.report(job_id)
    desk.connector.reset_cache()
    assert desk.manager.reset_flushes == 1
    assert not list(desk.primary.resident())


def test_the_fence_is_lifted_once_when_every_worker_has_reported_every_job():
    desk, _, first = storing(num_workers=2)
    other = Request("other", "xy")
    second, _ = only(desk.prefill(other, [11, 12, 13]).store_jobs)
    desk.connector.reset_cache()
    desk.report(first, second, count=1)
    desk.report(first, count=1)
    assert desk.manager.reset_flushes == 0
    desk.report(second, count=1)
    desk.report(first, second, count=1)
    assert desk.manager.reset_flushes == 1


def test_what_workers_reported_before_the_reset_counts():
    desk, _, job_id = storing(num_workers=2)
    desk.report(job_id, count=1)
    desk.connector.reset_cache()
    desk.report(job_id, count=1)
    assert desk.manager.reset_flushes == 1


def test_a_second_reset_waits_for_the_first_ones_copies():
    desk, _, job_id = storing()
    desk.connector.reset_cache()
    desk.connector.reset_cache()
    assert desk.manager.reset_flushes == 0
    desk.report(job_id)
    assert desk.manager.reset_flushes == 1


def test_jobs_in_flight_at_a_reset_are_flushed_with_the_next_step():
    desk, request, job_id = storing()
    desk.connector.reset_cache()
    assert desk.step({request: 1}).jobs_to_flush == {job_id}
    assert desk.step({request: 1}).jobs_to_flush == frozenset()


@pytest.mark.parametrize("fails", [False, True])
def test_a_completion_from_before_a_reset_changes_nothing_of_what_came_after(fails):
    recorder = Recorder(CPUPrimaryTierOffloadingManager(8))
    desk = Desk(manager=recorder)
    request = Request("r", "ab")
    job_id, _ = only(desk.prefill(request, [1, 2, 3]).store_jobs)
    desk.connector.reset_cache()
    del recorder.calls[:]
    desk.report(job_id, failed=[job_id] if fails else [])
    assert recorder.calls == ["on_reset_flushed"]


def test_survivors_store_again_from_the_start_once_the_fence_is_lifted():
    desk, request, job_id = storing()  # 41956, 48102
    desk.connector.reset_cache()
    assert not desk.step({request: 1}).store_jobs, "an old copy may still touch the slots"
    desk.report(job_id)
    again, job = only(desk.step({request: 1}).store_jobs)
    assert blocks_of(job) == [1, 2]
    desk.report(again)
    assert {k for k, _, refs in desk.primary.resident() if refs == 0} == set(keys("ab"))


def test_a_survivor_stores_of_its_window_only_what_the_window_still_reaches():
    window = (KVGroup(4, sliding_window_tokens=8),)
    desk = Desk(groups=window)
    request = Request("r", "abcd")
    desk.report(*desk.prefill(request, [1, 2, 3, 4, 5]).store_jobs)
    other = Request("other", "xy")
    desk.report(*desk.prefill(other, [1, 8, 9]).store_jobs)  # 1 slid out after it was stored
    desk.connector.reset_cache()
    _, job = only(desk.step({request: 1}).store_jobs)
    assert blocks_of(job) == [3, 4]


def test_a_survivor_that_was_preempted_is_not_stuck():
    desk, request, _ = storing()
    desk.connector.reset_cache()
    desk.step(preempted=["r"])
    assert desk.ask(request) == (0, False)


def test_a_survivor_whose_load_was_in_flight_proceeds():
    desk = Desk(manager=Scripted(8))
    desk.store("abcd", [1, 2, 3, 4])
    request = Request("r", "abcd")
    _, job_id, _ = desk.load(request, [5, 6, 7, 8, 9])
    desk.connector.reset_cache()
    assert desk.step().jobs_to_flush == {job_id}
    desk.report(job_id)
    assert desk.manager.reset_flushes == 1
    assert desk.connector.take_invalid_blocks() == set()
    request.num_computed_tokens = 16
    _, job = only(desk.step({request: 1}).store_jobs)
    assert blocks_of(job) == [5, 6, 7, 8]


def test_a_load_from_before_a_reset_that_fails_still_reports_its_blocks():
    desk = Desk(manager=Scripted(8))
    desk.store("abcd", [1, 2, 3, 4])
    _, job_id, _ = desk.load(Request("r", "abcd"), [5, 6, 7, 8, 9])
    desk.connector.reset_cache()
    desk.report(job_id, failed=[job_id])
    assert desk.connector.take_invalid_blocks() == {5, 6, 7, 8}


@pytest.mark.parametrize("ends_first", [True, False])
def test_blocks_that_a_load_from_before_a_reset_did_not_fill_are_not_stored(ends_first):
    desk = Desk(manager=Scripted(8))
    desk.store("abcd", [1, 2, 3, 4])
    request = Request("r", "abcd")
    request.num_computed_tokens, job_id, _ = desk.load(request, [5, 6, 7, 8, 9])
    desk.connector.reset_cache()
    if ends_first:
        desk.end(request)
    desk.report(job_id, failed=[job_id])
    if not ends_first:
        desk.end(request)
    assert not desk.step().store_jobs


def test_requests_that_have_ended_are_signalled_before_the_manager_is_emptied():
    recorder = Recorder(CPUPrimaryTierOffloadingManager(8))
    desk = Desk(manager=recorder)
    request = Request("r", "ab")
    desk.prefill(request, [1, 2, 3])
    desk.end(request)
    del recorder.calls[:]
    desk.connector.reset_cache()
    assert recorder.calls == ["on_request_finished", "reset_cache"]
    assert not desk.table
    desk.step()
    assert recorder.calls[2:] == ["on_schedule_end"], "and not a second time"


def test_a_request_signalled_earlier_is_forgotten_with_its_jobs():
    desk, request, job_id = storing()
    desk.end(request)
    desk.step()
    assert "r" in desk.table
    desk.connector.reset_cache()
    assert not desk.table
    desk.report(job_id)
    assert desk.manager.reset_flushes == 1


def test_an_id_that_ended_with_a_reset_may_begin_again_in_the_same_step():
    desk, request, job_id = storing()
    desk.end(request)
    desk.connector.reset_cache()
    newcomer = Request("r", "ab")
    assert desk.ask(newcomer) == (0, False)
    desk.allocate(newcomer, [4, 5, 6])
    desk.step({newcomer: 9})
    assert desk.table["r"].request is newcomer
    desk.report(job_id)
    assert desk.step({newcomer: 1}).store_jobs


def test_steps_are_needed_until_the_fence_is_lifted():
    desk, request, job_id = storing()
    desk.end(request)
    desk.connector.reset_cache()
    desk.step()
    assert desk.connector.has_pending_push_work()
    desk.report(job_id)
    assert not desk.connector.has_pending_push_work()


def test_nothing_is_promoted_into_a_slot_that_a_late_copy_still_touches():
    world = World(EXCLUSIVE, num_slots=4)
    try:
        desk = Desk(manager=world.manager)
        desk.store("ab", [1, 2])
        world.rest()
        late = Request("late", "xy")
        job_id, _ = only(desk.prefill(late, [3, 4, 5]).store_jobs)
        desk.connector.reset_cache()
        request = Request("r", "ab")
        assert desk.ask(request) == (0, False), "the tier has it, but its slot is not safe"
        assert world.counts["free"] == 4
        desk.step({late: 1})
        desk.report(job_id)
        assert desk.ask(request) == (None, False)
        desk.step()
        world.rest()
        assert desk.ask(request) == (8, True)
        check_state(world.manager.planner)
        world.manager.reset_cache()
    finally:
        world.end()


def test_a_reset_between_an_offer_and_its_step_is_survived_by_the_waiting():
    desk, _, job_id = storing()
    waiting = Request("w", "ab")
    assert desk.ask(waiting) == (None, False)
    desk.connector.reset_cache()
    desk.report(job_id)
    assert desk.ask(waiting) == (0, False)
    assert desk.manager.lookup(keys("a")[0], None) is MISS
