"""Stores: which chunks are offered when, what a refusal means, and the last chunk of a request."""

import pytest
from connector.worlds import (
    REQUEST_LEVEL,
    TOKENS_PER_HASH,
    Desk,
    Request,
    Scripted,
    blocks_of,
    key,
    keys,
    only,
)
from hypothesis import given
from hypothesis import strategies as st

from kvoffload_async.facade.connector.protocol import NULL_BLOCK, KVGroup
from kvoffload_async.facade.primary import CPUPrimaryTierOffloadingManager

FULL = KVGroup(4)
WINDOW = KVGroup(4, sliding_window_tokens=8)


def resident(desk):
    return {k for k, _, refs in desk.primary.resident() if refs >= 0}


def test_chunks_are_stored_as_soon_as_a_step_fills_them():
    desk = Desk()
    request = Request("r", "abcd")
    desk.ask(request)
    desk.allocate(request, [1, 2])
    _, job = only(desk.step({request: 7}).store_jobs)
    assert blocks_of(job) == [1], "the second block is one token short"
    _, job = only(desk.step({request: 1}).store_jobs)
    assert blocks_of(job) == [2]
    assert not desk.step({request: 1}, new={"r": [[3]]}).store_jobs
    _, job = only(desk.step({request: 8}, new={"r": [[4, 5]]}).store_jobs)
    assert blocks_of(job) == [3, 4]
    assert job.device.block_indices == (2,)


def test_stored_blocks_are_readable_once_all_workers_have_stored_them():
    desk = Desk(options={"num_workers": 3})
    meta = desk.prefill(Request("r", "ab"), [1, 2, 3])
    job_id, _ = only(meta.store_jobs)
    desk.report(job_id, count=2)
    assert resident(desk) == set()
    desk.report(job_id, count=1)
    assert resident(desk) == set(keys("ab"))


def test_a_second_request_hits_while_the_first_still_decodes():
    desk = Desk()  # 39186
    request = Request("r", "ab")
    meta = desk.prefill(request, [1, 2, 3])
    desk.step({request: 1})
    desk.report(*meta.store_jobs)
    desk.step({request: 1})
    assert desk.ask(Request("other", "ab")) == (8, True)


def test_a_store_counts_once_however_often_it_is_reported():
    desk = Desk()
    meta = desk.prefill(Request("r", "ab"), [1, 2, 3])
    desk.report(*meta.store_jobs)
    desk.report(*meta.store_jobs)
    desk.report(999)
    assert resident(desk) == set(keys("ab"))


def test_a_failed_store_is_not_readable_and_its_slots_are_free():
    desk = Desk()
    meta = desk.prefill(Request("r", "ab"), [1, 2, 3])
    job_id, _ = only(meta.store_jobs)
    desk.report(job_id, failed=[job_id])
    assert desk.ask(Request("other", "ab")) == (0, False)
    assert desk.primary.counts["free"] == desk.num_slots
    assert desk.connector.counters.failed_stores == 1
    assert desk.connector.take_invalid_blocks() == set()


def test_only_missing_chunks_are_copied_from_exactly_their_blocks():
    desk = Desk(options={"blocks_per_chunk": 2})
    desk.store("abcd", [1, 2, 3, 4])
    desk.primary.reset()
    desk.store("ab", [1, 2], req_id="v")
    desk.store("abcdef", [5, 6, 7, 8, 9, 10], req_id="u")
    assert resident(desk) == {key("ab"), key("abcd"), key("abcdef")}
    meta = desk.prefill(Request("r", "abcdefgh"), [11, 12, 13, 14, 15, 16, 17, 18])
    _, job = only(meta.store_jobs)
    assert blocks_of(job) == [17, 18]
    assert job.device.block_indices == (6,)
    assert len(job.host.block_ids) == 1


def test_accepted_chunks_with_holes_keep_the_order_of_their_slots():
    manager = CPUPrimaryTierOffloadingManager(16)
    desk = Desk(manager=manager, groups=(FULL, FULL))
    meta = desk.prefill(Request("r", "abc"), [1, 2, 3, 4], [5, 6, 7, 8])
    _, job = only(meta.store_jobs)
    assert blocks_of(job) == [1, 2, 3, 5, 6, 7]
    assert job.device.group_sizes == (3, 3)
    order = [manager.core.slot_of(k) for k in (*keys("abc"), *keys("abc", 1))]
    assert job.host.block_ids.tolist() == order


def test_nothing_new_to_store_makes_no_job_and_advances():
    desk = Desk()
    desk.store("ab", [1, 2, 3])
    request = Request("r", "ab")
    assert not desk.prefill(request, [4, 5, 6]).store_jobs
    assert desk.table["r"].groups[0].next_chunk == 2


def test_a_refused_store_is_offered_again_in_the_next_step():
    desk = Desk(num_slots=2)
    writer = Request("writer", "xy")
    busy = desk.prefill(writer, [1, 2, 3])  # its blocks are being written: no room
    request = Request("r", "ab")
    assert not desk.prefill(request, [4, 5, 6]).store_jobs
    assert desk.connector.counters.stores_refused == 1
    desk.report(*busy.store_jobs)
    _, job = only(desk.step({request: 1}).store_jobs)
    assert blocks_of(job) == [4, 5]


def test_the_head_that_fits_is_stored_where_the_manager_accepts_prefixes():
    desk = Desk(manager=CPUPrimaryTierOffloadingManager(2, accept_prefix=True))
    _, job = only(desk.prefill(Request("r", "abcd"), [1, 2, 3, 4, 5]).store_jobs)
    assert blocks_of(job) == [1, 2]
    assert len(job.host.block_ids) == 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 2]),
        ({"offload_prompt_only": False}, [1, 2, 3]),
        ({"offload_prompt_only": False, "max_offload_tokens": 11}, [1, 2]),
        ({"max_offload_tokens": 7}, [1]),
    ],
)
def test_generated_tokens_and_what_is_past_the_limit_stay_out(options, expected):
    desk = Desk(options=options)
    request = Request("r", "ab", extra=0)
    stored = []
    meta = desk.prefill(request, [1, 2])
    stored += [b for job in meta.store_jobs.values() for b in blocks_of(job)]
    request.output = "c"
    meta = desk.step({request: 4}, new={"r": [[3]]})
    stored += [b for job in meta.store_jobs.values() for b in blocks_of(job)]
    assert stored == expected


def test_a_step_that_computes_ahead_of_the_known_tokens_stores_only_known_ones():
    desk = Desk()
    request = Request("r", "ab", extra=0)
    desk.ask(request)
    desk.allocate(request, [1, 2, 3])
    _, job = only(desk.step({request: 100}).store_jobs)
    assert blocks_of(job) == [1, 2]


def test_whole_requests_are_offered_from_the_start_whatever_the_device_had():
    desk = Desk(manager=Scripted(policy=REQUEST_LEVEL))
    desk.prefill(Request("r", "abc"), [1, 2, 3, 4], computed=8)
    assert desk.manager.offered == [keys("abc")]


# -- chunks that are not whole ------------------------------------------------------------------


def test_chunks_without_blocks_or_keys_are_not_stored():
    desk = Desk()  # 49118
    request = Request("r", "abcd")
    desk.ask(request)
    desk.allocate(request, [1, 2])
    _, job = only(desk.step({request: 17}).store_jobs)
    assert blocks_of(job) == [1, 2]


@given(
    per_chunk=st.integers(1, 4),
    prompt=st.integers(0, 9),
    steps=st.lists(st.integers(1, 13), max_size=12),
    is_preempted_at=st.integers(0, 12),
)
def test_a_growing_request_stores_each_chunk_once_and_none_before_it_is_full(
    per_chunk, prompt, steps, is_preempted_at
):
    options = {"blocks_per_chunk": per_chunk, "offload_prompt_only": False}
    desk = Desk(num_slots=64, options=options)
    request = Request("r", "a" * prompt)
    desk.ask(request)
    desk.allocate(request, list(range(1, 64)))
    stored, total = [], 0
    for number, tokens in enumerate(steps):
        while total + tokens > request.num_tokens:
            request.output += "b"
        meta = desk.step({request: tokens})
        total += tokens
        stored += [len(job.host.block_ids) for job in meta.store_jobs.values()]
        desk.report(*meta.store_jobs)
        assert sum(stored) == total // (TOKENS_PER_HASH * per_chunk)
        if number == is_preempted_at:  # it is computed again from the start
            desk.step(preempted=["r"])
            request.num_computed_tokens = 0
            desk.ask(request)
            desk.allocate(request, list(range(64, 127)))
            desk.step({request: total})
    desk.end(request)
    assert not desk.step().store_jobs
    text = request.text + request.output
    whole = range(per_chunk, total // TOKENS_PER_HASH + 1, per_chunk)
    assert resident(desk) == {key(text[:end]) for end in whole}


def test_half_a_window_is_no_chunk_and_counts_no_blocks():
    groups = (KVGroup(4, sliding_window_tokens=8),)  # 42945
    desk = Desk(groups=groups, options={"blocks_per_chunk": 2})
    request = Request("r", "abcdef")
    desk.ask(request)
    desk.allocate(request, [NULL_BLOCK, 2, 3, 4, 5, 6])
    _, job = only(desk.step({request: 24}).store_jobs)
    assert blocks_of(job) == [3, 4, 5, 6]
    assert job.device.group_sizes == (4,)
    assert job.device.block_indices == (2,)
    assert len(job.host.block_ids) == 2


def refused_window(desk):
    """A request of a window group, computed, and none of it stored for lack of room."""
    writer = Request("writer", "x" * desk.num_slots)
    busy = desk.prefill(writer, list(range(101, 102 + desk.num_slots)))
    request = Request("r", "abcd", extra=0)
    assert not desk.prefill(request, [1, 2, 3, 4]).store_jobs
    return request, busy


def test_a_block_that_slid_out_and_was_given_away_is_not_stored_under_its_old_key():
    desk = Desk(num_slots=4, groups=(WINDOW,))  # 42959
    request, busy = refused_window(desk)
    desk.report(*busy.store_jobs)
    other = Request("other", "pq")
    desk.ask(other)
    desk.allocate(other, [1, 2, 9])
    _, job = only(desk.step({request: 1}).store_jobs)
    assert blocks_of(job) == [3, 4]


def test_a_block_that_slid_out_and_came_back_to_the_request_itself_is_stored_once():
    desk = Desk(num_slots=4, groups=(WINDOW,), options={"offload_prompt_only": False})
    request, busy = refused_window(desk)  # 42761
    request.output = "e"
    desk.report(*busy.store_jobs)
    _, job = only(desk.step({request: 4}, new={"r": [[1]]}).store_jobs)
    assert blocks_of(job) == [2, 3, 4, 1]
    assert desk.table["r"].groups[0].block_ids == [NULL_BLOCK, 2, 3, 4, 1]


def test_a_request_that_waits_for_its_load_keeps_the_blocks_that_it_was_given():
    desk = Desk(groups=(WINDOW,))
    desk.store("abcd", [1, 2, 3, 4])
    desk.load(Request("r", "abcd"), [NULL_BLOCK, NULL_BLOCK, 7, 8, 9])
    assert desk.table["r"].groups[0].block_ids == [NULL_BLOCK, NULL_BLOCK, 7, 8, 9]


# -- the end of a request -----------------------------------------------------------------------


def test_the_last_block_of_a_request_that_ends_on_its_boundary_is_stored():
    desk = Desk(options={"offload_prompt_only": False})  # 48596
    request = Request("r", "a", extra=0)
    desk.report(*desk.prefill(request, [1, 2]).store_jobs)
    request.sampled = 1
    for _ in range(4):
        assert not desk.step({request: 1}).store_jobs, "its hash is not known yet"
        request.sampled += 1
    request.output, request.sampled = "b", 1  # 8 computed tokens, and one without KV
    desk.end(request)
    job_id, job = only(desk.step().store_jobs)
    assert blocks_of(job) == [2]
    desk.report(job_id)
    assert resident(desk) == set(keys("ab"))
    assert not desk.table


def test_the_last_sampled_token_has_no_kv_and_completes_no_chunk():
    desk = Desk(options={"offload_prompt_only": False})
    request = Request("r", "a", extra=0)
    desk.prefill(request, [1, 2])
    request.output = "b"
    request.num_computed_tokens = 8  # a scheduler that runs ahead says so
    desk.end(request)
    assert not desk.step().store_jobs


def test_an_aborted_request_stores_what_it_has_computed():
    desk = Desk()
    request = Request("r", "abcd")
    desk.ask(request)
    desk.allocate(request, [1, 2, 3, 4, 5])
    desk.step({request: 6})
    request.num_computed_tokens = 8
    desk.end(request)
    _, job = only(desk.step().store_jobs)
    assert blocks_of(job) == [2]


def test_a_request_aborted_before_it_ran_stores_nothing():
    desk = Desk()  # 49118, 55503
    request = Request("r", "abcd")
    desk.ask(request)
    assert desk.end(request) == (False, None)
    meta = desk.step()
    assert not meta.store_jobs
    assert not desk.table


def test_a_request_nobody_asked_about_is_begun_and_ended():
    recorded = []

    class Recording(Scripted):
        def on_new_request(self, req_context):
            recorded.append(("begin", req_context.req_id))
            return super().on_new_request(req_context)

        def on_request_finished(self, req_context):
            recorded.append(("end", req_context.req_id))
            super().on_request_finished(req_context)

    desk = Desk(manager=Recording())
    request = Request("r", "abcd")
    assert desk.end(request) == (False, None)
    assert desk.end(request) == (False, None), "ending twice is ending once"
    desk.step()
    assert recorded == [("begin", "r"), ("end", "r")]


def test_a_preempted_request_that_ends_stores_nothing_from_blocks_it_lost():
    desk = Desk(num_slots=2)
    busy = desk.prefill(Request("writer", "xy"), [11, 12, 13])
    request = Request("r", "ab")
    assert not desk.prefill(request, [1, 2, 3]).store_jobs
    desk.step(preempted=["r"])  # its computed tokens are left as they were
    desk.report(*busy.store_jobs)
    desk.end(request)
    assert not desk.step().store_jobs


def test_a_finished_request_is_kept_until_its_stores_have_ended():
    desk = Desk()
    request = Request("r", "ab")
    meta = desk.prefill(request, [1, 2, 3])
    desk.end(request)
    desk.step()
    assert "r" in desk.table
    desk.report(*meta.store_jobs)
    assert not desk.table
    assert resident(desk) == set(keys("ab"))


def test_an_id_may_be_used_again_once_its_last_transfer_has_ended():
    desk = Desk()
    first = Request("r", "ab")
    meta = desk.prefill(first, [1, 2, 3])
    desk.end(first)
    second = Request("r", "ab")
    assert desk.ask(second) == (None, False), "the first one is ending"
    desk.step()
    assert desk.ask(second) == (None, False), "the first one's store is in flight"
    desk.report(*meta.store_jobs)
    assert desk.ask(second) == (8, True)


def test_scheduled_requests_that_the_adapter_does_not_know_are_none_of_its_business():
    desk = Desk()
    stranger = Request("stranger", "ab")
    tables = {"stranger": [[1, 2, 3]]}
    meta = desk.step({stranger: 9}, tables=tables, new={"stranger": [[4]]}, preempted=["stranger"])
    assert not meta.store_jobs
    assert not desk.table
