"""Whatever a scheduler keeps, finds, resets or loads in vain: each stored key has its own bytes."""

import random
from collections import Counter

import pytest
from connector.serving import Serving
from connector.worlds import REQUEST_LEVEL as WHOLE_REQUESTS
from connector.worlds import Desk, Request, Scripted, blocks_of, key, only
from facade.worlds import EXCLUSIVE, PROBED, REQUEST_LEVEL
from sweeps import sizes

from kvoffload_async.facade.connector.protocol import NULL_BLOCK, KVGroup

FULL, WINDOW = KVGroup(4), KVGroup(4, sliding_window_tokens=8)
SMALL, SLIDING, BIG = KVGroup(2), KVGroup(2, 4), KVGroup(4, 6)


# -- single promises ----------------------------------------------------------------------------


def retaining(manager=None, **options):
    """A request whose load fills 23, 24 of its window, and leaves 21, 22 as they were."""
    desk = Desk(32, (FULL, WINDOW), manager=manager, options=options)
    desk.store("abcd", [1, 2, 3, 4], [NULL_BLOCK, NULL_BLOCK, 7, 8])
    request = Request("r", "abcd")
    tables = [[11, 12, 13, 14, 15], [21, 22, 23, 24, 25]]
    _, job_id, job = desk.load(request, *tables)
    assert blocks_of(job) == [11, 12, 13, 14, 23, 24]
    return desk, request, tables, job_id


def stored(meta):
    return [block for job in meta.store_jobs.values() for block in blocks_of(job)]


def loaded(desk, request, job_id):
    desk.report(job_id)
    request.num_computed_tokens = 16


def test_a_block_that_a_load_left_unfilled_is_not_stored_for_a_manager_of_whole_requests():
    desk, request, tables, job_id = retaining(Scripted(policy=WHOLE_REQUESTS))
    loaded(desk, request, job_id)
    desk.step({request: 1}, tables={"r": tables})
    assert not {key("a", 1), key("ab", 1)} & set(desk.manager.offered[-1])
    assert key("abc", 1) in desk.manager.offered[-1]


def test_a_block_that_a_load_left_unfilled_is_not_stored_after_a_reset_during_the_load():
    desk, request, tables, job_id = retaining()
    desk.connector.reset_cache()
    desk.step()
    loaded(desk, request, job_id)
    assert stored(desk.step({request: 1}, tables={"r": tables})) == [11, 12, 13, 14, 23, 24]
    assert desk.ask(Request("shorter", "ab")) == (0, False)


def test_the_end_of_the_request_stores_no_unfilled_block():
    desk, request, _, job_id = retaining(Scripted(policy=WHOLE_REQUESTS))
    loaded(desk, request, job_id)
    desk.manager.core.reset()  # as if all had been evicted
    desk.end(request)
    assert stored(desk.step()) == [11, 12, 13, 14, 23, 24]


def test_an_unfilled_block_that_another_request_finds_on_the_device_is_not_stored():
    desk, request, _, job_id = retaining()
    loaded(desk, request, job_id)
    other = Request("other", "abwxyz", extra=0)
    meta = desk.prefill(other, [11, 12, 31, 32, 33, 34], [21, 22, 41, 42, 43, 44], computed=8)
    assert not stored(meta), "what was computed from unfilled blocks is wrong, too"


def test_an_unfilled_block_out_of_reach_taints_nothing():
    desk, request, _, job_id = retaining()
    loaded(desk, request, job_id)
    other = Request("other", "abcdyz", extra=0)
    desk.connector.reset_cache()
    window = [21, 22, 23, 24, 43, 44]
    meta = desk.prefill(other, [11, 12, 13, 14, 33, 34], window, computed=16)
    assert stored(meta) == [11, 12, 13, 14, 33, 34, 23, 24, 43, 44]


def test_an_unfilled_block_is_stored_once_it_is_allocated_anew_and_computed():
    desk, request, _, job_id = retaining()
    loaded(desk, request, job_id)
    desk.end(request)
    desk.step()
    meta = desk.prefill(Request("new", "xy"), [31, 32, 33], [21, 22, 43])
    assert stored(meta) == [31, 32, 21, 22]


def test_a_failed_load_also_reports_the_blocks_that_it_was_not_to_fill():
    desk, request, _, job_id = retaining(Scripted(policy=WHOLE_REQUESTS))
    desk.report(job_id, failed=[job_id])
    assert desk.connector.take_invalid_blocks() == {11, 12, 13, 14, 21, 22, 23, 24}
    assert stored(desk.step({request: 17})) == [21, 22], "they are computed; the rest is there"


def test_what_is_computed_beside_a_failed_loads_blocks_is_not_stored():
    desk, request, _, job_id = retaining(offload_prompt_only=False)
    desk.report(job_id, failed=[job_id])
    request.output = "e"
    request.num_computed_tokens = 16  # the scheduler has not taken the tokens back
    assert stored(desk.step({request: 4})) == []


def test_a_load_of_a_preempted_request_does_not_vouch_for_blocks_that_another_load_fills_since():
    desk = Desk(32, manager=Scripted(policy=WHOLE_REQUESTS))
    desk.store("abcd", [1, 2, 3, 4])
    desk.store("wxyz", [5, 6, 7, 8], req_id="v")
    _, lost, _ = desk.load(Request("r", "abcd"), [11, 12, 13, 14, 15])
    other = Request("other", "wxyz")
    assert desk.ask(other) == (16, True)
    desk.allocate(other, [11, 12, 13, 14, 15], load=16)
    meta = desk.step(preempted=["r"])
    assert meta.jobs_to_flush == {lost}
    desk.report(lost, *meta.load_jobs, failed=meta.load_jobs)
    other.num_computed_tokens = 16  # what the load was for
    desk.manager.core.reset()  # as if all had been evicted
    desk.end(other)
    assert stored(desk.step()) == []


def test_blocks_that_another_source_fills_are_not_stored_but_those_computed_after_them_are():
    desk = Desk()
    request = Request("r", "abcd")
    desk.ask(request)
    desk.allocate(request, [1, 2, 3, 4, 5])
    request.num_computed_tokens = 8
    assert stored(desk.step({request: 9})) == [3, 4]


def test_a_block_whose_first_tokens_were_found_on_the_device_is_stored():
    desk = Desk()
    assert stored(desk.prefill(Request("r", "abc"), [1, 2, 3, 4], computed=6)) == [1, 2, 3]


def test_a_block_that_is_only_being_filled_when_another_request_finds_it_is_trusted():
    desk = Desk(options={"offload_prompt_only": False})
    first, second = Request("first", "ab", extra=0), Request("second", "abc", extra=0)
    desk.ask(first)
    desk.allocate(first, [1, 2])
    desk.ask(second, 8)
    desk.allocate(second, [1, 2, 3])
    second.num_computed_tokens = 8
    assert stored(desk.step({first: 8, second: 4})) == [1, 2, 3]


def test_a_block_that_comes_back_to_its_request_elsewhere_is_read_before_it_is_overwritten():
    desk = Desk(32, (WINDOW,))
    first = Request("first", "ab")
    storing, _ = only(desk.prefill(first, [1, 2, 3]).store_jobs)
    second = Request("second", "ab")
    desk.ask(second, 8)
    desk.allocate(second, [1, 2, 4])
    desk.step()
    meta = desk.step({second: 1}, tables={"second": [[NULL_BLOCK, 2, 4, 1]]})
    assert storing in meta.jobs_to_flush


# -- drawn schedules ----------------------------------------------------------------------------


def serve(seed, tally):
    """Serve drawn requests in drawn steps; the miniature compares all bytes with their keys."""
    draw = random.Random(seed)
    serving = Serving(
        draw.choice([(SMALL, SLIDING), (SLIDING,), (SMALL, SLIDING, BIG)]),
        num_blocks=40,
        num_slots=draw.choice((12, 30)),
        tiers=(draw.choice((EXCLUSIVE, PROBED, REQUEST_LEVEL, REQUEST_LEVEL)),),
        blocks_per_chunk=draw.choice((1, 1, 2)),
        num_workers=draw.choice((1, 2)),
        max_load_tokens=draw.choice((None, None, 6)),
        offload_prompt_only=draw.random() < 0.5,
        lag=draw.choice((0, 2, 100)),
        prefix_cache=draw.choice((None, "filled", "all", "all")),
        promises=draw.random() < 0.5,
    )
    failures, resets = draw.choice((0.0, 0.15)), draw.choice((0.0, 0.06))
    texts = ["".join(draw.choices("ab", k=draw.randrange(3, 22))) for _ in range(3)]
    for _ in range(60):
        if draw.random() < 0.5 and len(serving.live) < 5:
            prompt = (draw.choice(texts) * 2)[: draw.randrange(3, 26)]
            serving.arrive(prompt, draw.randrange(1, 8))
        serving.step(draw.randrange(1, 9), preempts=draw.random() < 0.1)
        for copy in list(serving.copies):
            if copy.outcome is None and draw.random() < 0.7:
                serving.perform(copy, success=draw.random() >= failures)
        serving.report(
            *[c for c in serving.copies if c.outcome is not None and draw.random() < 0.8]
        )
        if draw.random() < 0.5:
            serving.world.finish_all()
        if draw.random() < 0.08 and serving.live:
            serving.finish(draw.choice([r for r in serving.live if not r.ended] or serving.live))
        if draw.random() < resets:
            serving.connector.reset_cache()
            if draw.random() < 0.5:
                serving.pool.forget()
            serving.check()
    try:
        serving.rest()
    finally:
        serving.end()
    tally.update(serving.tally)


@pytest.mark.no_cover
@sizes("schedules", 25, 500)
def test_no_schedule_stores_bytes_that_are_not_those_of_their_key(schedules):
    tally = Counter()
    for seed in range(schedules):
        serve(seed, tally)
    for met in ("loaded", "found", "unfilled", "invalid", "preempted", "slid", "computed wrong"):
        assert tally[met], f"no schedule has {met}"
