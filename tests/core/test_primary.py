import pytest
from core.states import whole_state
from core.terms import HIT, MISS, PENDING, k, ks, ranked, state_of

from kvoffload_async.core.admission import AdmissionFilter
from kvoffload_async.core.primary import Primary
from kvoffload_async.errors import StateError
from kvoffload_async.policies.arc import ArcPolicy
from kvoffload_async.policies.lru import LruPolicy
from kvoffload_async.types import OffloadKey, ReqContext


class Rig:
    """A primary with one live request, and blocks stored in it."""

    def __init__(self, num_slots=4, names="", **options):
        self.primary = Primary(num_slots, LruPolicy(num_slots), enable_events=True, **options)
        self.ctx = ReqContext("r")
        self.primary.open_request(self.ctx)
        if names:
            self.store(names)
            list(self.primary.take_events())

    def offer(self, names, ctx=None):
        return self.primary.prepare_store(ctx or self.ctx, ks(names))

    def store(self, names):
        output = self.offer(names)
        self.primary.complete_store(self.ctx, ks(names), success=True)
        return output

    def events(self):
        return [(list(e.keys), e.removed, e.metadata_only) for e in self.primary.take_events()]

    def states(self, names):
        return [state_of(self.primary, k(name)) for name in names]


def test_a_use_of_what_is_no_key_is_refused_at_the_call_and_the_request_can_end():
    rig = Rig(names="a")
    with pytest.raises(StateError, match="b'abc' is too short"):
        rig.primary.touch(rig.ctx, [k("a"), b"abc"])
    rig.primary.touch(rig.ctx, [])
    rig.primary.close_request(rig.ctx)


def test_a_load_of_nothing_leaves_nothing():
    rig = Rig(names="a")
    assert rig.primary.prepare_load(rig.ctx, []) == []
    assert not rig.primary.loading._loads


def test_a_block_goes_from_absent_over_writing_and_idle_to_pinned_and_back():
    rig = Rig()
    key = k("a")
    states = [state_of(rig.primary, key)]
    rig.offer("a")
    states.append(state_of(rig.primary, key))
    assert rig.primary.lookup(key) is PENDING
    rig.primary.complete_store(rig.ctx, [key], success=True)
    states.append(state_of(rig.primary, key))
    rig.primary.prepare_load(rig.ctx, [key])
    states.append(state_of(rig.primary, key))
    assert rig.primary.lookup(key) is HIT
    rig.primary.complete_load(rig.ctx, [key])
    states.append(state_of(rig.primary, key))
    assert states == [
        "absent",
        "writing",
        "idle",
        "pinned",
        "idle",
    ]


def test_only_missing_keys_are_granted_in_input_order():
    rig = Rig(names="b")
    rig.offer("c")
    output = rig.offer("abcd")
    assert output.keys_to_store == ks("ad")
    assert output.store_spec.block_ids.tolist() == [2, 3]
    assert output.evicted_keys == []


def test_duplicate_keys_do_not_leak_a_slot():
    """Each duplicate took a slot, and one of them was never freed."""
    rig = Rig(num_slots=2)
    output = rig.offer("aab")
    assert output.keys_to_store == ks("ab")
    rig.primary.complete_store(rig.ctx, ks("aab"), success=False)
    assert rig.primary.counts["free"] == 2


def test_nothing_new_is_an_empty_grant():
    rig = Rig(names="ab")
    output = rig.offer("ab")
    assert (output.keys_to_store, output.store_spec.block_ids.size) == ([], 0)


def test_a_store_evicts_no_more_than_it_needs_and_says_so_first():
    rig = Rig(num_slots=3, names="abc")
    assert rig.store("de").evicted_keys == ks("ab")
    assert rig.events() == [(ks("ab"), True, False), (ks("de"), False, False)]


def test_a_store_takes_over_the_slots_of_its_victims_the_last_one_first():
    rig = Rig(num_slots=3, names="abc")
    assert rig.offer("de").store_spec.block_ids.tolist() == [1, 0]


def test_offered_keys_are_not_evicted_by_their_own_offer():
    rig = Rig(num_slots=2, names="ab")
    assert rig.offer("ac").evicted_keys == ks("b")


@pytest.mark.parametrize("names", ["cd", "abc", "cdefg"], ids=["pinned", "offered", "too many"])
def test_a_refused_store_changes_nothing(names):
    rig = Rig(num_slots=2, names="ab")
    if names == "cd":
        rig.primary.pin(ks("a"))
    before = whole_state(rig.primary)
    assert rig.offer(names) is None
    assert whole_state(rig.primary) == before
    assert rig.events() == []


def test_the_policy_may_refuse_too():
    class Stubborn(LruPolicy):
        def make_room(self, incoming, count, is_evictable):
            return None

    primary = Primary(1, Stubborn(1))
    ctx = ReqContext("r")
    primary.open_request(ctx)
    assert primary.prepare_store(ctx, ks("a")) is None
    assert primary.counts["free"] == 1


def test_a_prefix_that_fits_is_accepted_where_that_is_wanted():
    rig = Rig(num_slots=3, accept_prefix=True)
    assert rig.offer("abcdef").keys_to_store == ks("abc")
    assert rig.offer("xy") is None


@pytest.mark.parametrize("policy", [LruPolicy, ArcPolicy])
@pytest.mark.parametrize("is_pending", [False, True], ids=["idle", "pending for a tier"])
def test_a_store_does_not_evict_the_prefix_of_its_own_request(policy, is_pending):
    pinned, other, prefix, tail = ks("pabc")
    primary = Primary(3, policy(3), accept_prefix=True)
    primary.on_evicted = lambda slots: primary.unprotect(slots) if is_pending else None
    earlier = ReqContext("earlier")
    primary.open_request(earlier)
    primary.prepare_store(earlier, [pinned, other])
    primary.complete_store(earlier, [pinned, other], success=True)
    primary.touch(earlier, [other])
    primary.close_request(earlier)
    primary.pin([pinned])
    primary.touch(earlier, [other])  # ARC: seen twice, so that others are evicted first
    if is_pending:
        primary.protect([primary.slot_of(other)])
    ctx = ReqContext("r", key_positions={prefix: 1, tail: 2})
    primary.open_request(ctx)
    primary.prepare_store(ctx, [prefix])
    primary.complete_store(ctx, [prefix], success=True)
    assert primary.prepare_store(ctx, [tail]).evicted_keys == [other]
    assert not list(primary.policy.violations())


def test_a_block_is_admitted_at_its_nth_offer():
    rig = Rig(admission=AdmissionFilter(2))
    assert rig.offer("a").keys_to_store == []
    assert rig.offer("ab").keys_to_store == ks("a")


def test_a_refused_offer_does_not_count_towards_admission():
    """P6: the refusal must leave the filter as it was, like everything else."""
    rig = Rig(num_slots=1, admission=AdmissionFilter(2))
    rig.offer("a")
    rig.offer("a")
    rig.offer("b")
    assert rig.offer("bc") is None
    rig.primary.complete_store(rig.ctx, ks("a"), success=True)
    assert rig.offer("c").keys_to_store == []


def test_a_failed_write_frees_its_slot_and_announces_no_eviction():
    rig = Rig(num_slots=1)
    rig.offer("a")
    assert rig.primary.complete_store(rig.ctx, ks("a"), success=False) == ks("a")
    assert rig.states("a") == ["absent"]
    assert rig.events() == [(ks("a"), True, True)]
    assert rig.offer("b").store_spec.block_ids.tolist() == [0]


def written(rig):
    rig.store("a")


def failed(rig):
    rig.offer("a")
    rig.primary.complete_store(rig.ctx, ks("a"), success=False)


def orphaned(rig):
    rig.offer("a")
    rig.primary.release_slots(rig.primary.orphan_write(ks("a")))


def forgotten(rig):
    rig.offer("a")
    rig.primary.reset()


@pytest.mark.parametrize("ended", [written, failed, orphaned, forgotten])
def test_a_write_that_has_ended_gives_no_right_to_what_is_promoted_into_its_slot(ended):
    rig = Rig(num_slots=1)
    ended(rig)
    assert rig.primary.reserve(ks(["promoted"])) == [0]
    assert rig.primary.complete_store(rig.ctx, ks(["promoted"]), success=True) == []
    assert rig.states(["promoted"]) == ["writing"]


def test_completing_what_is_ready_unknown_or_anothers_is_ignored():
    rig = Rig(names="a")
    other = ReqContext("other")
    rig.primary.open_request(other)
    rig.offer("b", other)
    assert rig.primary.complete_store(rig.ctx, ks("abc"), success=False) == []
    assert rig.states("abc") == ["idle", "writing", "absent"]


def test_a_promotion_is_nobodys_store():
    rig = Rig()
    assert rig.primary.reserve(ks("a")) == [0]
    assert rig.primary.complete_store(rig.ctx, ks("a"), success=True) == []
    rig.primary.complete_write(ks("a"), success=True)
    assert rig.primary.lookup(k("a")) is HIT


def test_a_present_key_cannot_be_reserved():
    rig = Rig(names="a")
    with pytest.raises(StateError, match="present already"):
        rig.primary.reserve(ks("ba"))


def test_a_reservation_evicts_no_pinned_blocks():
    rig = Rig(num_slots=2, names="ab")
    rig.primary.pin(ks("ab"))
    before = whole_state(rig.primary)
    assert rig.primary.reserve(ks("c")) == []
    assert whole_state(rig.primary) == before
    rig.primary.unpin(ks("b"))
    assert rig.primary.reserve(ks("cd")) == [1]
    assert rig.primary.lookup(k("b")) is MISS


def test_pins_add_up_and_the_last_unpin_frees():
    rig = Rig(num_slots=1, names="a")
    assert rig.primary.pin(ks("a")) == rig.primary.pin(ks("a")) == [0]
    rig.primary.unpin(ks("a"))
    assert rig.primary.counts["pinned"] == 1
    rig.primary.unpin(ks("a"))
    assert rig.primary.counts["idle"] == 1
    with pytest.raises(StateError, match="not pinned"):
        rig.primary.unpin(ks("a"))


@pytest.mark.parametrize("bad", ["w", "x"], ids=["writing", "absent"])
def test_pinning_what_is_not_readable_changes_nothing(bad):
    rig = Rig(names="a")
    rig.offer("w")
    with pytest.raises(StateError, match="not readable"):
        rig.primary.prepare_load(rig.ctx, ks("a" + bad))
    assert rig.states("a") == ["idle"]


def test_a_load_may_name_a_key_twice():
    rig = Rig(names="ab")
    assert rig.primary.prepare_load(rig.ctx, ks("aba")) == [0, 1, 0]
    assert rig.primary.loading.total() == {k("a"): 2, k("b"): 1}
    rig.primary.complete_load(rig.ctx, ks("ab"))
    assert rig.states("ab") == ["pinned", "idle"]
    rig.primary.complete_load(rig.ctx, ks("a"))
    assert rig.primary.loading.total() == {}


def test_completing_a_load_that_was_not_prepared_is_misuse():
    rig = Rig(names="ab")
    rig.primary.prepare_load(rig.ctx, ks("a"))
    with pytest.raises(StateError, match="did not prepare"):
        rig.primary.complete_load(rig.ctx, ks("ab"))
    assert rig.states("ab") == ["pinned", "idle"]


def test_an_unknown_request_neither_loads_nor_stores():
    rig = Rig(names="a")
    stranger = ReqContext("stranger")
    with pytest.raises(StateError, match="stranger"):
        rig.primary.prepare_load(stranger, ks("a"))
    with pytest.raises(StateError, match="stranger"):
        rig.primary.prepare_store(stranger, ks("b"))


def test_ending_a_write_that_is_none_is_a_defect_and_changes_nothing():
    rig = Rig(names="a")
    rig.offer("w")
    with pytest.raises(StateError, match="not being written"):
        rig.primary.complete_write(ks("wa"), success=True)
    with pytest.raises(StateError, match="not being written"):
        rig.primary.complete_write(ks("wx"), success=False)
    assert rig.states("wa") == ["writing", "idle"]


def test_an_orphaned_write_makes_the_key_absent_and_holds_the_slot():
    rig = Rig(num_slots=1)
    rig.primary.reserve(ks("a"))
    assert rig.primary.orphan_write(ks("a")) == [0]
    assert rig.primary.counts == {"free": 0, "writing": 0, "idle": 0, "pinned": 0, "held": 1}
    assert rig.offer("b") is None
    rig.primary.release_slots([0])
    assert rig.offer("b").store_spec.block_ids.tolist() == [0]


def test_a_reset_forgets_blocks_pins_writes_and_offers_but_not_requests():
    rig = Rig(names="ab", admission=AdmissionFilter(1))
    rig.primary.prepare_load(rig.ctx, ks("a"))
    rig.offer("w")
    rig.primary.reset()
    assert rig.primary.counts["free"] == rig.primary.num_slots == 4
    assert rig.events() == [(ks("ab"), True, False)]
    assert rig.primary.loading.total() == {}
    assert rig.offer("a") is not None


def test_completions_from_before_a_reset_change_nothing():
    rig = Rig(names="a")
    rig.primary.prepare_load(rig.ctx, ks("a"))
    rig.offer("w")
    rig.primary.reset()
    before = whole_state(rig.primary)
    rig.primary.complete_load(rig.ctx, ks("a"))
    assert rig.primary.complete_store(rig.ctx, ks("w"), success=True) == []
    assert whole_state(rig.primary) == before


def test_slots_of_late_copies_stay_held_over_a_reset():
    rig = Rig(num_slots=2, names="ab")
    rig.primary.reset([1])
    assert rig.offer("cd") is None
    assert rig.offer("c").store_spec.block_ids.tolist() == [0]


def test_slot_of_an_absent_key_is_a_defect():
    rig = Rig(names="a")
    assert rig.primary.slot_of(k("a")) == 0
    with pytest.raises(StateError, match="absent"):
        rig.primary.slot_of(k("x"))


def test_a_touch_counts_when_its_request_ends():
    rig = Rig(num_slots=3, names="abc")
    rig.primary.close_request(rig.ctx)
    ctx = ReqContext("s")
    rig.primary.open_request(ctx)
    rig.primary.touch(ctx, ks("b"))
    before = ranked(rig.primary)
    rig.primary.touch(ReqContext("unknown"), ks("cc"))
    assert ranked(rig.primary) == [key for key in before if key != k("c")] + ks("c")
    rig.primary.close_request(ctx)
    assert ranked(rig.primary)[-1] == k("b")


def test_completion_order_does_not_change_the_ranking_51787():
    """51787: transfers that ended late broke the order of the prefix, and counted twice."""
    rankings = []
    for order in "abc", "cab":
        rig = Rig(num_slots=3)
        rig.ctx.key_positions.update({key: i for i, key in enumerate(ks("abc"))})
        rig.offer(order)
        for name in order:
            rig.primary.complete_store(rig.ctx, ks(name), success=True)
        rig.primary.close_request(rig.ctx)
        rankings.append(ranked(rig.primary))
    assert rankings == [ks("cba")] * 2


def test_events_are_only_collected_where_somebody_wants_them():
    primary = Primary(1, LruPolicy(1))
    primary.reserve(ks("a"))
    primary.complete_write(ks("a"), success=True)
    assert list(primary.take_events()) == []


def test_a_look_up_of_what_is_too_short_to_be_a_key_is_an_error_that_says_so():
    with pytest.raises(StateError, match=r"b'abc' is too short: .*make_offload_key"):
        Primary(4, LruPolicy(4)).lookup(OffloadKey(b"abc"))


def test_the_end_of_a_request_is_reported_with_its_keys_and_an_unknown_request_cannot_end():
    rig = Rig(names="ab")
    ended = []
    rig.primary.on_request_ended = lambda ctx, keys: ended.append((ctx, list(keys)))
    rig.primary.close_request(rig.ctx)
    assert ended == [(rig.ctx, ks("ab"))]
    with pytest.raises(StateError):
        rig.primary.close_request(ReqContext("unknown"))


def test_blocks_in_use_are_those_that_are_pinned_or_being_written():
    rig = Rig(num_slots=4)
    rig.store("abc")
    rig.primary.pin(ks("a"))
    rig.offer("d")
    assert rig.primary.num_in_use(ks("abcd?")) == 2
