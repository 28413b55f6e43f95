"""Which head of a batch is taken where there is no room for all of it."""

import pytest
from core.terms import k, ks
from core.world import World
from hypothesis import given
from hypothesis import strategies as st

from kvoffload_async.core.admission import (
    AdmissionFilter,
    longest_fitting_prefix,
    prefix_test,
    those_before,
)
from kvoffload_async.types import make_offload_key


def key(name, group=0):
    return make_offload_key(name.encode(), group)


HYBRID = {key(name, group): end for group in (0, 1) for end, name in enumerate("abcd", 1)}
"""Two groups with blocks of the same size."""
WIDE = {key(name): end for end, name in enumerate("abcdef", 1)} | {key("B", 1): 2, key("D", 1): 4}
"""Two groups; a block of the second is as long as two of the first."""


@pytest.mark.parametrize("room", [4, 5])
def test_a_hybrid_models_head_is_cut_at_a_token_over_all_groups(room):
    taken, left_out = longest_fitting_prefix(list(HYBRID), HYBRID, room)
    assert taken == [key("a"), key("b"), key("a", 1), key("b", 1)]
    assert left_out == [key("c"), key("d"), key("c", 1), key("d", 1)]


def test_groups_with_blocks_of_different_length_are_cut_at_one_token():
    taken, left_out = longest_fitting_prefix(list(WIDE), WIDE, 4)
    assert taken == [key("a"), key("b"), key("c"), key("B", 1)]
    assert left_out == [key("d"), key("e"), key("f"), key("D", 1)]


def test_a_token_whose_blocks_do_not_all_fit_is_left_out():
    assert longest_fitting_prefix(list(HYBRID), HYBRID, 1) == ([], list(HYBRID))


def test_without_positions_one_group_is_cut_in_its_order_and_several_not_at_all():
    assert longest_fitting_prefix(ks("abc"), {}, 2) == (ks("ab"), ks("c"))
    assert longest_fitting_prefix(list(HYBRID), {}, 7) == ((), list(HYBRID))


@given(
    groups=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9)), min_size=1, max_size=3),
    room=st.integers(0, 30),
)
def test_what_is_taken_is_a_prefix_over_all_groups_and_no_longer_one_fits(groups, room):
    positions = {
        key(str(chunk), group): (chunk + 1) * size
        for group, (size, count) in enumerate(groups)
        for chunk in range(count)
    }
    keys = list(positions)
    taken, left_out = longest_fitting_prefix(keys, positions, room)
    assert sorted([*taken, *left_out]) == sorted(keys)
    assert len(taken) <= room
    assert list(taken) == [each for each in keys if each in set(taken)]
    if left_out:
        first = min(positions[each] for each in left_out)
        assert all(positions[each] < first for each in taken)
        assert sum(end <= first for end in positions.values()) > room


def test_what_lies_before_a_cut_is_told_by_position_or_else_by_order():
    assert those_before([], ks("ab"), {}) == ks("ab")
    assert those_before(ks("c"), ks("abcd"), {}) == ks("ab")
    assert those_before([key("c"), key("c", 1)], list(HYBRID), HYBRID) == [
        key("a"),
        key("b"),
        key("a", 1),
        key("b", 1),
    ]


def test_used_blocks_are_a_prefix_only_where_positions_say_so():
    precedes = prefix_test([key("c")], HYBRID.keys() - {key("b", 1)}, HYBRID)
    assert [name for name in HYBRID if precedes(name)] == [key("a"), key("b"), key("a", 1)]
    assert not any(map(prefix_test(ks("z"), ks("ab"), {}), ks("ab")))


# -- in the primary -----------------------------------------------------------------------------


def positions_of(names):
    return {k(name): end for end, name in enumerate(names, 1)}


def test_a_prompt_longer_than_the_free_part_stores_the_head_that_fits():
    """0 of 100 blocks were stored with 64 free, and 1,001 stores refused."""
    names = [f"block{i}" for i in range(100)]
    world = World(100, accept_prefix=True)
    busy = world.begin("busy")
    world.store(busy, [f"busy{i}" for i in range(36)])
    ctx = world.begin("r", key_positions=positions_of(names))
    granted = world.offer(ctx, names)
    assert list(granted.keys_to_store) == ks(names[:64])
    assert list(granted.keys_left_out) == ks(names[64:])
    world.wind_down()


def test_a_prompts_tail_never_evicts_its_own_head():
    world = World(4, accept_prefix=True)
    ctx = world.begin("r", key_positions=positions_of("abcdef"))
    assert list(world.store(ctx, "abcdef").keys_left_out) == ks("ef")
    world.finish_job()
    assert world.primary.counts["idle"] == 4
    assert world.offer(ctx, "ef") is None
    assert all(world.primary.lookup(each).name == "HIT" for each in ks("abcd"))
    world.finish(ctx)
    other = world.begin("s", key_positions=positions_of("wx"))
    assert world.offer(other, "wx").evicted_keys == ks("dc")
    world.wind_down()


def test_only_what_lies_before_a_cut_counts_as_offered():
    world = World(2, accept_prefix=True, admission=AdmissionFilter(2))
    ctx = world.begin("r", key_positions=positions_of("abcd"))
    assert world.offer(ctx, "abcd").keys_left_out == ()
    assert list(world.offer(ctx, "abcd").keys_left_out) == ks("cd")
    world.written()
    world.finish_job()
    world.finish(ctx)
    other = world.begin("s", key_positions=positions_of("cd"))
    assert list(world.offer(other, "cd").keys_to_store) == ks("cd")
    world.wind_down()
