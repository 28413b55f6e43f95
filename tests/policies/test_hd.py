"""HD: what it keeps, what it declines, and that it equals a naive implementation."""

import math
import random
from functools import partial
from itertools import groupby
from operator import itemgetter
from zlib import crc32

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from policies.naive_hd import NaiveHd, known_blocks

from kvoffload_async.core.primary import Primary
from kvoffload_async.policies import hd, reuse
from kvoffload_async.policies.hd import HdPolicy
from kvoffload_async.types import LookupResult, ReqContext, make_offload_key


def key(name, group=0):
    return make_offload_key(str(name).encode().ljust(4, b"_"), group)


is_close = partial(math.isclose, rel_tol=1e-6, abs_tol=1e-12)
"""As `pytest.approx`, whose objects would take most of the machine's time."""


class Cache:
    """A primary that serves whole prompts, as an engine does."""

    def __init__(self, num_blocks, policy="hd"):
        self.primary = Primary(num_blocks, HdPolicy(num_blocks), accept_prefix=True)
        self.policy = self.primary.policy
        self.served = 0

    def serve(self, *names, length=None):
        """Serve a prompt; return how long its head in the cache was."""
        prompt = [key(name) for name in names]
        whole = [*prompt, *(key(f"beyond {n}") for n in range((length or 0) - len(names)))]
        ctx = ReqContext(str(self.served), key_positions={k: n for n, k in enumerate(whole, 1)})
        self.served += 1
        self.primary.open_request(ctx)
        found = [answer is LookupResult.HIT for answer in self.primary.lookup_many(prompt)]
        granted = self.primary.prepare_store(ctx, prompt)
        if granted is not None:
            self.primary.complete_store(ctx, granted.keys_to_store, success=True)
        self.primary.close_request(ctx)
        assert list(self.policy.violations()) == []
        return found.index(False) if False in found else len(found)

    def has(self, *names):
        answers = self.primary.lookup_many([key(name) for name in names])
        return [answer is LookupResult.HIT for answer in answers]


def test_of_a_loop_that_does_not_fit_most_is_kept():
    cache = Cache(60)
    hits = 0
    for turn in range(40):
        for start in range(0, 80, 4):
            found = cache.serve(*range(start, start + 4))
            hits += found if turn >= 20 else 0
    assert hits / (20 * 80) > 0.6  # LRU finds none, an optimum 0.74
    assert cache.primary.counters.declined_blocks > 0


def test_blocks_of_a_scan_are_declined_once_it_is_known_that_they_never_return():
    cache = Cache(40)
    chance = random.Random(1)
    new = iter(range(1_000, 1_000_000))
    for _ in range(400):
        cache.serve(*(f"{chance.randrange(8)}:{n}" for n in range(4)))
        cache.serve(*(next(new) for _ in range(4)))
    before = cache.primary.counters.declined_blocks
    for _ in range(20):
        cache.serve(*(next(new) for _ in range(4)))
    assert cache.primary.counters.declined_blocks - before > 60  # of 80
    assert all(all(cache.has(*(f"{who}:{n}" for n in range(4)))) for who in range(8))


def test_when_a_head_leaves_its_tails_go_before_older_blocks():
    policy = HdPolicy(6)
    for name, slot in ("old", 4), ("older", 5):
        policy.admit([key(name)], [slot])
        policy.request_ended(ReqContext(name), [key(name)], [slot], [False])
    policy.admit([key(n) for n in "abcd"], [0, 1, 2, 3])
    policy.request_ended(ReqContext("r"), [key(n) for n in "abcd"], [0, 1, 2, 3], [False] * 4)
    assert policy.make_room([key("y")], 1, lambda slot: slot == 1) == [1]  # the others are pinned
    policy.released([0, 2, 3, 4, 5])
    assert policy.make_room([key("z"), key("w")], 2, lambda _: True) == [3, 2]


def test_a_block_behind_an_absent_one_goes_before_older_blocks():
    policy = HdPolicy(3)
    policy.admit([key("old")], [0])
    policy.request_ended(ReqContext("r"), [key("old")], [0], [False])
    names = [key(n) for n in "abcd"]
    policy.admit([names[2], names[3]], [1, 2])
    policy.request_ended(ReqContext("s"), names, [None, None, 1, 2], [False] * 4)
    assert policy.make_room([], 3, lambda _: True) == [2, 1, 0]


def request(policy, ctx_id, names, first_slot):
    """Admit the blocks of a request to slots from the first one on, and end the request."""
    keys = [key(name) for name in names]
    slots = list(range(first_slot, first_slot + len(keys)))
    policy.admit(keys, slots)
    policy.request_ended(ReqContext(ctx_id), keys, slots, [False] * len(keys))
    return slots


class Moved:
    """A ranking that notes how many members each call moves."""

    def __init__(self, ranking):
        self.ranking, self.counts = ranking, []

    def __getattr__(self, name):
        return getattr(self.ranking, name)

    def put_first(self, numbers):
        self.counts.append(len(numbers))
        self.ranking.put_first(numbers)


def chain(policy, count):
    return request(policy, "chain", range(count), 0)


def star(policy, count):
    """A head that is followed by another block in each prompt."""
    request(policy, "head", "h", 0)
    for slot in range(1, count):
        policy.admit([key(slot)], [slot])
        ctx = ReqContext(str(slot))
        policy.request_ended(ctx, [key("h"), key(slot)], [0, slot], [True, False])
    return list(range(count))


@pytest.mark.parametrize("shape", [chain, star])
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.no_cover), 8])
def test_where_a_block_leaves_no_call_moves_more_than_some_of_those_behind_it(shape, count):
    num_behind, num_others = 1_500, 100
    policy = HdPolicy(num_behind + num_others)
    others = request(policy, "others", range(2_000, 2_000 + num_others), num_behind)
    behind = shape(policy, num_behind)
    moved = policy.ranking = Moved(policy.ranking)
    assert policy.make_room([], 1, lambda slot: slot == 0) == [0]  # the others are pinned
    policy.released([*behind[1:], *others])
    gone = []
    while len(gone) < num_behind - 1:
        number = min(count, num_behind - 1 - len(gone))
        gone += policy.make_room([], number, lambda _: True)
        assert list(policy.violations()) == []
    assert sorted(gone) == behind[1:]  # what no prompt can reach went before older blocks
    assert sum(moved.counts) == num_behind - 1
    most = hd._ORPHANS_A_CALL + hd._ORPHANS_PER_BLOCK * count
    assert max(moved.counts) == most
    last = gone[sum(each == most for each in moved.counts) * count :]
    if shape is chain:  # once all are moved, tails go before heads
        assert last == sorted(last, reverse=True)
        assert len(last) > 1_000
    assert policy.make_room([], num_others, lambda _: True) == others[::-1]


@pytest.mark.parametrize("as_head", [True, False])
def test_a_block_that_is_used_again_before_it_is_moved_keeps_its_rank(as_head, monkeypatch):
    monkeypatch.setattr(hd, "_ORPHANS_A_CALL", 0)
    monkeypatch.setattr(hd, "_ORPHANS_PER_BLOCK", 1)
    policy = HdPolicy(6)
    request(policy, "others", "yz", 4)
    keys = [key(name) for name in "abcd"]
    request(policy, "r", "abcd", 0)
    assert policy.make_room([], 1, lambda slot: slot == 0) == [0]
    policy.released([1, 2, 3, 4, 5])  # b has been moved, c and d have not
    used = [2, 3] if as_head else [1, 2, 3]
    policy.request_ended(ReqContext("s"), [keys[n] for n in used], used, [True] * len(used))
    gone = [policy.make_room([], 1, lambda _: True)[0] for _ in range(3)]
    assert gone == ([1, 5, 4] if as_head else [5, 4, 3])


def test_blocks_behind_a_declined_one_are_declined_in_later_offers_of_the_request():
    policy = HdPolicy(2)
    policy.admit([key("old"), key("older")], [0, 1])
    policy.request_ended(ReqContext("r"), [key("old"), key("older")], [0, 1], [False, False])
    policy.duel.is_density = True
    policy.model.tables.density = [[1.0] * 26 for _ in range(reuse.NUM_CLASSES)]
    policy.model.tables.density[9][0] = 0.0
    keys = [key(n) for n in "abcdef"]
    ctx = ReqContext("s", key_positions={k: n for n, k in enumerate(keys)})
    assert policy.declines(ctx, keys[:2], keys[:2], 0, lambda _: True) == set(keys[:2])
    policy.model.tables.density[9][0] = 2.0
    assert policy.declines(ctx, keys[2:4], keys[2:4], 0, lambda _: True) == set(keys[2:4])
    # Offered again from the start, it is decided anew.
    assert not policy.declines(ctx, keys[:2], keys[:2], 0, lambda _: True)


def test_of_declined_blocks_of_several_classes_the_first_of_the_prompt_ends_its_head():
    policy = HdPolicy(4)
    _, known, b, last = keys = [key(n) for n in ("a", "known", "b", "last")]
    policy.request_ended(ReqContext("r"), [known], [None], [False])
    policy.admit([key("x"), key("y")], [0, 1])
    policy.access([0, 1], [True, True])
    policy.duel.is_density = True
    policy.model.tables.density = [[1.0] * 26 for _ in range(reuse.NUM_CLASSES)]
    policy.model.tables.density[1] = [0.0] * 26  # the known block's class
    policy.model.tables.density[9] = [0.5] + [1.0] * 25
    declined = policy.declines(ReqContext("s"), keys, keys, 2, lambda _: True)
    assert declined == {known, b, last}


def test_classes_that_a_tier_stores_are_not_declined_but_evicted_first():
    policy = HdPolicy(6)
    resident = [key("old"), key("older")]
    policy.admit(resident, [0, 1])
    policy.request_ended(ReqContext("r"), resident, [0, 1], [False, False])
    policy.duel.is_density = True
    policy.model.tables.density = [[1.0] * 26 for _ in range(reuse.NUM_CLASSES)]
    policy.model.tables.density[9][0] = policy.model.tables.density[0][0] = 0.0
    keys = [key(n) for n in "abc"]  # of the classes 9, 9 and 0
    ctx = ReqContext("s", key_positions={k: n for n, k in enumerate(keys)})
    assert policy.declines(ctx, keys, keys, 0, lambda _: True) == set(keys)
    policy.tiers_store = {0}.__contains__
    assert policy.declines(ctx, keys, keys, 0, lambda _: True) == set(keys[:2])
    policy.tiers_store = {11}.__contains__  # which all would have in a prompt of 64 blocks
    assert not policy.declines(ctx, keys, keys, 0, lambda _: True)
    policy.admit(keys, [2, 3, 4])
    assert policy.make_room([key("z")], 3, lambda _: True) == [4, 3, 2]


@pytest.mark.parametrize(("tiers_store", "is_taken"), [((), False), ((0,), True)])
def test_the_duel_declines_by_the_rule_of_the_cache(tiers_store, is_taken):
    policy = HdPolicy(2)
    policy.tiers_store = tiers_store.__contains__
    policy.model.tables.density = [[0.0] + [1.0] * 25 for _ in range(reuse.NUM_CLASSES)]
    for names in ([key("a")], [key("b")], [key("c")], [key("c")]):
        # A new block, of class 0, is worth least; LRU finds the last one.
        policy.declines(ReqContext("r"), names, names, 1, lambda _: True)
        policy.request_ended(ReqContext("r"), names, [None], [False])
    assert policy.duel.lead == (0.0 if is_taken else -1.0)


def test_with_room_or_where_nothing_may_be_declined_everything_is_taken():
    policy = HdPolicy(4)
    keys = [key(n) for n in range(4)]
    ctx = ReqContext("r")
    assert policy.declines(ctx, keys, keys, 4, lambda _: True) == ()
    assert policy.declines(ctx, keys, keys, None, lambda _: True) == ()


def test_kv_groups_of_a_prompt_are_chains_of_their_own():
    policy = HdPolicy(4)
    keys = [key("a"), key("a", 1), key("b"), key("b", 1)]
    policy.admit(keys, [0, 1, 2, 3])
    policy.request_ended(ReqContext("r"), keys, [0, 1, 2, 3], [False] * 4)
    assert policy.make_room([], 1, lambda slot: slot == 1) == [1]
    policy.released([0, 2, 3])
    assert policy.make_room([], 1, lambda _: True) == [3]  # not 2, whose parent is there


@pytest.mark.parametrize("regime", ["scan", "recent"])
def test_the_order_of_lru_takes_over_where_it_finds_more(regime):
    policy = HdPolicy(8)
    policy.duel.lead = -1.0 if regime == "recent" else 10.0
    policy.duel.is_density = regime == "recent"
    policy.duel.total = 10.0
    policy.request_ended(ReqContext("r"), [key("sampled")], [None], [False])
    assert policy.duel.is_density is (regime == "scan")
    policy.admit([key(n) for n in "abc"], [0, 1, 2])
    for slot in (2, 0, 1):
        policy.access([slot], [True])
    if regime == "recent":
        assert policy.declines(ReqContext("s"), [key("z")], [key("z")], 0, lambda _: True) == ()
        assert policy.make_room([key("z")], 1, lambda _: True) == [2]


def test_a_prompt_longer_than_what_is_remembered_is_remembered_in_part(monkeypatch):
    monkeypatch.setattr(hd, "LEAST_GHOSTS", 4)
    cache = Cache(1)
    for _ in range(3):
        cache.serve(*range(30))
    assert len(known_blocks(cache.policy.model)) <= 5


UNIVERSE = [key(n, n % 5 == 4) for n in range(40)]
some_keys = st.lists(st.sampled_from(UNIVERSE), unique=True, max_size=16)
pins = st.sets(st.sampled_from(UNIVERSE), max_size=6)
REQUESTS = 3


class HdMachine(RuleBasedStateMachine):
    """The policy and its model in small caches, with tables that are updated often, and learn."""

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(hd, "LEAST_GHOSTS", 8)
        self.patch.setattr(hd, "GHOSTS_PER_BLOCK", 1)
        self.patch.setattr(reuse, "_UPDATE_REQUESTS", 3)
        self.patch.setattr(hd, "_LEAST_LEAD", 1)
        self.patch.setattr(reuse, "_PRIOR_ARRIVALS", 1.0)

    def teardown(self):
        self.patch.undo()

    @initialize(
        capacity=st.integers(1, 24),
        tiers_store=st.sets(st.integers(0, reuse.NUM_CLASSES - 1), max_size=3),
    )
    def start(self, capacity, tiers_store):
        self.capacity = capacity
        self.policy = HdPolicy(capacity)
        self.model = NaiveHd(
            capacity,
            8,
            3,
            1,
            lambda kind, age_bin: self.policy.model.tables.density[kind][age_bin],
        )
        self.policy.tiers_store = tiers_store.__contains__
        self.model.tiers_store = tiers_store
        self.model.order = self.in_order
        self.slots = {}
        self.free = list(range(capacity))
        self.pinned = set()
        self.skipped = set()
        self.contexts = [ReqContext(str(n)) for n in range(REQUESTS)]
        self.uses = [{} for _ in range(REQUESTS)]

    def in_order(self, useless):
        names = {slot: name for name, slot in self.slots.items()}
        order = [names.get(slot) for slot in self.policy.resident()]
        return sorted(useless, key=order.index, reverse=True)

    def may_leave(self, also_pinned):
        pinned = self.pinned | also_pinned
        names = {slot: name for name, slot in self.slots.items()}

        def by_slot(slot):
            if names[slot] in pinned:
                self.skipped.add(names[slot])
                return False
            return True

        return by_slot, lambda name: name not in pinned

    def release(self, names):
        names = sorted(names & self.slots.keys())
        self.policy.released([self.slots[name] for name in names])
        self.model.ranking.release(names)
        self.skipped -= set(names)

    @rule(
        request=st.integers(0, REQUESTS - 1),
        names=some_keys,
        pinned=pins,
        can_decline=st.booleans(),
        has_positions=st.booleans(),
    )
    def store(self, request, names, pinned, can_decline, has_positions):
        ctx = self.contexts[request]
        if has_positions:
            for name in names:
                ctx.key_positions.setdefault(name, len(ctx.key_positions))
        if not names:
            return
        missing = [name for name in names if name not in self.slots]
        kept = pinned | set(names)
        free = len(self.free) if can_decline else None
        declined = set()
        if missing:
            by_slot, by_name = self.may_leave(kept)
            declined = self.policy.declines(ctx, names, missing, free, by_slot)
            expected = self.model.declines(
                ctx, dict(ctx.key_positions), names, missing, free, by_name
            )
            assert set(declined) == expected
            self.release(kept - self.pinned)
        wanted = [name for name in missing if name not in declined]
        self.take_in(wanted, kept)
        for name in declined:
            self.uses[request].setdefault(name, None)
        for name in names:
            if name in self.slots:
                self.uses[request][name] = name not in missing

    @rule(names=some_keys, pinned=pins)
    def promote(self, names, pinned):
        self.take_in([name for name in names if name not in self.slots][: self.capacity], pinned)

    def take_in(self, wanted, kept):
        count = max(0, len(wanted) - len(self.free))
        by_slot, by_name = self.may_leave(kept)
        victims = self.policy.make_room(wanted, count, by_slot)
        names = {slot: name for name, slot in self.slots.items()}
        expected = self.model.make_room(count, by_name)
        if victims is None:
            assert expected is None
            assert len(self.slots.keys() - self.pinned - kept) < count
        else:
            assert [names[slot] for slot in victims] == expected
            for slot in victims:
                del self.slots[names[slot]]
            self.free += victims
            taken = [self.free.pop() for _ in wanted]
            if wanted:
                self.policy.admit(wanted, taken)
                self.model.admit(wanted)
            self.slots.update(zip(wanted, taken, strict=True))
        self.release(kept - self.pinned)

    @rule(request=st.integers(0, REQUESTS - 1))
    def end(self, request):
        ctx, uses = self.contexts[request], self.uses[request]
        names = sorted(uses, key=lambda name: ctx.key_positions.get(name, 1_000))
        slots = [self.slots.get(name) for name in names]
        if names:
            self.policy.request_ended(ctx, names, slots, [bool(uses[name]) for name in names])
            self.model.request_ended(dict(ctx.key_positions), names)
        self.contexts[request], self.uses[request] = ReqContext("again"), {}

    @rule(names=pins)
    def touch(self, names):
        present = [name for name in sorted(names) if name in self.slots]
        self.policy.access([self.slots[name] for name in present], [True] * len(present))
        self.model.request_ended({}, present)

    @rule(is_density=st.booleans())
    def decide(self, is_density):
        """Let an order lead, which a few requests hardly bring about."""
        lead = 5.0 if is_density else 0.0
        for one in (self.policy.duel, self.model):
            one.lead, one.is_density = lead, is_density

    @rule(names=pins)
    def pin(self, names):
        self.pinned |= names

    @rule(names=pins)
    def unpin(self, names):
        self.pinned -= names
        self.release(names)

    @rule(names=st.sets(st.sampled_from(UNIVERSE), max_size=2))
    def discard(self, names):
        gone = [name for name in sorted(names) if name in self.slots]
        slots = [self.slots.pop(name) for name in gone]
        self.policy.discard(slots)
        self.free += slots
        self.model.discard(gone)

    @invariant()
    def policy_and_model_agree(self):
        policy, model = self.policy, self.model
        assert list(policy.violations()) == []
        assert sorted(policy.resident()) == sorted(self.slots.values())
        known = {
            name: (min(uses, 11), group.kind, group.time, name in model.cached)
            for name, (uses, group) in model.model.known.items()
        }
        assert known_blocks(policy.model) == known
        arrivals, hits = policy.model.tables._arrivals, policy.model.tables._hits
        tables = model.model.tables
        for rows, expected in (arrivals, tables.arrivals), (hits, tables.hits):
            for row, expected_row in zip(rows, expected, strict=True):
                assert all(is_close(*pair) for pair in zip(row, expected_row, strict=True))
        names = {slot: name for name, slot in self.slots.items()}
        assert self.without_equals([names[slot] for slot in policy.resident()]) == (
            self.without_equals(model.ranking.order(model.worth))
        )
        assert policy.duel.lead == pytest.approx(model.lead)
        assert policy.duel.is_density == model.is_density

    def without_equals(self, order):
        """The order of victims, with groups of the same rank as sets."""
        group_of = self.model.ranking.group_of
        ranks = [group_of[name] and (group_of[name].kind, group_of[name].time) for name in order]
        return [
            sorted(name for name, _ in equals) if rank else [name for name, _ in equals]
            for rank, equals in groupby(zip(order, ranks, strict=True), itemgetter(1))
        ]

    @invariant()
    def only_pinned_blocks_are_skipped(self):
        names = {slot: name for name, slot in self.slots.items()}
        assert {names[slot] for slot in self.policy.skipped()} <= self.pinned


TestHdAgainstItsModel = pytest.mark.stateful(HdMachine.TestCase)


def test_a_request_without_sampled_blocks_leaves_the_duel_as_it_is():
    contest = hd.Duel(64 * hd.LARGEST_SAMPLED_PART)
    names = (key(number) for number in range(1000))
    unsampled = next(name for name in names if crc32(name) % contest.sampled_part)
    contest.record([unsampled], [0], 1, lambda *_: 0.0, may_decline=lambda _: False)
    assert contest.total == 0.0


def test_a_policy_without_evictable_blocks_evicts_none_and_forgets_what_is_discarded():
    policy = HdPolicy(2)
    policy.admit([key("a"), key("b")], [0, 1])
    policy.access([], [])
    policy.access([0, 1], [False, False])
    assert policy.make_room([key("c")], 1, lambda _slot: False) is None
    policy.released([0, 1])
    policy.discard([0])
    assert list(policy.resident()) == [1]
    arrivals, hits = policy.model.tables._arrivals, policy.model.tables._hits
    assert len(arrivals) == len(hits) == reuse.NUM_CLASSES
    assert list(policy.violations()) == []
