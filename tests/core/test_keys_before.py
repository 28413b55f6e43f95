"""Which keys a probe says come right before the chains that it asks for."""

import pytest
from core.terms import MISS, RETRY, k, ks
from hypothesis import given
from hypothesis import strategies as st

from kvoffload_async.core.index import ProbedIndex, nearest_before
from kvoffload_async.types import ReqContext, make_offload_key

TOKENS = 16


def key(name, group=0):
    return make_offload_key(str(name).encode(), group)


def positions_of(keys):
    return {key: TOKENS * number for number, key in enumerate(keys, 1)}


def request(*groups):
    """A request whose keys all have positions, group by group."""
    return ReqContext("r", key_positions={k: p for g in groups for k, p in positions_of(g).items()})


def index_of(keys_before=2, **options):
    return ProbedIndex(2, keeps_order=True, keys_before=keys_before, **options)


def probe(index, keys, ctx):
    assert [index.lookup(key, ctx) for key in keys] == [RETRY] * len(keys)
    return index.next_probe()


def test_a_chain_in_the_middle_of_a_prompt_comes_with_the_nearest_keys_before_it():
    asked = probe(index_of(), ks("de"), request(ks("abcdef")))
    assert asked.chains == (tuple(ks("de")),)
    assert asked.before == (tuple(ks("bc")),)


def test_before_the_head_of_a_prompt_there_are_as_many_as_there_are():
    assert probe(index_of(), ks("ab"), request(ks("abc"))).before == ((),)
    assert probe(index_of(9), ks("c"), request(ks("abc"))).before == (tuple(ks("ab")),)


@pytest.mark.parametrize("keys_before", [0, -1])
def test_a_tier_that_wants_none_is_told_none(keys_before):
    asked = probe(index_of(keys_before), ks("bc"), request(ks("abc")))
    assert asked.chains == (tuple(ks("bc")),)
    assert asked.before == ()


def test_a_tier_that_is_asked_for_no_chains_is_told_no_keys_before_them():
    index = ProbedIndex(2, keys_before=2)
    assert probe(index, ks("bc"), request(ks("abc"))).before == ()


def test_keys_that_were_answered_before_are_told_too():
    index = index_of(3)
    ctx = request(ks("abcd"))
    first = probe(index, ks("ab"), ctx)
    index.answered(first.generation, frozenset(ks("a")))
    assert index.lookup(k("b"), ctx) is MISS
    assert probe(index, ks("cd"), ctx).before == (tuple(ks("ab")),)


def test_a_chain_that_a_bound_divides_comes_with_its_own_head():
    index = index_of(keys_per_probe=3)
    ctx = request(ks("abcde"))
    assert probe(index, ks("abcde"), ctx).before == ((),)
    second = index.next_probe()
    assert (second.chains, second.before) == ((tuple(ks("de")),), (tuple(ks("bc")),))


def test_each_group_comes_with_keys_of_its_own():
    wide, narrow = ([key(name, group) for name in "abcd"] for group in (0, 1))
    asked = probe(index_of(), [*wide[2:], *narrow[1:]], request(wide, narrow))
    assert asked.chains == (tuple(wide[2:]), tuple(narrow[1:]))
    assert asked.before == (tuple(wide[:2]), tuple(narrow[:1]))


def test_a_group_that_is_looked_up_from_its_tail_on_is_told_nothing():
    """There a block is of use without those before it, and each is a chain of its own."""
    full, window = ([key(name, group) for name in "abcd"] for group in (0, 1))
    asked = probe(index_of(), [full[2], *window[:0:-1], full[3]], request(full, window))
    assert asked.chains == (tuple(full[2:]), *((key,) for key in window[:0:-1]))
    assert asked.before == (tuple(full[:2]), (), (), ())


def test_each_request_tells_what_it_knows_of_keys_that_others_ask_for():
    index = index_of()
    one, other = request(ks("abcd")), request(ks("abxy"))
    assert [index.lookup(key, one) for key in ks("bcd")] == [RETRY] * 3
    assert probe(index, ks("bxy"), other).before == (tuple(ks("a")), tuple(ks("ab")))


def test_where_positions_are_missing_nothing_is_told():
    ctx = request(ks("ab"))
    assert probe(index_of(), ks("xyz"), ctx).before == ((),)
    assert probe(index_of(), ks("xyz"), ReqContext("r")).before == ((),)
    assert probe(index_of(), ks("xyz"), "a name").before == ((),)


def test_a_key_at_the_very_start_comes_before_the_others():
    assert nearest_before(k("c"), {k("a"): 0, k("b"): 1, k("c"): 2}, 2) == tuple(ks("ab"))


@given(
    groups=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), min_size=1, max_size=3),
    keys_before=st.integers(1, 14),
    draw=st.randoms(use_true_random=False),
)
def test_what_is_told_and_what_is_asked_for_are_one_stretch_of_the_prompt(
    groups, keys_before, draw
):
    keys = [
        [key(number, group) for number in range(head + asked)]
        for group, (head, asked) in enumerate(groups)
    ]
    known = list(request(*keys).key_positions.items())
    draw.shuffle(known)
    ctx = ReqContext("r", key_positions=dict(known))
    wanted = [key for each, (head, _) in zip(keys, groups, strict=True) for key in each[head:]]
    asked = probe(index_of(keys_before), wanted, ctx)
    assert [
        (*before, *chain) for before, chain in zip(asked.before, asked.chains, strict=True)
    ] == [
        tuple(each[max(0, head - keys_before) :])
        for each, (head, _) in zip(keys, groups, strict=True)
    ]


@given(
    ends=st.dictionaries(st.tuples(st.integers(0, 30), st.integers(0, 2)), st.integers(0, 40)),
    most=st.integers(1, 8),
    data=st.data(),
)
def test_the_nearest_keys_are_those_with_the_largest_of_the_smaller_positions(ends, most, data):
    positions = {key(*name): end for name, end in ends.items()}
    name = data.draw(st.sampled_from([*ends, (31, 0)]))
    found = nearest_before(key(*name), positions, most)
    end = ends.get(name, 0)
    smaller = sorted(e for other, e in ends.items() if other[1] == name[1] and e < end)
    assert [positions[each] for each in found] == smaller[-most:]
    assert len(set(found)) == len(found)
    assert all(each in positions and each.endswith(key(*name)[-4:]) for each in found)
