"""What a policy declines: who asks, what is stored, and what the policy is told at the end."""

import pytest

from kvoffload_async.core.primary import Primary
from kvoffload_async.policies.lru import LruPolicy
from kvoffload_async.types import ReqContext, make_offload_key


def ks(names, group=0):
    return [make_offload_key(name.encode(), group) for name in names]


class Choosy(LruPolicy):
    """Declines the keys that it is told to, and writes down what it is told."""

    follows_requests = True

    def __init__(self, capacity_blocks):
        super().__init__(capacity_blocks)
        self.unwanted, self.offers, self.ended = (), [], []

    def declines(self, request, keys, missing, free, is_evictable):
        evictable = [slot for slot in self.resident() if is_evictable(slot)]
        self.offers.append((list(keys), list(missing), free, evictable))
        return [key for key in missing if key in self.unwanted] if free is not None else ()

    def request_ended(self, request, keys, slots, reused):
        self.ended.append((list(keys), list(slots), list(reused)))
        super().request_ended(request, keys, slots, reused)


@pytest.fixture
def primary():
    return Primary(4, Choosy(4), accept_prefix=True)


def begin(primary, names=""):
    ctx = ReqContext("r", key_positions={key: n for n, key in enumerate(ks(names), 1)})
    primary.open_request(ctx)
    return ctx


def store(primary, ctx, keys):
    granted = primary.prepare_store(ctx, keys)
    primary.complete_store(ctx, granted.keys_to_store, success=True)
    return granted


def test_a_declined_block_is_neither_stored_nor_left_out(primary):
    primary.policy.unwanted = ks("b")
    granted = store(primary, begin(primary), ks("abc"))
    assert (granted.keys_to_store, granted.keys_left_out) == (ks("ac"), ())
    assert primary.counters.declined_blocks == 1


def test_a_declined_block_is_told_at_its_place_when_the_request_ends(primary):
    primary.policy.unwanted = ks("b")
    ctx, other = begin(primary, "abc"), begin(primary, "x")
    store(primary, ctx, ks("bc"))
    store(primary, other, ks("x"))
    store(primary, ctx, ks("a"))
    primary.close_request(other)
    primary.close_request(ctx)
    (a, c) = (primary.slot_of(key) for key in ks("ac"))
    assert primary.policy.ended[1] == (ks("abc"), [a, None, c], [False] * 3)
    assert (primary.counters.used_blocks, primary.counters.found_blocks) == (4, 0)


def test_a_block_that_was_declined_and_then_stored_counts_as_stored(primary):
    primary.policy.unwanted = ks("a")
    ctx = begin(primary)
    store(primary, ctx, ks("a"))
    primary.policy.unwanted = ()
    store(primary, ctx, ks("a"))
    primary.close_request(ctx)
    assert primary.policy.ended == [(ks("a"), [primary.slot_of(*ks("a"))], [False])]


def test_the_policy_sees_the_prompt_in_order_and_keeps_its_own_blocks(primary):
    store(primary, begin(primary), ks("xyz"))
    ctx = begin(primary, "axbc")
    primary.prepare_load(ctx, ks("x"))
    primary.complete_load(ctx, ks("x"))
    store(primary, ctx, ks("cbx"))
    keys, missing, free, evictable = primary.policy.offers[-1]
    assert (keys, missing, free) == (ks("xbc"), ks("bc"), 1)
    assert primary.slot_of(*ks("x")) not in evictable
    assert primary.forgotten() == []


def test_the_head_that_a_request_has_used_is_kept_when_its_tail_is_offered(primary):
    ctx = begin(primary, "abcd")
    store(primary, ctx, ks("ab"))
    store(primary, ctx, ks("cd"))
    *_, evictable = primary.policy.offers[-1]
    assert evictable == []
    assert primary.forgotten() == []


def test_what_the_policy_has_skipped_is_released_though_all_is_declined(primary):
    ctx = begin(primary, "abcd")
    store(primary, ctx, ks("ab"))
    released = []
    primary.policy.released = released.extend
    primary.policy.unwanted = ks("c")
    store(primary, ctx, ks("c"))
    assert {primary.slot_of(key) for key in ks("ab")} <= set(released)


def test_where_nothing_may_be_declined_the_policy_is_told(primary):
    primary.may_decline = False
    primary.policy.unwanted = ks("a")
    assert store(primary, begin(primary), ks("a")).keys_to_store == ks("a")
    assert primary.policy.offers[-1][2] is None


def test_a_touch_without_a_request_counts_as_one(primary):
    store(primary, begin(primary), ks("ab"))
    primary.touch(ReqContext("gone"), ks("ab"))
    primary.touch(ReqContext("gone"), [])
    assert primary.policy.ended == [
        (ks("ab"), [primary.slot_of(key) for key in ks("ab")], [True, True])
    ]


def test_protected_blocks_that_the_policy_has_proposed_rank_anew_when_their_request_ends(primary):
    ctx, other = begin(primary), begin(primary)
    slots = store(primary, ctx, ks("abcd")).store_spec.block_ids.tolist()
    primary.protect(slots)
    primary.drops_pending = False
    assert primary.prepare_store(other, ks("x")) is None
    primary.close_request(ctx)
    primary.unprotect(slots)
    assert primary.prepare_store(other, ks("x")).evicted_keys == ks("d")
