"""How often a policy asks whether a block may go, whatever must stay: counted, not timed."""

import runpy
from pathlib import Path

import pytest
from core.terms import ranked

from kvoffload_async.abc.policy import CachePolicy
from kvoffload_async.core.primary import Primary
from kvoffload_async.policies.arc import ArcPolicy
from kvoffload_async.policies.lru import LruPolicy
from kvoffload_async.testing.harness import key_of
from kvoffload_async.types import ReqContext

NUM_SLOTS = 5_000
NUM_PINNED = 3_500
EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_policy.py"
LfuPolicy = runpy.run_path(str(EXAMPLE))["LfuPolicy"]

K = [key_of(number) for number in range(NUM_SLOTS)]
NEW = [key_of(number) for number in range(NUM_SLOTS, 2 * NUM_SLOTS)]


class ForgetfulPolicy(CachePolicy):
    """A user's own, written before there was `released`: asks about everything every time."""

    name = "forgetful"

    def __init__(self, capacity_blocks):
        super().__init__(capacity_blocks)
        self.order: dict[int, None] = {}

    def make_room(self, incoming, count, is_evictable):
        victims = [slot for slot in self.order if is_evictable(slot)][:count]
        if len(victims) < count:
            return None
        self.discard(victims)
        return victims

    def admit(self, keys, slots):
        self.order.update(dict.fromkeys(slots))

    def access(self, slots, reused):
        for slot in slots[::-1]:
            del self.order[slot]
            self.order[slot] = None

    def discard(self, slots):
        for slot in slots:
            del self.order[slot]

    def clear(self):
        self.order.clear()

    def resident(self):
        return list(self.order)


class Counted:
    """A full primary under a policy whose questions are counted."""

    def __init__(self, policy, *, num_slots=NUM_SLOTS, twice=()):
        self.num_questions = 0
        self.primary = Primary(num_slots, self.counting(policy)(num_slots))
        self.ctx = ReqContext("r")
        self.primary.open_request(self.ctx)
        self.store(K[:num_slots])
        if twice:
            self.primary.touch(ReqContext("unknown"), twice)
        self.num_questions = 0

    def counting(self, policy):
        class Counting(policy):
            def make_room(counting, incoming, count, is_evictable):
                def asked(slot):
                    self.num_questions += 1
                    return is_evictable(slot)

                return super().make_room(incoming, count, asked)

        return Counting

    def store(self, keys):
        granted = self.primary.prepare_store(self.ctx, keys)
        self.primary.complete_store(self.ctx, keys, success=True)
        return granted.evicted_keys

    def reserve(self, key):
        """Make room for one block, which comes at once; return what had to go for it."""
        before = set(ranked(self.primary))
        assert self.primary.reserve([key])
        self.primary.complete_write([key], success=True)
        return before - set(ranked(self.primary))


BOUNDED = pytest.mark.parametrize("policy", [LruPolicy, ArcPolicy, LfuPolicy])
ALL = pytest.mark.parametrize("policy", [LruPolicy, ArcPolicy, LfuPolicy, ForgetfulPolicy])


@BOUNDED
@pytest.mark.parametrize("num_twice", [0, NUM_SLOTS // 2])
def test_promotions_ask_about_each_pinned_block_once(policy, num_twice):
    cache = Counted(policy, twice=K[:num_twice])
    cache.primary.pin(K[:NUM_PINNED])
    for key in NEW[:1000]:
        assert cache.primary.reserve([key])
    assert cache.num_questions <= NUM_PINNED + 2 * 1000


@BOUNDED
def test_unpinning_costs_one_more_question_a_block(policy):
    cache = Counted(policy)
    for number, key in enumerate(NEW[:300]):
        cache.primary.pin(K[:NUM_PINNED] if not number else K[number - 1 : number])
        cache.store([key])
        cache.primary.unpin(K[number : number + 1])
        cache.primary.pin(K[number : number + 1])
    assert cache.num_questions <= NUM_PINNED + 4 * 300


@BOUNDED
def test_stores_ask_about_their_own_blocks_and_about_each_writing_one_once(policy):
    cache = Counted(policy)
    cache.primary.prepare_store(cache.ctx, NEW[:2000])
    cache.num_questions = 0
    for start in range(2000, 2800, 8):
        cache.primary.prepare_store(cache.ctx, [*K[2000:2008], *NEW[start : start + 8]])
    assert cache.num_questions <= 100 * (2 * 8 + 8)


@ALL
def test_a_block_that_is_unpinned_goes_at_its_old_rank(policy):
    cache = Counted(policy, num_slots=8)
    cache.primary.pin(K[:4])
    assert cache.store(NEW[:1]) == K[4:5]
    cache.primary.unpin([K[2]])
    cache.primary.unpin([K[1]])
    assert cache.store(NEW[1:3]) == K[1:3]
    cache.primary.unpin([K[3]])
    assert cache.store(NEW[3:5]) == [K[3], K[5]]
    cache.primary.unpin([K[0]])
    assert cache.store(NEW[5:6]) == K[:1]
    assert not cache.primary.forgotten()


@ALL
def test_a_block_that_was_written_while_room_was_made_goes_at_its_rank(policy):
    cache = Counted(policy, num_slots=4)
    cache.primary.reset()
    cache.primary.prepare_store(cache.ctx, NEW[:2])
    cache.store(NEW[2:4])
    assert cache.reserve(NEW[4]) == {NEW[2]}
    cache.primary.complete_store(cache.ctx, NEW[:2], success=True)
    assert cache.store(NEW[5:7]) == NEW[:2]


@ALL
def test_what_a_store_offers_again_may_go_for_the_next_one(policy):
    cache = Counted(policy, num_slots=4)
    assert cache.store([*K[:2], NEW[0]]) == [K[2]]
    assert not cache.primary.forgotten()
    assert cache.store(NEW[1:3]) == K[:2]


def test_a_policy_that_fails_leaves_the_offered_blocks_as_they_were():
    class Failing(LruPolicy):
        def make_room(self, incoming, count, is_evictable):
            if not count:
                return super().make_room(incoming, count, is_evictable)
            raise RuntimeError("out of order")

    cache = Counted(Failing, num_slots=4)
    with pytest.raises(RuntimeError, match="out of order"):
        cache.primary.prepare_store(cache.ctx, [K[0], NEW[0]])
    assert cache.primary.counts["idle"] == 4
    assert [refs for _, _, refs in cache.primary.resident()] == [0] * 4


def test_a_policy_that_skips_what_may_go_is_found_out():
    class Deaf(LruPolicy):
        def released(self, slots):
            pass

    cache = Counted(Deaf, num_slots=4)
    cache.primary.pin(K[:1])
    cache.store(NEW[:1])
    assert not cache.primary.forgotten()
    cache.primary.unpin(K[:1])
    assert cache.primary.forgotten() == K[:1]


def test_a_policy_is_told_once_that_a_block_may_go():
    evictable = []

    class Listening(LruPolicy):
        def released(self, slots):
            evictable.extend(slots)
            super().released(slots)

    cache = Counted(Listening, num_slots=4)
    slots = cache.primary.pin(K[:2])
    cache.primary.pin(K[:1])
    evictable.clear()
    cache.primary.unpin(K[:2])
    assert evictable == slots[1:]
    cache.primary.unpin(K[:1])
    assert evictable == slots[::-1]
    cache.primary.unpin([])
    assert evictable == slots[::-1]


def test_a_policy_is_told_of_nothing_that_a_reset_has_forgotten():
    evictable = []

    class Listening(LruPolicy):
        def released(self, slots):
            evictable.extend(slots)
            super().released(slots)

    cache = Counted(Listening, num_slots=4)
    cache.primary.pin(K[:2])
    evictable.clear()
    cache.primary.reset()
    cache.store(NEW[:2])
    assert evictable == [cache.primary.slot_of(key) for key in NEW[:2]]
