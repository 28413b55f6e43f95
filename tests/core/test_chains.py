"""Probes of a tier that is asked for the longest heads: which keys belong to which chain."""

from core.terms import RETRY, k, ks

from kvoffload_async.core.index import ProbedIndex
from kvoffload_async.types import ReqContext, make_offload_key


def asked(index, keys, request):
    assert [index.lookup(key, request) for key in keys] == [RETRY] * len(keys)


def positioned(keys):
    return ReqContext("r", key_positions={key: 16 * (i + 1) for i, key in enumerate(keys)})


def test_keys_of_a_request_are_a_chain_in_the_order_of_their_lookups():
    index = ProbedIndex(2, keeps_order=True)
    asked(index, ks("abc"), "A")
    asked(index, ks("xy"), "B")
    probe = index.next_probe()
    assert probe.keys == tuple(ks("abcxy"))
    assert probe.chains == (tuple(ks("abc")), tuple(ks("xy")))


def test_a_shared_head_belongs_to_the_request_that_asked_first():
    index = ProbedIndex(2, keeps_order=True)
    asked(index, ks("ab"), "A")
    asked(index, ks("abcd"), "B")
    assert index.next_probe().chains == (tuple(ks("ab")), tuple(ks("cd")))


def test_groups_are_chains_of_their_own():
    index = ProbedIndex(2, keeps_order=True)
    first, second = ([make_offload_key(name, group) for name in (b"a", b"b")] for group in (0, 1))
    asked(index, [first[0], second[0], first[1], second[1]], "A")
    assert index.next_probe().chains == (tuple(first), tuple(second))


def test_keys_in_the_order_of_their_positions_are_one_chain():
    index = ProbedIndex(2, keeps_order=True)
    keys = ks("abc")
    asked(index, keys, positioned(keys))
    assert index.next_probe().chains == (tuple(keys),)


def test_keys_that_are_looked_up_from_the_tail_on_are_chains_of_one():
    index = ProbedIndex(2, keeps_order=True)
    keys = ks("abc")
    asked(index, keys[::-1], positioned(keys))
    assert index.next_probe().chains == tuple((key,) for key in keys[::-1])


def test_a_bound_on_a_probe_divides_a_chain():
    index = ProbedIndex(2, keys_per_probe=2, keeps_order=True)
    asked(index, ks("abc"), "A")
    assert index.next_probe().chains == (tuple(ks("ab")),)
    assert index.next_probe().chains == ((k("c"),),)


def test_a_probe_says_nothing_of_chains_unless_it_is_asked_to():
    index = ProbedIndex(2)
    asked(index, ks("ab"), "A")
    assert index.next_probe().chains == ()
