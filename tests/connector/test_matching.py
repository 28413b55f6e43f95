"""How much of a prefix is offered to a request, and when it must ask again."""

import pytest
from connector.worlds import HIT, MISS, PENDING, RETRY, Desk, Request, Scripted, key, keys
from facade.worlds import EXCLUSIVE, PROBED, World

from kvoffload_async.facade.connector.protocol import KVGroup

FULL = KVGroup(4)


def scripted(answers, text="abcdef", groups=(FULL,), **options):
    """A desk whose lookups of `text` answer so, a list a group, one answer a chunk."""
    per_chunk = options.get("blocks_per_chunk", 1)
    said = {}
    for group, row in enumerate(answers):
        hashes = groups[group].tokens_per_block // 4 * per_chunk
        for i, answer in enumerate(row):
            said[key(text[: hashes * (i + 1)], group)] = answer
    manager = Scripted(answers=said)
    return Desk(manager=manager, groups=groups, options=options), Request("r", text)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([HIT, HIT, MISS, HIT], (8, True)),
        ([MISS, HIT], (0, False)),
        ([HIT, PENDING, MISS], (None, False)),
        ([HIT, RETRY, HIT], (None, False)),
        ([RETRY, MISS], (None, False)),
        ([HIT, MISS, PENDING], (8 - 4, True)),
        ([HIT, MISS, RETRY], (4, True)),
        ([HIT] * 6, (24, True)),
    ],
)
def test_only_a_miss_stops_the_scan_and_only_certain_hits_are_offered(row, expected):
    desk, request = scripted([row])
    assert desk.ask(request) == expected


def test_all_probes_of_a_prefix_start_in_one_step():
    desk, request = scripted([[RETRY, PENDING, RETRY, HIT, MISS, RETRY]])
    desk.ask(request)
    assert desk.manager.asked == keys("abcde")


def test_probes_of_a_tier_for_a_whole_prefix_go_out_in_one_batch():
    world = World(PROBED, num_slots=16)
    try:
        desk = Desk(manager=world.manager)
        request = Request("r", "abcd")
        assert desk.ask(request) == (None, False)
        desk.step()
        world.runner.run_ready()
        (probe,) = world.parked()
        assert probe.keys == tuple(keys("abcd"))
        world.finish_job()
        assert desk.ask(request) == (0, False)
    finally:
        world.end()


def test_a_request_that_nothing_is_known_of_computes_everything():
    assert Desk().ask(Request("r", "abcd")) == (0, False)


def test_only_what_lies_past_the_computed_tokens_is_looked_up():
    desk, request = scripted([[MISS, MISS, HIT, HIT, MISS]])
    assert desk.ask(request, 8) == (8, True)
    assert desk.manager.asked == keys("abcde")[2:]


def test_everything_computed_already_leaves_nothing_to_load():
    desk, request = scripted([[HIT] * 6])
    assert desk.ask(request, 24) == (0, False)
    assert not desk.manager.asked


def test_the_last_token_is_never_loaded():
    desk = Desk()
    desk.store("abcd", [1, 2, 3, 4], extra=0)
    assert desk.ask(Request("exact", "abcd", extra=0)) == (12, True)
    assert desk.ask(Request("longer", "abcd", extra=1)) == (16, True)


def test_a_request_loads_at_most_so_many_tokens():
    desk, request = scripted([[HIT] * 6], max_load_tokens=9)
    assert desk.ask(request) == (8, True)
    assert desk.ask(request, 8) == (8, True), "counted from what is computed"


def test_less_than_a_chunk_is_not_worth_a_load():
    desk, request = scripted([[HIT, HIT, MISS]], blocks_per_chunk=2)
    assert desk.ask(request, 12) == (0, False), "one block of the second chunk"
    assert desk.ask(request, 4) == (12, True), "one block of the first, and the second"


def test_a_prompt_shorter_than_a_chunk_is_not_looked_up():
    desk, request = scripted([[HIT]], text="a", blocks_per_chunk=2)
    assert desk.ask(request) == (0, False)
    assert not desk.manager.asked


def test_keys_of_chunks_are_the_chained_hashes_at_their_ends():
    desk, request = scripted([[MISS]], text="abcde", blocks_per_chunk=2)
    desk.ask(request)
    state = desk.table["r"]
    assert state.groups[0].keys == [key("ab"), key("abcd")]
    assert state.ctx.key_positions == {key("ab"): 8, key("abcd"): 16}


# -- several groups -----------------------------------------------------------------------------


def test_the_shortest_group_decides():
    desk, request = scripted([[HIT] * 6, [HIT, HIT, MISS]], groups=(FULL, FULL))
    assert desk.ask(request) == (8, True)


def test_the_common_length_is_a_whole_number_of_chunks_of_each_group():
    desk, request = scripted([[HIT] * 5 + [MISS], [HIT] * 3], groups=(FULL, KVGroup(8)))
    assert desk.ask(request) == (16, True)


def test_a_group_without_a_chunk_to_load_leaves_nothing():
    desk, request = scripted([[HIT] * 6, []], groups=(FULL, KVGroup(32)))
    assert desk.ask(request) == (0, False)


def test_what_lies_past_the_common_length_defers_nobody():
    desk, request = scripted([[HIT, HIT, PENDING, RETRY], [HIT, HIT, MISS]], groups=(FULL, FULL))
    assert desk.ask(request) == (8, True)


def test_each_key_is_asked_for_once_however_often_groups_shrink_each_other():
    rows = [[HIT] * 6, [HIT, HIT, HIT, MISS, HIT, MISS], [HIT, MISS, HIT]]
    window = KVGroup(4, sliding_window_tokens=8)
    desk, request = scripted(rows, groups=(FULL, window, window))
    assert desk.ask(request) == (4, True)
    assert len(desk.manager.asked) == len(set(desk.manager.asked))


def test_the_common_length_shrinks_until_every_group_agrees():
    window = KVGroup(4, sliding_window_tokens=8)
    rows = [[HIT, HIT, MISS, HIT, HIT, HIT], [HIT, HIT, HIT, HIT, MISS, HIT]]
    desk, request = scripted(rows, groups=(window, window))
    # 24 -> 16 (second) -> 8 (first) -> 8 (both)
    assert desk.ask(request) == (8, True)


# -- sliding windows ----------------------------------------------------------------------------


def window_of(chunks):
    return (KVGroup(4, sliding_window_tokens=4 * chunks),)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([HIT, HIT, MISS, PENDING], (8, True)),  # 56486: the pending one is in no usable run
        ([MISS, HIT, HIT, MISS], (12, True)),
        ([HIT, MISS, HIT, MISS], (4, True)),  # shorter, but reaches the start
        ([MISS, HIT, MISS, HIT], (0, False)),
        ([MISS, HIT, PENDING, MISS], (None, False)),
        ([PENDING, HIT, HIT, MISS], (12, True)),  # not asked: the run is long enough
        ([HIT, HIT, RETRY, MISS], (None, False)),
        ([RETRY, MISS, HIT, HIT], (16, True)),
        ([HIT, RETRY, HIT, MISS], (None, False)),
        ([MISS, RETRY, MISS, MISS], (None, False)),
    ],
)
def test_a_window_needs_a_run_of_its_own_length_searched_from_the_right(row, expected):
    desk, request = scripted([row], text="abcd", groups=window_of(2))
    assert desk.ask(request) == expected


def test_a_window_that_ends_inside_a_chunk_needs_that_chunk():
    groups = (KVGroup(4, sliding_window_tokens=5),)
    desk, request = scripted([[MISS, HIT, MISS, HIT]], text="abcd", groups=groups)
    assert desk.ask(request) == (0, False)


def test_a_run_that_reaches_the_computed_tokens_may_be_short():
    desk, request = scripted([[MISS, MISS, HIT, MISS]], text="abcd", groups=window_of(2))
    assert desk.ask(request, 8) == (4, True)


def test_a_pending_block_past_what_the_other_group_has_defers_nobody():
    rows = [[HIT, HIT, PENDING, PENDING], [HIT, HIT, MISS]]
    desk, request = scripted(rows, text="abcd", groups=(*window_of(2), FULL))
    assert desk.ask(request) == (8, True)


def test_a_probe_that_could_lengthen_a_window_defers_although_the_limit_shrank_past_it():
    rows = [[HIT, HIT, HIT, RETRY], [HIT] * 4]
    desk, request = scripted(rows, text="abcd", groups=(*window_of(2), FULL))
    assert desk.ask(request) == (None, False)


# -- loads under way ----------------------------------------------------------------------------


def test_a_block_being_loaded_for_another_request_is_waited_for_not_loaded_twice():
    desk = Desk()
    desk.store("abcd", [1, 2, 3, 4])
    _, job_id, _ = desk.load(Request("first", "abcd"), [5, 6, 7, 8, 9])
    second = Request("second", "abxy")
    assert desk.ask(second) == (None, False)
    assert desk.ask(Request("other", "xy")) == (0, False), "it shares nothing"
    desk.report(job_id)
    assert desk.ask(second) == (8, True)


def test_fifty_sharers_wait_for_one_load_and_not_for_each_other():
    desk = Desk()  # 44294
    desk.store("abcd", [1, 2, 3, 4])
    _, job_id, _ = desk.load(Request("first", "abcd"), list(range(5, 10)))
    sharers = [Request(f"s{i}", "abcd") for i in range(50)]
    assert [desk.ask(s) for s in sharers] == [(None, False)] * 50
    desk.report(job_id)
    free = iter(range(10, 1000))
    for sharer in sharers:
        assert desk.ask(sharer) == (16, True)
        desk.allocate(sharer, [next(free) for _ in range(5)], load=16)
    meta = desk.step()
    assert len(meta.load_jobs) == 50
    desk.report(*meta.load_jobs)
    assert desk.primary.counts["pinned"] == 0


def test_sharers_whose_device_keeps_prefixes_load_nothing():
    desk = Desk()
    desk.store("abcd", [1, 2, 3, 4])
    _, job_id, _ = desk.load(Request("first", "abcd"), list(range(5, 10)))
    sharer = Request("s", "abcd")
    assert desk.ask(sharer) == (None, False)
    desk.report(job_id)
    assert desk.ask(sharer, 16) == (0, False)


def test_a_newcomer_waits_for_the_loads_that_are_under_way_when_it_comes():
    desk = Desk()
    desk.store("abcd", [1, 2, 3, 4])
    _, first, _ = desk.load(Request("first", "abcd"), list(range(5, 10)))
    waiting = Request("waiting", "abcd")
    assert desk.ask(waiting) == (None, False)
    desk.report(first)
    _, second, _ = desk.load(Request("second", "abcd"), list(range(10, 15)))
    newcomer = Request("newcomer", "abcd")
    assert desk.ask(newcomer) == (None, False)
    assert desk.ask(waiting) == (16, True), "the second load began after it came"
    desk.report(second)
    assert desk.ask(newcomer) == (16, True)


# -- tiers --------------------------------------------------------------------------------------


def test_promotions_flow_although_nobody_takes_events():
    world = World(EXCLUSIVE, num_slots=16)  # 44206
    try:
        desk = Desk(manager=world.manager)
        desk.store("abcd", [1, 2, 3, 4])
        world.rest()
        world.manager.reset_cache()
        world.manager.on_reset_flushed()
        request = Request("r", "abcd")
        assert desk.ask(request) == (None, False), "promotions begin"
        desk.step()
        world.rest()
        assert desk.ask(request) == (16, True)
    finally:
        world.end()


@pytest.mark.parametrize("groups", [(FULL,), (FULL, *window_of(2)), (*window_of(2), FULL)])
def test_while_a_request_waits_for_its_blocks_none_is_looked_up_again(groups):
    world = World(EXCLUSIVE, num_slots=16)
    try:
        desk = Desk(manager=world.manager, groups=groups)
        tables = [[10 * group + at for at in range(1, 5)] for group in range(len(groups))]
        desk.store("abcd", *tables)
        world.rest()
        world.manager.reset_cache()
        world.manager.on_reset_flushed()
        request = Request("r", "abcd")
        assert desk.ask(request) == (None, False)
        desk.step()
        counters = world.manager.planner.counters
        before = counters.lookups
        for _ in range(3):
            assert desk.ask(request) == (None, False)
            desk.step()
        assert counters.lookups == before + 3
        world.rest()
        assert desk.ask(request) == (16, True)
    finally:
        world.end()


def test_mixed_groups_under_eviction_shorten_the_prefix_and_break_nothing():
    groups = (FULL, KVGroup(8))  # 43884, 50454
    desk = Desk(num_slots=6, groups=groups)
    desk.store("abcd", [1, 2, 3, 4, 5], [11, 12, 13])
    assert desk.ask(Request("before", "abcd")) == (16, True)
    desk.store("xy", [1, 2, 3], [11, 12])  # evicts the tails: half of it
    request = Request("after", "abcd")
    tokens, waits = desk.ask(request)
    assert waits
    assert tokens == 8
    desk.allocate(request, [21, 22, 23, 24, 25], [31, 32, 33], load=tokens)
    (job,) = desk.step().load_jobs.values()
    assert job.device.group_sizes == (2, 1)
