"""Which prefix of a chain is found, and with how many requests."""

import asyncio
from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st
from remote.object.tiers import K, head, loads

from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.object.tier import bisect_prefixes

CHAIN = [key_of(number) for number in range(256)]


def most_requests(num_keys):
    return min(num_keys, 2 + ceil(log2(max(1, num_keys - 1))))


def search(present, *chains):
    """Return the lengths that are found, and the keys that were asked for."""
    asked = []

    async def ask(keys):
        assert len(set(keys)) == len(keys)
        asked.extend(keys)
        return present.intersection(keys)

    return asyncio.run(bisect_prefixes(chains, ask)), asked


@given(length=st.integers(0, 256), stored=st.integers(0, 256))
def test_a_stored_prefix_is_found_whole(length, stored):
    found, asked = search(set(CHAIN[:stored]), CHAIN[:length])
    assert found == [min(length, stored)]
    assert len(asked) <= most_requests(length)


def test_a_chain_that_is_absent_costs_one_request_and_one_that_is_stored_two():
    assert search(set(), CHAIN) == ([0], CHAIN[:1])
    assert search(set(CHAIN), CHAIN) == ([256], [CHAIN[0], CHAIN[-1]])
    assert search(set(CHAIN), CHAIN[:1]) == ([1], CHAIN[:1])
    assert search(set(CHAIN), []) == ([0], [])
    assert search(set(CHAIN)) == ([], [])


@given(present=st.sets(st.integers(0, 63)), length=st.integers(1, 64))
def test_with_gaps_the_prefix_ends_at_a_stored_block_and_before_an_absent_one(present, length):
    (found,), asked = search({CHAIN[i] for i in present}, CHAIN[:length])
    assert not found or found - 1 in present
    assert found == length or found not in present
    assert len(asked) <= most_requests(length)


@given(lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=5))
def test_each_of_several_chains_has_its_own_prefix(lengths):
    chains = [
        [key_of(1000 * number + i) for i in range(length)]
        for number, (length, _) in enumerate(lengths)
    ]
    present = {
        key for chain, (_, stored) in zip(chains, lengths, strict=True) for key in chain[:stored]
    }
    found, _ = search(present, *chains)
    assert found == [min(pair) for pair in lengths]


def test_chains_with_a_common_prefix_share_their_requests():
    found, asked = search(set(CHAIN[:40]), *[CHAIN[:64]] * 32)
    assert found == [40] * 32
    assert len(asked) <= 8


def test_a_gap_costs_the_load_of_its_block_and_is_filled_by_a_store(host, connection):
    one, other = host(), host()
    assert one.store([*K[:3], *K[4:8]]) == {}
    assert head(other, K[:8]) == 8, "those before a stored block are assumed to be stored"
    failures = other.load(K[:8])
    assert list(failures) == [3]
    assert other.is_untouched(3)
    assert other.store(K[:8]) == {}
    assert loads(one, K[:8])


@pytest.mark.parametrize("block_bytes", [256 << 10, 2 << 20])
def test_64_blocks_cost_a_put_each_to_store_after_a_look_up_and_a_get_each_to_load(
    host, block_bytes
):
    writer, reader = (host(block_bytes, negative_cache_ttl_s=600.0) for _ in range(2))
    assert requests(writer, lambda one: head(one, K) == 0) == 1
    assert requests(writer, lambda one: one.store(K) == {}) == 64
    assert requests(reader, lambda one: head(one, K) == 64) == 2
    assert requests(reader, lambda one: loads(one, K)) == 64


def test_without_a_look_up_or_a_cache_64_blocks_cost_a_head_and_a_put_each_to_store(host):
    remembers, forgets = host(negative_cache_ttl_s=600.0), host()
    assert requests(remembers, lambda one: one.store(K[:32]) == {}) == 2 * 32
    assert head(forgets, K[32:]) == 0
    assert requests(forgets, lambda one: one.store(K[32:]) == {}) == 2 * 32


def test_the_blocks_behind_a_prefix_cost_a_put_each_to_store(host):
    writer, other = host(), host(negative_cache_ttl_s=600.0)
    assert writer.store(K[:20]) == {}
    assert head(other, K) == 20
    assert requests(other, lambda one: one.store(K[20:]) == {}) == 44
    assert loads(writer, K)


def test_a_stored_block_behind_an_absent_one_is_not_overwritten(host):
    one, other = host(), host(negative_cache_ttl_s=600.0)
    assert one.store([*K[:2], K[5]]) == {}
    assert head(other, K[:8]) == 2
    assert requests(other, lambda one: one.store(K[:8]) == {}) == 2 + 6
    assert other.tier.gauges()["present_blocks"] == 3
    assert loads(one, K[:8])


def test_a_look_up_answered_by_the_cache_prolongs_no_cached_answer(host):
    one = host(negative_cache_ttl_s=600.0)
    assert head(one, K) == 0
    before = dict(one.tier._memory._absent._expiry)
    assert len(before) == len(K)
    assert requests(one, lambda one: head(one, K) == 0) == 0
    assert one.tier._memory._absent._expiry == before


def requests(harness, call):
    """Return how many requests a successful call costs."""
    before = harness.tier.gauges()["requests"]
    assert call(harness)
    return harness.tier.gauges()["requests"] - before
