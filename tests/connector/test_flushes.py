"""What must have ended before a step overwrites device blocks, and the order of a step's calls."""

from connector.worlds import Desk, Recorder, Request, Scripted, blocks_of, keys, only

from kvoffload_async.facade.connector.protocol import KVGroup
from kvoffload_async.facade.primary import CPUPrimaryTierOffloadingManager


def running(desk, req_id="r", text="ab", blocks=(1, 2, 3)):
    """A request that runs, and its store, which is in flight."""
    request = Request(req_id, text)
    job_id, _ = only(desk.prefill(request, list(blocks)).store_jobs)
    return request, job_id


# -- preemption ---------------------------------------------------------------------------------


def test_the_stores_of_a_preempted_request_are_flushed():
    desk = Desk()  # 29870
    _, job_id = running(desk)
    assert desk.step(preempted=["r"]).jobs_to_flush == {job_id}


def test_other_requests_stores_are_not():
    desk = Desk()
    running(desk)
    running(desk, "other", "xy", [11, 12, 13])
    assert desk.step(preempted=["other"]).jobs_to_flush == {1}


def test_a_request_preempted_and_readmitted_in_one_step_keeps_its_new_load():
    desk = Desk()
    desk.store("abcd", [1, 2, 3, 4])
    request = Request("r", "abcd")
    assert desk.ask(request) == (16, True)
    desk.allocate(request, [5, 6, 7, 8, 9], load=16)
    meta = desk.step(preempted=["r"])
    job_id, _ = only(meta.load_jobs)
    assert job_id not in meta.jobs_to_flush
    assert desk.table["r"].groups[0].block_ids == [5, 6, 7, 8, 9]


def test_a_load_of_an_earlier_step_is_flushed_with_its_request():
    desk = Desk()
    desk.store("abcd", [1, 2, 3, 4])
    _, job_id, _ = desk.load(Request("r", "abcd"), [5, 6, 7, 8, 9])
    assert desk.step(preempted=["r"]).jobs_to_flush == {job_id}


def test_a_readmitted_request_waits_until_its_flushed_stores_are_reported():
    desk = Desk()  # 46014
    request, job_id = running(desk)
    desk.step(preempted=["r"])
    assert desk.ask(request) == (None, False)
    desk.report(job_id)
    assert desk.ask(request) == (8, True)
    desk.allocate(request, [4, 5, 6], load=8)
    assert blocks_of(only(desk.step().load_jobs)[1]) == [4, 5]


def test_a_readmitted_request_waits_even_if_what_it_could_load_is_there():
    desk = Desk(options={"max_load_tokens": 4})
    request = Request("r", "ab")
    desk.ask(request)
    desk.allocate(request, [1, 2, 3])
    desk.report(*desk.step({request: 4}).store_jobs)
    (second,) = desk.step({request: 4}).store_jobs
    desk.step(preempted=["r"])
    assert desk.ask(request) == (None, False)
    desk.report(second)
    assert desk.ask(request) == (4, True)


# -- the fence of blocks that were allocated again ----------------------------------------------


def test_a_store_is_flushed_when_a_block_that_it_reads_is_allocated_again():
    desk = Desk()
    _, job_id = running(desk)
    other = Request("other", "xy")
    desk.ask(other)
    desk.allocate(other, [2, 8, 9])  # 46951: although nothing is loaded into it
    assert desk.step({other: 9}).jobs_to_flush == {job_id}


def test_blocks_appended_or_placed_in_the_step_count_as_allocated():
    desk = Desk()
    _, first = running(desk)
    _, second = running(desk, "s", "xy", [11, 12, 13])
    third, _ = running(desk, "t", "pq", [21, 22, 23])
    meta = desk.step({third: 1}, new={"t": [[1]]}, tables={"fourth": [[12, 99]]})
    assert meta.jobs_to_flush == {first, second}


def test_blocks_that_the_device_had_computed_are_read_and_not_overwritten():
    desk = Desk()
    running(desk)
    sharer = Request("sharer", "ab")
    desk.ask(sharer, 8)
    desk.allocate(sharer, [1, 2, 9])
    meta = desk.step({sharer: 1}, tables={"sharer": [[1, 2, 9]]})
    assert meta.jobs_to_flush == frozenset()


def test_a_jobs_blocks_are_watched_until_all_workers_have_ended_it_and_not_longer():
    desk = Desk(options={"num_workers": 2})
    request, job_id = running(desk)
    other = Request("other", "xy")
    desk.report(job_id, count=1)
    desk.ask(other)
    desk.allocate(other, [1, 8, 9])
    assert desk.step({request: 1}).jobs_to_flush == {job_id}
    desk.report(job_id, count=1)
    desk.allocate(other, [1, 8, 9])
    assert desk.step({request: 1}).jobs_to_flush == frozenset()


def test_two_jobs_may_watch_one_block():
    desk = Desk()
    request, first = running(desk)
    desk.end(request)
    second = Request("s", "xy")
    desk.ask(second)
    desk.allocate(second, [1, 8, 9])
    meta = desk.step({second: 9})
    assert meta.jobs_to_flush == {first}
    ((store, _),) = meta.store_jobs.items()
    third = Request("t", "pq")
    desk.ask(third)
    desk.allocate(third, [1, 6, 7])
    assert desk.step({third: 9}).jobs_to_flush == {first, store}


def test_a_steps_own_stores_are_not_flushed_before_it_has_computed_them():
    desk = Desk()
    idle = Request("idle", "zz")
    desk.ask(idle)
    meta = desk.prefill(Request("r", "ab"), [1, 2, 3])
    assert len(meta.store_jobs) == 1
    assert meta.jobs_to_flush == frozenset()


def test_the_last_block_of_a_finished_request_is_stored_before_its_reuse():
    desk = Desk(num_slots=2)  # 47107
    busy = desk.prefill(Request("writer", "xy"), [11, 12, 13])
    request = Request("r", "ab")
    assert not desk.prefill(request, [1, 2, 3]).store_jobs, "no room yet"
    desk.report(*busy.store_jobs)
    desk.end(request)
    other = Request("other", "pq")
    desk.ask(other)
    desk.allocate(other, [1, 2, 3])
    meta = desk.step({other: 9})
    (final,) = [job_id for job_id, job in meta.store_jobs.items() if job.req_id == "r"]
    assert blocks_of(meta.store_jobs[final]) == [1, 2]
    assert meta.jobs_to_flush == {final}


def test_a_finished_window_request_stores_what_was_given_away_in_this_very_step():
    desk = Desk(num_slots=2, groups=(KVGroup(4, sliding_window_tokens=8),))
    busy = desk.prefill(Request("writer", "xy"), [11, 12, 13])
    request = Request("r", "ab")
    desk.prefill(request, [1, 2, 3])
    desk.report(*busy.store_jobs)
    desk.end(request)
    other = Request("other", "pq")
    desk.ask(other)
    desk.allocate(other, [1, 2, 3])
    meta = desk.step()
    final, job = only(meta.store_jobs)
    assert blocks_of(job) == [1, 2]
    assert final in meta.jobs_to_flush


def test_a_load_into_blocks_that_a_store_still_reads_flushes_that_store():
    desk = Desk()
    desk.store("abcd", [1, 2, 3, 4])
    request, job_id = running(desk, "s", "xy", [11, 12, 13])
    desk.end(request)
    loader = Request("r", "abcd")
    desk.ask(loader)
    desk.allocate(loader, [11, 12, 13, 14, 15], load=16)
    meta = desk.step()
    assert meta.jobs_to_flush == {job_id}


# -- the last step ------------------------------------------------------------------------------


def test_when_every_request_has_finished_all_jobs_are_flushed_in_both_directions():
    desk = Desk(num_slots=3)  # 42611
    desk.store("xyz", [1, 2, 3])
    loading, loaded = Request("loading", "xyz"), None
    _, loaded, _ = desk.load(loading, [11, 12, 13, 14])
    storing = Request("storing", "ab")
    assert not desk.prefill(storing, [21, 22, 23]).store_jobs, "no room"
    desk.report(loaded)
    _, loaded, _ = desk.load(loading, [11, 12, 13, 14])
    desk.end(loading)
    desk.end(storing)
    meta = desk.step()
    assert meta.jobs_to_flush == {loaded}
    assert not meta.store_jobs, "still no room"


def test_stores_that_are_born_last_are_among_the_flushed():
    desk = Desk()
    request = Request("r", "ab")
    desk.ask(request)
    desk.allocate(request, [1, 2, 3])
    desk.step({request: 3})
    request.num_computed_tokens = 8
    desk.end(request)
    meta = desk.step()
    assert meta.jobs_to_flush == meta.store_jobs.keys() == {0}


def test_while_one_request_goes_on_nothing_is_flushed_for_the_others_end():
    desk = Desk()
    request, _ = running(desk)
    desk.ask(Request("other", "zz"))
    desk.end(request)
    assert desk.step().jobs_to_flush == frozenset()


def test_a_step_without_any_request_flushes_nothing():
    desk = Desk()
    assert desk.step().jobs_to_flush == frozenset()
    desk.store("ab", [1, 2, 3])
    assert not desk.table
    assert desk.step().jobs_to_flush == frozenset()


def test_a_step_without_a_tracked_request_flushes_no_job_either():
    desk = Desk()
    request, _ = running(desk)
    # Every tracked request, and not an empty table, is what makes a last step.
    desk.table["r"].request.ended = False
    assert desk.step().jobs_to_flush == frozenset()
    request.ended = True
    assert desk.step().jobs_to_flush == {0}


def test_the_flush_set_belongs_to_one_step():
    desk = Desk()
    running(desk)
    desk.ask(Request("other", "zz"))
    assert desk.step(preempted=["r"]).jobs_to_flush
    assert not desk.step().jobs_to_flush


# -- the order of a step's calls ----------------------------------------------------------------


def test_finished_requests_are_signalled_after_their_last_store_and_the_step_ends_last():
    recorder = Recorder(CPUPrimaryTierOffloadingManager(8))
    desk = Desk(manager=recorder)
    request = Request("r", "ab")
    desk.ask(request)
    desk.allocate(request, [1, 2, 3])
    request.num_computed_tokens = 9
    desk.end(request)
    desk.step()
    assert recorder.calls == [
        "on_new_request",
        "lookup_prefix",
        "prepare_store",
        "on_request_finished",
        "on_schedule_end",
    ]


def test_the_manager_is_told_which_requests_came_and_which_were_preempted():
    told = []

    class Recording(Scripted):
        def on_schedule_end(self, context=None):
            told.append((set(context.new_req_ids), set(context.preempted_req_ids)))

    desk = Desk(manager=Recording())
    running(desk)
    desk.step(preempted=["r"])
    assert told == [({"r"}, set()), (set(), {"r"})]


def test_steps_are_needed_while_a_job_a_finished_request_or_the_manager_has_work():
    manager = Scripted()
    desk = Desk(manager=manager)
    needs = desk.connector.has_pending_push_work
    assert not needs()
    request, job_id = running(desk)
    assert needs(), "a store is in flight"
    desk.report(job_id)
    assert not needs()
    desk.end(request)
    assert needs(), "its last block is to be stored, and the manager to be told"
    desk.step()
    assert not needs()
    manager.pending_work = True
    assert needs()


def test_a_running_request_stores_while_others_are_asked():
    desk = Desk()
    request, job_id = running(desk)
    desk.report(job_id)
    assert {k for k, _, _ in desk.primary.resident()} == set(keys("ab"))
    assert desk.step({request: 1}).jobs_to_flush == frozenset()
