"""Hints and the order of eviction: the marks, and the primary under each policy."""

import re

import pytest
from core.states import POLICIES
from core.terms import k, ks, ranked
from core.world import World
from hypothesis import given
from hypothesis import strategies as st

from kvoffload_async.core.hinted import HintedBlocks
from kvoffload_async.core.invariants import check_state
from kvoffload_async.core.primary import Primary
from kvoffload_async.errors import InvariantError
from kvoffload_async.types import NO_HINTS, Hints, Priority, ReqContext

LOW, HIGH = Hints(Priority.LOW), Hints(Priority.HIGH)
SLOTS = 16

# -- the marks against a model ------------------------------------------------------------------

SOME = st.lists(st.integers(0, SLOTS - 1), unique=True, max_size=6)
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("retain"), SOME, st.sampled_from([1, 2.5, 40, 3600]), st.booleans()),
        st.tuples(st.just("note_low"), SOME),
        st.tuples(st.just("use"), SOME, st.booleans()),
        st.tuples(st.just("forget"), SOME),
        st.tuples(st.just("give_up"), st.integers(0, 3)),
        st.tuples(st.just("first"), st.integers(1, 3)),
        st.tuples(st.just("pass"), st.sampled_from([0.5, 2, 50, 3601, 7300])),
    ),
    min_size=8,
    max_size=30,
)


class Model:
    """Marks as plain lists.

    Slots stored at low priority, those of them to be evicted first, and (priority, end, slot).
    """

    def __init__(self):
        self.now_s = 0.0
        self.low = set()
        self.first = []
        self.retained = []

    def ends(self, count):
        self.retained.sort(key=lambda entry: entry[:2])
        ended, self.retained = self.retained[:count], self.retained[count:]
        return [slot for _, _, slot in ended]

    def retain(self, slots, seconds, is_high):
        known = {slot: (high, end) for high, end, slot in self.retained}
        for slot in slots:
            high, end = known.get(slot, (False, 0))
            self.retained = [entry for entry in self.retained if entry[2] != slot]
            ceiling = -int(-(self.now_s + seconds) // 1)
            self.retained.append((high or is_high, max(end, ceiling), slot))
        return self.ends(max(0, len(self.retained) - SLOTS // 4))

    def forget(self, slots):
        self.low -= set(slots)
        self.first = [slot for slot in self.first if slot not in slots]
        self.retained = [entry for entry in self.retained if entry[2] not in slots]


@given(CALLS)
def test_the_marks_agree_with_plain_lists(calls):
    marks, model = HintedBlocks(SLOTS), Model()
    for call, *arguments in calls:
        match call, *arguments:
            case "retain", slots, seconds, is_high:
                slots = [slot for slot in slots if slot not in model.low]
                ended = marks.retain(slots, model.now_s, seconds, is_high=is_high)
                assert ended == model.retain(slots, seconds, is_high)
            case "note_low", slots:
                slots = [slot for slot in slots if not marks.is_marked(slot)]
                marks.note_low(slots)
                model.low.update(slots)
            case "use", slots, is_low:
                used = [slot for slot in slots if slot in model.low]
                marks.use(slots, is_low=is_low)
                model.forget(used)
                model.first += used * is_low
                model.low.update(used * is_low)
            case "forget", slots:
                marks.forget(slots)
                model.forget(slots)
            case "give_up", count:
                assert marks.give_up(count, lambda _: True) == model.ends(count)
            case "first", count:
                assert marks.first(count, lambda _: True) == model.first[:count]
            case "pass", seconds:
                model.now_s += seconds
                due = [slot for _, end, slot in model.retained if end <= model.now_s]
                assert sorted(marks.expire(model.now_s)) == sorted(due)
                model.retained = [entry for entry in model.retained if entry[1] > model.now_s]
        assert list(marks.violations()) == []
        retained = {slot for _, _, slot in model.retained}
        assert {slot for slot in range(SLOTS) if marks.is_retained(slot)} == retained
        assert (marks.has_first, marks.num_low) == (bool(model.first), len(model.low))


def test_retentions_end_a_bounded_number_per_step():
    marks = HintedBlocks(40_000)
    marks.retain(range(10_000), 0.0, 1.0, is_high=False)
    assert [len(marks.expire(5.0)) for _ in range(6)] == [2048] * 4 + [1808, 0]


def test_a_retention_that_has_ended_is_not_prolonged_before_its_turn():
    marks = HintedBlocks(40_000)
    marks.retain(range(10_000), 0.0, 1.0, is_high=False)
    marks.expire(5.0)
    marks.retain([9_999], 5.0, 10.0, is_high=False)
    while marks.expire(14.0):
        pass
    assert marks.is_retained(9_999)
    marks.expire(15.0)
    assert marks.retained == 0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda marks: marks._first.append([5]), r"the lists have \{5: 2, .*"),
        (lambda marks: setattr(marks, "num_low", 1), "1 blocks are counted as stored at low.*"),
        (lambda marks: setattr(marks, "retained", 3), "3 blocks are counted as retained, of 2"),
        (lambda marks: marks._ends[1].append(7), r"the heaps have \(\[\], \[1, 7\]\), .*"),
    ],
)
def test_damaged_marks_are_noticed(damage, message):
    marks = HintedBlocks(8)
    marks.retain([1, 2], 0.0, 1.0, is_high=True)
    assert list(marks.violations()) == []
    damage(marks)
    assert [bool(re.fullmatch(message, text)) for text in marks.violations()][:1] == [True]


def test_blocks_in_use_give_their_place_among_those_evicted_first():
    marks = HintedBlocks(8)
    marks.note_low(range(8))
    marks.use(range(8), is_low=True)
    assert marks.first(2, lambda slot: slot > 3) == []
    assert marks.first(2, lambda slot: slot > 3) == [4, 5]


# -- the primary --------------------------------------------------------------------------------


@pytest.fixture(params=[(name, whole) for name in sorted(POLICIES) for whole in (False, True)])
def primary(request):
    name, accept_prefix = request.param
    return Primary(8, POLICIES[name](8), accept_prefix=accept_prefix)


def begin(primary, names, hints=NO_HINTS):
    ctx = ReqContext("r", key_positions={key: i for i, key in enumerate(ks(names), 1)}, hints=hints)
    primary.open_request(ctx)
    return ctx


def store(primary, names, hints=NO_HINTS):
    """Serve a request that stores blocks; return the names of those evicted for it, in order."""
    ctx = begin(primary, names, hints)
    granted = primary.prepare_store(ctx, ks(names))
    assert len(granted.keys_to_store) == len(names)
    primary.complete_store(ctx, granted.keys_to_store, success=True)
    primary.close_request(ctx)
    assert not primary.forgotten()
    return named(granted.evicted_keys)


def named(keys):
    return "".join(key[:1].decode() for key in keys)


def use(primary, names, hints=NO_HINTS):
    ctx = begin(primary, names, hints)
    primary.touch(ctx, ks(names))
    primary.close_request(ctx)


def resident(primary):
    return set(named(key for key, _, _ in primary.resident()))


def test_retained_blocks_are_evicted_last(primary):
    store(primary, "ab", Hints(retain_s=60))
    for names in ("cde", "fgh"):
        store(primary, names)
    assert set(store(primary, "ijklmn")) == set("cdefgh")
    assert set(store(primary, "opqrst")) == set("ijklmn")
    assert primary.hinted_blocks == 2


def test_retained_blocks_are_evicted_if_no_others_are_left(primary):
    store(primary, "ab", Hints(retain_s=60))
    store(primary, "cdefgh")
    reader = begin(primary, "cdefgh")
    primary.prepare_load(reader, ks("cdefgh"))
    assert store(primary, "i") == "b"
    assert primary.hinted_blocks == 1
    assert store(primary, "j") in {"a", "i"}


def test_after_the_end_of_the_retention_the_order_is_that_of_the_policy():
    for name, policy in sorted(POLICIES.items()):
        with_hints, without = (Primary(8, policy(8), accept_prefix=True) for _ in range(2))
        for primary, hints in (with_hints, Hints(retain_s=60)), (without, NO_HINTS):
            store(primary, "ab", hints)
            store(primary, "cdefgh")
            primary.begin_step(59.5)
            assert primary.hinted_blocks == 2 * (hints is not NO_HINTS)
            primary.begin_step(60.0)
            assert primary.hinted_blocks == 0
        for names in ("ij", "k", "lmnop", "q"):
            assert store(with_hints, names) == store(without, names), name


def test_blocks_that_were_skipped_are_evicted_in_turn_after_the_end(primary):
    store(primary, "ab", Hints(retain_s=60))
    store(primary, "cdefgh")
    assert not set(store(primary, "ijk")) & set("ab")
    primary.begin_step(60.0)
    assert primary.forgotten() == []
    store(primary, "lmnopqrs")
    assert resident(primary) == set("lmnopqrs")


def test_a_quarter_of_the_primary_is_retained_at_most_the_head_of_a_prompt(primary):
    store(primary, "abcdefgh", Hints(retain_s=60))
    assert primary.hinted_blocks == 2
    assert set(store(primary, "ijklmn")) == set("cdefgh")


def test_retention_beyond_the_share_ends_by_priority_then_by_its_end(primary):
    store(primary, "a", Hints(retain_s=3600))
    store(primary, "b", Hints(Priority.HIGH, retain_s=1))
    store(primary, "c", Hints(retain_s=10))
    retained = [
        key for key in ks("abc") if primary.shares[0].hinted.is_retained(primary.slot_of(key))
    ]
    assert retained == ks("ab")
    store(primary, "d", HIGH)
    retained = [
        key for key in ks("abcd") if primary.shares[0].hinted.is_retained(primary.slot_of(key))
    ]
    assert retained == ks("bd")


def test_the_longest_retention_and_the_highest_priority_of_a_block_count(primary):
    store(primary, "a", Hints(retain_s=60))
    use(primary, "a", Hints(Priority.HIGH, retain_s=10))
    primary.begin_step(30.0)
    assert primary.hinted_blocks == 1
    use(primary, "a", Hints(retain_s=1))
    store(primary, "bc", Hints(retain_s=3600))
    assert primary.shares[0].hinted.is_retained(primary.slot_of(k("a")))
    primary.begin_step(60.0)
    assert not primary.shares[0].hinted.is_retained(primary.slot_of(k("a")))


def test_blocks_of_low_priority_are_evicted_first_the_tail_foremost(primary):
    store(primary, "abcd")
    store(primary, "ef", LOW)
    store(primary, "gh")
    running = begin(primary, "i")
    assert primary.prepare_store(running, ks("i")).evicted_keys == ks("f")
    assert primary.shares[0].hinted.num_low == 1
    assert store(primary, "jk")[0] == "e"
    assert list(primary.policy.violations()) == []


def test_a_use_by_another_request_ends_low_priority(primary):
    store(primary, "ab", LOW)
    use(primary, "a", LOW)
    store(primary, "cdefgh")
    use(primary, "a")
    assert store(primary, "i") == "b"
    assert "a" not in store(primary, "j")


def test_a_use_by_another_request_counts_while_the_one_of_low_priority_still_runs(primary):
    ctx = begin(primary, "ab", LOW)
    granted = primary.prepare_store(ctx, ks("ab"))
    primary.complete_store(ctx, granted.keys_to_store, success=True)
    use(primary, "a")
    primary.close_request(ctx)
    store(primary, "cdefgh")
    assert (store(primary, "i"), primary.shares[0].hinted.has_first) == ("b", False)


def test_low_priority_does_not_lower_what_another_request_gave(primary):
    store(primary, "ab", Hints(retain_s=60))
    store(primary, "cd")
    use(primary, "abcd", LOW)
    store(primary, "efgh")
    assert not primary.shares[0].hinted.num_low
    assert primary.hinted_blocks == 2


def test_blocks_of_low_priority_in_use_are_not_evicted(primary):
    store(primary, "ab", LOW)
    store(primary, "cdefgh")
    reader = begin(primary, "ab", LOW)
    primary.prepare_load(reader, ks("ab"))
    assert not set(store(primary, "ij")) & set("ab")
    primary.complete_load(reader, ks("ab"))
    assert store(primary, "k") == "b"


def test_a_request_of_low_priority_keeps_its_own_head_while_it_stores_its_tail(primary):
    store(primary, "cdefgh")
    ctx = begin(primary, "abxy", LOW)
    for names in ("ab", "xy"):
        granted = primary.prepare_store(ctx, ks(names))
        primary.complete_store(ctx, granted.keys_to_store, success=True)
        assert not set(named(granted.evicted_keys)) & set("ab")


def test_a_request_of_low_priority_keeps_the_head_that_it_has_found():
    primary = Primary(8, POLICIES["lru"](8), accept_prefix=True)
    store(primary, "ab", LOW)
    store(primary, "cdefgh")
    ctx = begin(primary, "abxy", LOW)
    primary.touch(ctx, ks("ab"))
    assert not set(named(primary.prepare_store(ctx, ks("xy")).evicted_keys)) & set("ab")


def test_a_store_that_finds_no_room_leaves_blocks_of_low_priority(primary):
    store(primary, "ab", LOW)
    store(primary, "cdefgh")
    primary.protect([primary.slot_of(key) for key in ks("cdefgh")])
    primary._accept_prefix = False
    before = ranked(primary)
    assert primary.prepare_store(begin(primary, "xyz"), ks("xyz")) is None
    assert (ranked(primary), primary.shares[0].hinted.has_first) == (before, True)
    assert store(primary, "x") == "b"


def test_a_failed_write_leaves_no_mark(primary):
    ctx = begin(primary, "ab", LOW)
    granted = primary.prepare_store(ctx, ks("ab"))
    primary.complete_store(ctx, granted.keys_to_store, success=False)
    assert not primary.shares[0].hinted.num_low


def test_a_failed_write_of_a_block_that_another_request_had_retained_leaves_no_mark(primary):
    retaining, writer = begin(primary, "a", HIGH), begin(primary, "a")
    primary.touch(retaining, ks("a"))
    primary.prepare_store(writer, ks("a"))
    primary.close_request(retaining)
    assert primary.hinted_blocks == 1
    primary.complete_store(writer, ks("a"), success=False)
    assert primary.hinted_blocks == 0


def test_a_reset_forgets_the_hints(primary):
    store(primary, "ab", HIGH)
    store(primary, "c", LOW)
    primary.reset()
    assert primary.hinted_blocks == 0
    store(primary, "abcdefgh")
    assert set(store(primary, "ijklmnop")) == set("abcdefgh")


# -- how much is stored -------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "stored"), [(None, "abcd"), (0, ""), (2, "ab"), (9, "abcd")])
def test_only_blocks_within_the_limit_are_stored(primary, limit, stored):
    ctx = begin(primary, "abcd", Hints(max_offload_tokens=limit))
    granted = primary.prepare_store(ctx, ks("abcd"))
    assert (granted.keys_to_store, granted.keys_left_out) == (ks(stored), ())
    assert primary.counters.withheld_blocks == 4 - len(stored)


def test_the_limit_holds_if_blocks_are_offered_one_by_one_in_any_order(primary):
    ctx = begin(primary, "abcd", Hints(max_offload_tokens=2))
    for name in "dbca":
        primary.prepare_store(ctx, ks(name))
    assert resident(primary) == set("ab")


def test_a_limit_in_tokens_counts_those_of_each_position(primary):
    ctx = begin(primary, "abcd", Hints(max_offload_tokens=47))
    ctx.tokens_per_position = 16
    assert primary.prepare_store(ctx, ks("abcd")).keys_to_store == ks("ab")


def test_blocks_without_a_position_are_not_stored_under_a_limit(primary):
    ctx = begin(primary, "", Hints(max_offload_tokens=1 << 40))
    assert primary.prepare_store(ctx, ks("ab")).keys_to_store == []


# -- the planner --------------------------------------------------------------------------------


def test_the_limit_holds_for_tiers_that_want_whole_requests():
    world = World(8, 2, request_level=[0])
    positions = {key: i for i, key in enumerate(ks("abcd"), 1)}
    other = world.begin("other")
    world.store(other, "abcd")
    world.finish_all()
    ctx = world.begin("r", hints=Hints(max_offload_tokens=2), key_positions=positions)
    world.offer(ctx, "abcd")
    assert all(set(job.keys) <= set(ks("ab")) for _, job in world.running.values())
    assert world.running
    world.wind_down()


def test_a_step_of_the_planner_ends_retentions():
    world = World(8, 1)
    ctx = world.begin("r", hints=Hints(retain_s=3))
    world.store(ctx, "a")
    world.finish(ctx)
    for seconds, count in (2, 1), (1, 0):
        world.step(seconds)
        assert world.primary.hinted_blocks == count
    world.wind_down()


def test_a_prefetch_obeys_the_filter_of_tiers():
    world = World(8, 1)
    world.fill(0, ks("ab"))
    ctx = world.begin("r", load_tier_filter=frozenset())
    world.planner.prefetch(ks("ab"), ctx)
    world.step()
    assert not world.running
    world.wind_down()


def test_a_mark_of_a_free_slot_is_an_invariants_violation():
    world = World(8, 1)
    ctx = world.begin("r", hints=HIGH)
    world.store(ctx, "a")
    world.finish(ctx)
    check_state(world.planner)
    world.primary.shares[0].hinted.note_low([7])
    with pytest.raises(InvariantError, match=r"P13.*slot 7 is marked by a hint, but free"):
        check_state(world.planner)
