"""Loads: which device blocks are filled from which slots, and what follows from a failure."""

import pytest
from connector.worlds import HIT, REQUEST_LEVEL, Desk, Request, Scripted, blocks_of, key, only

from kvoffload_async.errors import StateError
from kvoffload_async.facade.connector.protocol import NULL_BLOCK, KVGroup
from kvoffload_async.types import LoadStoreSpec

FULL = KVGroup(4)
WINDOW = KVGroup(4, sliding_window_tokens=8)


def test_a_load_fills_the_blocks_past_the_computed_ones():
    desk = Desk()
    desk.store("abcd", [1, 2, 3, 4])
    slots = [desk.primary.slot_of(key("abcd"[: i + 1])) for i in range(4)]
    tokens, _, job = desk.load(Request("r", "abcd"), [5, 6, 7, 8, 9], computed=4)
    assert tokens == 12
    assert blocks_of(job) == [6, 7, 8]
    assert job.host.block_ids.tolist() == slots[1:]
    assert job.device.group_sizes == (3,)
    assert job.device.block_indices == (1,)
    assert job.req_id == "r"
    assert desk.connector.counters.loaded_tokens == 12


def test_what_is_loaded_stays_pinned_until_the_load_has_ended():
    desk = Desk()
    desk.store("abcd", [1, 2, 3, 4])
    _, job_id, _ = desk.load(Request("r", "abcd"), [5, 6, 7, 8, 9])
    assert desk.primary.counts["pinned"] == 4
    desk.report(job_id)
    assert desk.primary.counts["pinned"] == 0


def test_a_load_may_start_inside_a_chunk():
    desk = Desk(options={"blocks_per_chunk": 2})
    desk.store("abcdef", [1, 2, 3, 4, 5, 6])
    tokens, _, job = desk.load(Request("r", "abcdef"), [11, 12, 13, 14, 15, 16, 17], computed=4)
    assert tokens == 20
    assert blocks_of(job) == [12, 13, 14, 15, 16]
    assert job.device.block_indices == (1,), "one block into the first chunk"
    assert len(job.host.block_ids) == 3, "the first chunk's slot is read, too"


def test_groups_with_different_chunks_are_loaded_by_one_job():
    desk = Desk(groups=(FULL, KVGroup(8)))
    desk.store("abcd", [1, 2, 3, 4], [5, 6])
    tokens, _, job = desk.load(Request("r", "abcd"), [11, 12, 13, 14, 15], [21, 22, 23])
    assert tokens == 16
    assert blocks_of(job) == [11, 12, 13, 14, 21, 22]
    assert job.device.group_sizes == (4, 2)
    assert len(job.host.block_ids) == 6


def test_only_the_blocks_that_a_window_reaches_are_filled():
    desk = Desk(groups=(FULL, WINDOW))
    desk.store("abcd", [1, 2, 3, 4], [5, 6, 7, 8])
    table = [NULL_BLOCK, NULL_BLOCK, 23, 24, 25]
    _, _, job = desk.load(Request("r", "abcd"), [11, 12, 13, 14, 15], table)
    assert blocks_of(job) == [11, 12, 13, 14, 23, 24]
    assert job.device.group_sizes == (4, 2), "42945: nulls do not count"
    assert job.device.block_indices == (0, 2)
    assert len(job.host.block_ids) == 6


def test_a_scheduler_may_keep_blocks_that_the_window_does_not_reach():
    desk = Desk(groups=(FULL, WINDOW))
    desk.store("abcd", [1, 2, 3, 4], [NULL_BLOCK, NULL_BLOCK, 7, 8])
    _, _, job = desk.load(Request("r", "abcd"), [11, 12, 13, 14, 15], [21, 22, 23, 24, 25])
    assert blocks_of(job) == [11, 12, 13, 14, 23, 24], "no key is there for the others"


def test_a_window_may_begin_inside_a_chunk():
    groups = (KVGroup(4, sliding_window_tokens=8),)
    desk = Desk(groups=groups, options={"blocks_per_chunk": 2})
    desk.store("abcdef", [1, 2, 3, 4, 5, 6])
    request = Request("r", "abcdef")
    tokens, _ = desk.ask(request)
    assert tokens == 24
    desk.allocate(request, [NULL_BLOCK] * 5 + [16, 17], load=24)
    _, job = only(desk.step().load_jobs)
    assert blocks_of(job) == [16]
    assert job.device.block_indices == (5,)
    assert len(job.host.block_ids) == 1


def test_a_group_whose_window_holds_no_block_takes_no_part():
    desk = Desk(groups=(FULL, WINDOW))
    desk.store("abcd", [1, 2, 3, 4], [5, 6, 7, 8])
    _, _, job = desk.load(Request("r", "abcd"), [11, 12, 13, 14, 15], [NULL_BLOCK] * 5)
    assert job.device.group_sizes == (4, 0)
    assert len(job.host.block_ids) == 4


def test_an_offer_is_taken_whole_or_not_at_all():
    desk = Desk()
    desk.store("abcd", [1, 2, 3, 4])
    request = Request("r", "abcd")
    desk.ask(request)
    with pytest.raises(StateError, match="was offered 16 tokens, not 8"):
        desk.allocate(request, [5, 6, 7, 8, 9], load=8)
    desk.allocate(request, [5, 6, 7, 8, 9])
    with pytest.raises(StateError, match="was offered 0 tokens, not 16"):
        desk.allocate(request, [5, 6, 7, 8, 9], load=16)
    assert not desk.step().load_jobs
    assert desk.primary.counts["pinned"] == 0


def test_a_load_without_blocks_for_it_is_refused_and_pins_nothing():
    desk = Desk()
    desk.store("abcd", [1, 2, 3, 4])
    request = Request("r", "abcd")
    desk.ask(request)
    with pytest.raises(StateError, match="16 tokens do not fit into 3 blocks of group 0"):
        desk.allocate(request, [5, 6, 7], load=16)
    assert desk.primary.counts["pinned"] == 0


def test_only_a_primary_in_host_memory_can_be_loaded_from():
    class Elsewhere(Scripted):
        def prepare_load(self, keys, req_context):
            return LoadStoreSpec()

    desk = Desk(manager=Elsewhere(answers={key("a"): HIT}))
    request = Request("r", "a")
    desk.ask(request)
    with pytest.raises(StateError, match="Elsewhere has no primary in host memory"):
        desk.allocate(request, [1, 2], load=4)


def test_loaded_chunks_are_not_stored_again():
    desk = Desk()
    desk.store("ab", [1, 2])
    request = Request("r", "abcd")
    _, job_id, _ = desk.load(request, [5, 6, 7, 8, 9])
    desk.report(job_id)
    request.num_computed_tokens = 8
    _, job = only(desk.step({request: 9}, tables={"r": [[5, 6, 7, 8, 9]]}).store_jobs)
    assert blocks_of(job) == [7, 8]


def test_a_manager_that_wants_whole_requests_is_offered_loaded_chunks_too():
    desk = Desk(manager=Scripted(policy=REQUEST_LEVEL))
    desk.store("ab", [1, 2])
    request = Request("r", "abc")
    _, job_id, _ = desk.load(request, [5, 6, 7, 8])
    desk.report(job_id)
    request.num_computed_tokens = 8
    _, job = only(desk.step({request: 5}).store_jobs)
    assert desk.manager.offered[-1] == [key("a"), key("ab"), key("abc")]
    assert blocks_of(job) == [7]


def test_a_request_has_one_load_at_a_time():
    desk = Desk()
    desk.store("abcd", [1, 2, 3, 4])
    request = Request("r", "abcd")
    _, job_id, _ = desk.load(request, [5, 6, 7, 8, 9])
    assert desk.ask(request) == (None, False)
    desk.report(job_id)
    assert desk.ask(request) == (16, True)


def test_loads_waiting_behind_an_unschedulable_head_need_further_steps_and_get_them():
    desk = Desk()  # 45387, 45388
    desk.store("abcd", [1, 2, 3, 4])
    parked = Request("parked", "abcd")
    _, job_id, _ = desk.load(parked, [5, 6, 7, 8, 9])
    desk.ask(Request("head", "vwxyz" * 4))  # there are no blocks for it
    for _ in range(3):
        assert desk.connector.has_pending_push_work()
        assert not desk.step().load_jobs
    desk.report(job_id)
    desk.end(parked)
    desk.step()
    assert not desk.connector.has_pending_push_work()


# -- failures -----------------------------------------------------------------------------------


def failed_load(**options):
    desk = Desk(options=options)
    desk.store("abcd", [1, 2, 3, 4])
    request = Request("r", "abcd")
    _, job_id, _ = desk.load(request, [5, 6, 7, 8, 9], computed=4)
    return desk, request, job_id


def test_a_failed_load_unpins_and_reports_its_blocks_as_invalid():
    desk, _, job_id = failed_load()  # 39732, 52838
    desk.report(job_id, failed=[job_id])
    assert desk.connector.take_invalid_blocks() == {6, 7, 8}
    assert desk.connector.take_invalid_blocks() == set(), "each once"
    assert desk.primary.counts["pinned"] == 0
    assert desk.connector.counters.failed_loads == 1


def test_a_load_fails_if_one_of_its_workers_failed_whichever_reports_last():
    desk, _, job_id = failed_load(num_workers=2)
    desk.report(job_id, count=1, failed=[job_id])
    assert desk.connector.take_invalid_blocks() == set(), "the other one still writes"
    desk.report(job_id, count=1)
    assert desk.connector.take_invalid_blocks() == {6, 7, 8}


def test_a_request_whose_load_failed_computes_and_does_not_load_again():
    desk, request, job_id = failed_load()
    desk.report(job_id, failed=[job_id])
    assert desk.ask(request) == (0, False)
    assert desk.ask(Request("other", "abcd")) == (16, True), "the blocks are good"


def test_invalid_blocks_are_never_stored_even_if_the_request_ends_at_once():
    desk = Desk(manager=Scripted(policy=REQUEST_LEVEL))
    desk.store("abcd", [1, 2, 3, 4])
    request = Request("r", "abcd", num_computed_tokens=16)  # what was promised, not what is there
    _, job_id, _ = desk.load(request, [5, 6, 7, 8, 9])
    desk.report(job_id, failed=[job_id])
    desk.manager.core.reset()  # as if it had been evicted
    desk.end(request)
    assert not desk.step().store_jobs


def test_blocks_that_the_request_has_let_go_of_are_not_invalid():
    desk, request, job_id = failed_load()
    desk.end(request)
    desk.step()
    desk.report(job_id, failed=[job_id])
    assert desk.connector.take_invalid_blocks() == set()
    assert not desk.table


def test_a_request_aborted_while_it_loads_stores_nothing_and_is_kept_until_the_load_has_ended():
    desk, request, job_id = failed_load()
    request.num_computed_tokens = 16
    assert desk.end(request) == (False, None)
    meta = desk.step()
    assert not meta.store_jobs
    assert desk.primary.counts["pinned"] == 3
    assert request.request_id in desk.table
    desk.report(job_id)
    assert desk.primary.counts["pinned"] == 0
    assert not desk.table
