"""Which head of a chain is found where blocks are packed, and at what price."""

import asyncio
import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.object import tier as tier_module
from kvoffload_async.tiers.object.packs import Chains, is_chunk_boundary
from kvoffload_async.tiers.object.tier import HeadSearch, longest_prefixes, most_questions

CHAIN = [key_of(number) for number in range(256)]
MOST_BEFORE = 100


class Store:
    """Objects in memory, cut as a writer cuts them."""

    def __init__(self, mean_blocks):
        self.mean_blocks = mean_blocks
        self.objects = {}
        self.asked = []
        self.chains = Chains()

    def put(self, keys, most=64):
        """Store blocks that follow each other, as packs."""
        begin = 0
        for i in range(1, len(keys) + 1):
            if i == len(keys) or i - begin >= most or is_chunk_boundary(keys[i], self.mean_blocks):
                self.objects.setdefault(keys[begin], keys[begin:i])
                begin = i

    async def ask(self, keys):
        self.asked += keys
        found = [key for key in keys if key in self.objects]
        for key in found:
            self.chains.saw_object(self.objects[key])
        return found

    def heads(self, *chains, before=()):
        self.asked.clear()
        searches = [
            HeadSearch(before, chain, self.chains, mean_blocks=self.mean_blocks, most=MOST_BEFORE)
            for chain in chains
        ]
        return asyncio.run(longest_prefixes(searches, self.ask))


def cuts(length):
    """Where jobs end in a chain of this length."""
    return st.lists(st.integers(1, length), max_size=4).map(lambda ends: sorted({*ends, length}))


@given(
    mean_blocks=st.sampled_from([1, 4, 16, 64]),
    length=st.integers(0, 256),
    head=st.integers(0, 256),
)
def test_what_one_job_has_stored_is_found_whole(mean_blocks, length, head):
    store = Store(mean_blocks)
    store.put(CHAIN[: min(head, length)])
    assert store.heads(CHAIN[:length]) == [min(head, length)]
    assert len(store.asked) <= most_questions(length)


@given(mean_blocks=st.sampled_from([4, 16, 64]), ends=cuts(64))
def test_what_several_jobs_have_stored_is_found_up_to_the_bound_of_questions(mean_blocks, ends):
    store = Store(mean_blocks)
    for begin, end in pairwise([0, *ends]):
        store.put(CHAIN[begin:end])
    (found,) = store.heads(CHAIN[:64])
    assert len(store.asked) <= most_questions(64)
    assert found == 64 or len(store.asked) == most_questions(64)


@given(mean_blocks=st.sampled_from([16, 64]), ends=cuts(64), start=st.integers(1, 63))
def test_a_reader_in_mid_prompt_walks_over_a_few_objects_and_no_more(mean_blocks, ends, start):
    store = Store(mean_blocks)
    for begin, end in pairwise([0, *ends]):
        store.put(CHAIN[begin:end])
    (found,) = store.heads(CHAIN[start:64], before=CHAIN[:start])
    assert len(store.asked) <= most_questions(64 - start)
    is_far = sum(1 for end in ends if end < start) > 2
    assert found == 64 - start or is_far or len(store.asked) == most_questions(64 - start)


@given(mean_blocks=st.sampled_from([16, 64]), start=st.integers(1, 63), head=st.integers(0, 64))
def test_a_reader_who_has_the_head_elsewhere_finds_the_rest_of_a_pack(mean_blocks, start, head):
    store = Store(mean_blocks)
    store.put(CHAIN[:head])
    (found,) = store.heads(CHAIN[start:64], before=CHAIN[:start])
    assert found == max(0, head - start) or len(store.asked) == most_questions(64 - start)


@pytest.mark.parametrize("mean_blocks", [4, 16])
def test_a_chain_that_is_there_whole_costs_two_questions_and_one_that_is_not_one(mean_blocks):
    store = Store(mean_blocks)
    assert store.heads(CHAIN[:64]) == [0]
    assert len(store.asked) == 1
    store.put(CHAIN[:64])
    assert store.heads(CHAIN[:64]) == [64]
    assert len(store.asked) == 2


def test_a_reader_who_does_not_know_what_precedes_finds_nothing_of_a_pack_begun_before():
    store = Store(64)
    chain = [key for key in CHAIN if not is_chunk_boundary(key, 64)][:20]
    store.put(chain)
    assert store.heads(chain[3:]) == [0]
    assert store.heads(chain[3:], before=chain[:3]) == [17]


@pytest.mark.parametrize("mean_blocks", [4, 8, 16])
def test_a_reader_of_small_packs_finds_larger_ones_once_he_has_seen_one(mean_blocks):
    store = Store(64)
    store.put(CHAIN)
    store.mean_blocks = mean_blocks
    assert any(is_chunk_boundary(key, mean_blocks) for key in store.objects[CHAIN[0]][1:])
    assert store.heads(CHAIN) == [256]
    assert store.heads(CHAIN[2:], before=CHAIN[:2]) == [254]


def test_keys_that_lead_everywhere_do_not_keep_a_reader_busy(monkeypatch):
    store = Store(4)
    store.objects[CHAIN[0]] = CHAIN[:30]
    monkeypatch.setattr(tier_module, "is_chunk_boundary", lambda key, mean_blocks: True)
    assert store.heads(CHAIN[:64]) == [30]


def test_a_reader_who_knows_the_pack_that_his_chain_begins_in_asks_for_that_one():
    store = Store(64)
    chain = [key for key in CHAIN if not is_chunk_boundary(key, 64)]
    store.put(chain[:40])
    store.chains.saw_object(chain[:40])
    assert store.heads(chain[10:50], before=chain[:10]) == [30]
    assert store.asked == [chain[0], chain[40]]


def test_a_reader_who_knows_what_precedes_goes_on_from_there_however_many_objects_that_is():
    store = Store(64)
    chain = [key for key in CHAIN if not is_chunk_boundary(key, 64)]
    for begin in range(0, 60, 6):
        store.put(chain[begin : begin + 6])
        store.chains.saw_object(chain[begin : begin + 6])
    store.chains.lost_object(chain[54])
    assert store.heads(chain[56:64], before=chain[:56]) == [4]
    assert store.asked == [chain[56], chain[54], chain[60]]


@given(
    mean_blocks=st.sampled_from([4, 64]),
    present=st.sets(st.integers(0, 63)),
    start=st.integers(0, 63),
    ends=cuts(64),
)
def test_gaps_and_single_blocks_cost_no_more_questions(mean_blocks, present, start, ends):
    store = Store(mean_blocks)
    for begin, end in pairwise([0, *ends]):
        store.put([CHAIN[i] for i in range(begin, end) if i in present])
    (found,) = store.heads(CHAIN[start:64], before=CHAIN[:start])
    assert 0 <= found <= 64 - start
    assert len(store.asked) <= most_questions(64 - start)


@given(mean_blocks=st.sampled_from([1, 4, 64]), head=st.integers(0, 64))
def test_of_blocks_that_were_stored_one_by_one_nearly_all_are_found(mean_blocks, head):
    store = Store(mean_blocks)
    store.put(CHAIN[:head], most=1)
    (found,) = store.heads(CHAIN[:64])
    assert head - 4 <= found <= head
    assert mean_blocks > 1 or found == head
    assert len(store.asked) <= 8


def test_another_prompt_shares_the_pack_of_the_first_one_up_to_where_they_part():
    store = Store(64)
    chain = [key for key in CHAIN if not is_chunk_boundary(key, 64)]
    one, other = chain[:40], [*chain[:10], *chain[50:80]]
    store.put(one)
    assert store.heads(other) == [10]
    store.put(other[10:])
    assert store.heads(other) == [40]
    assert len(store.asked) <= 3


@pytest.mark.no_cover
@pytest.mark.parametrize("draws", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_probe_of_64_blocks_costs_more_than_8_questions_however_they_were_stored(draws):
    source, costs = random.Random(1), Counter()
    for _ in range(draws):
        store = Store(source.choice((1, 8, 64)))
        head = source.choice((0, 64, source.randint(0, 64)))
        begin = 0
        while begin < head:
            end = min(head, begin + source.choice((1, 1, 4, 16, 64)))
            store.put(CHAIN[begin:end])
            begin = end
        start = source.choice((0, 0, source.randint(0, 63)))
        (found,) = store.heads(CHAIN[start : start + 64], before=CHAIN[:start])
        assert found <= max(0, head - start)
        costs[len(store.asked)] += 1
    assert max(costs) <= 8


@given(jobs=st.integers(0, 16))
def test_a_chain_that_nobody_has_costs_one_question_and_three_more_where_its_head_is_known(jobs):
    store = Store(64)
    keys = [key for key in CHAIN if not is_chunk_boundary(key, 64)]
    for begin in range(0, 16, 16 // jobs) if jobs else ():
        store.put(keys[begin : begin + 16 // jobs])
    assert store.heads(keys[16:80], before=keys[:16]) == [0]
    assert len(store.asked) <= 4
    assert store.heads(keys[16:80]) == [0]
    assert len(store.asked) == 1


def test_chains_with_a_common_head_share_their_questions():
    store = Store(16)
    store.put(CHAIN[:40])
    assert store.heads(*[CHAIN[:64]] * 32) == [40] * 32
    assert len(store.asked) <= 8


@pytest.mark.parametrize("mean_blocks", [4, 16, 64])
def test_one_block_in_so_many_leads_and_also_with_every_narrower_mean_blocks(mean_blocks):
    keys = [key_of(number) for number in range(64 * 1000)]
    leads = [key for key in keys if is_chunk_boundary(key, mean_blocks)]
    assert len(leads) == pytest.approx(len(keys) / mean_blocks, rel=0.15)
    assert all(is_chunk_boundary(key, mean_blocks // 2) for key in leads)
