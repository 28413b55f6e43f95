"""The primary tier alone against a model that knows only sets and numbers."""

from collections import Counter

import pytest
from core.machines import AS_THE_PROFILE
from core.states import POLICIES, whole_state
from core.terms import HIT, MISS, PENDING, k, ranked
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvoffload_async.core.primary import Primary
from kvoffload_async.errors import StateError
from kvoffload_async.policies.lru import LruPolicy
from kvoffload_async.types import ReqContext

pytestmark = pytest.mark.stateful

KEYS = [k(name) for name in "abcdefgh"]
BATCH = st.lists(st.sampled_from(KEYS), min_size=1, max_size=3)
SOME = st.sampled_from(KEYS)


class PrimaryMachine(RuleBasedStateMachine):
    """`refs` is the model: key -> -1 writing, 0 idle, more pinned; `held` counts lost slots.

    `debts` says for how many tiers a key is pending.
    """

    @initialize(
        num_slots=st.integers(1, 6),
        policy=st.sampled_from(sorted(POLICIES)),
        accept_prefix=st.booleans(),
        has_positions=st.booleans(),
        drops_pending=st.booleans(),
        may_decline=st.booleans(),
    )
    def build(self, num_slots, policy, accept_prefix, has_positions, drops_pending, may_decline):  # noqa: PLR0917 - drawn by hypothesis
        self.num_slots = num_slots
        self.accept_prefix = accept_prefix
        self.primary = Primary(
            num_slots, POLICIES[policy](num_slots), accept_prefix=accept_prefix, enable_events=True
        )
        self.primary.drops_pending = drops_pending
        self.primary.may_decline = may_decline
        self.primary.on_evicted = self.forget_debts
        self.refs: dict = {}
        self.debts: Counter = Counter()
        self.held: list[int] = []
        self.replayed: set = set()
        self.positions = {key: end for end, key in enumerate(KEYS, 1)} if has_positions else {}
        self.begin()

    def forget_debts(self, slots):
        for slot in slots:
            self.primary.unprotect([slot] * self.debts.pop(self.primary.key_of(slot), 0))

    def begin(self):
        self.ctx = ReqContext("r0", key_positions=self.positions)
        self.used: set = set()
        self.primary.open_request(self.ctx)

    def head_before(self, missing):
        """What the request has used before all of the missing keys: these must not evict it."""
        first = min((self.positions.get(key, 0) for key in missing), default=0)
        return {key for key in self.used if self.positions.get(key, first) < first}

    def head_that_fits(self, missing, room):
        order = sorted(missing, key=lambda key: self.positions.get(key, 0))
        taken = set(order[:room] if self.accept_prefix or len(missing) <= room else ())
        return [key for key in missing if key in taken]

    def room(self, protected):
        idle = [key for key, refs in self.refs.items() if refs == 0 and key not in protected]
        if not self.primary.drops_pending:
            idle = [key for key in idle if not self.debts[key]]
        return self.num_slots - len(self.refs) - len(self.held) + len(idle)

    def next_victims(self, protected):
        """Return the keys in the order in which they may go, or None where that is adaptive.

        Or where some are pending: only who has gone is compared then, see `expect_eviction`.
        """
        if self.debts or not isinstance(self.primary.policy, LruPolicy):
            return None
        victims = ranked(self.primary)
        return [key for key in victims if not self.refs[key] and key not in protected]

    def expect_eviction(self, evicted, offered, pending):
        if pending & set(evicted):
            assert self.primary.drops_pending
            others = {key for key, refs in self.refs.items() if not refs} - pending - set(offered)
            assert others <= set(evicted), "it went before what nobody is pending"
        for key in evicted:
            assert self.refs.pop(key) == 0
            assert key not in offered

    @rule(keys=BATCH)
    def offer(self, keys):
        missing = [key for key in dict.fromkeys(keys) if key not in self.refs]
        head = self.head_before(missing) if self.accept_prefix else set()
        room = self.room(head | set(keys))
        before, pending = whole_state(self.primary), set(self.debts)
        candidates = [self.next_victims(keys), self.next_victims(head | set(keys))]
        output = self.primary.prepare_store(self.ctx, keys)
        if output is None:
            assert len(missing) > room
            assert not (self.accept_prefix and room)
            assert whole_state(self.primary) == before
            return
        told = {*output.keys_to_store, *output.keys_left_out}
        if self.primary.policy.follows_requests and self.primary.may_decline:
            missing = [key for key in missing if key in told]  # the others are declined
        granted = self.head_that_fits(missing, room)
        assert list(output.keys_to_store) == granted
        assert list(output.keys_left_out) == [key for key in missing if key not in granted]
        if output.keys_left_out:
            assert head.isdisjoint(output.evicted_keys)
        self.used.update(granted, (key for key in keys if self.refs.get(key, -1) >= 0))
        spare = self.num_slots - len(self.refs) - len(self.held)
        assert len(output.evicted_keys) == max(0, len(output.keys_to_store) - spare)
        gone = list(output.evicted_keys)
        assert None in candidates or gone in [victims[: len(gone)] for victims in candidates]
        self.expect_eviction(output.evicted_keys, {*keys, *head}, pending)
        self.refs.update(dict.fromkeys(output.keys_to_store, -1))

    @rule(keys=st.lists(SOME, min_size=1, max_size=4, unique=True))
    def reserve(self, keys):
        if self.refs.keys() & keys:
            with pytest.raises(StateError):
                self.primary.reserve(keys)
            return
        room = self.room(())
        before, victims = whole_state(self.primary), self.next_victims(())
        resident, pending = set(self.refs), set(self.debts)
        num_free = self.primary.pool.unused.count
        slots = self.primary.reserve(keys)
        assert len(slots) == min(len(keys), room)
        if not slots:
            assert whole_state(self.primary) == before
            return
        gone = resident - {key for key, _, _ in self.primary.resident()}
        assert len(gone) == max(0, len(slots) - num_free)
        if victims is not None:
            assert gone == set(victims[: len(gone)])
        self.expect_eviction(gone, (), pending)
        self.refs.update(dict.fromkeys(keys[: len(slots)], -1))

    @precondition(lambda self: -1 in self.refs.values())
    @rule(data=st.data(), how=st.sampled_from(["ok", "ok", "fail", "orphan"]))
    def end_a_write(self, data, how):
        writing = [key for key, refs in self.refs.items() if refs == -1]
        key = data.draw(st.sampled_from(writing))
        if how == "ok":
            self.primary.complete_write([key], success=True)
            self.refs[key] = 0
            return
        del self.refs[key]
        if how == "fail":
            self.primary.complete_write([key], success=False)
        else:
            self.held += self.primary.orphan_write([key])

    @precondition(lambda self: self.held)
    @rule()
    def release(self):
        self.primary.release_slots([self.held.pop()])

    @rule(keys=BATCH)
    def pin(self, keys):
        if any(self.refs.get(key, -1) < 0 for key in keys):
            before = whole_state(self.primary)
            with pytest.raises(StateError):
                self.primary.pin(keys)
            assert whole_state(self.primary) == before
            return
        self.primary.pin(keys)
        for key in keys:
            self.refs[key] += 1

    @precondition(lambda self: any(refs > 0 for refs in self.refs.values()))
    @rule(data=st.data())
    def unpin(self, data):
        key = data.draw(st.sampled_from([key for key, refs in self.refs.items() if refs > 0]))
        self.primary.unpin([key])
        self.refs[key] -= 1

    @rule(key=SOME)
    def defer(self, key):
        if self.refs.get(key, -1) >= 0:
            self.primary.protect([self.primary.slot_of(key)])
            self.debts[key] += 1

    @precondition(lambda self: self.debts)
    @rule(data=st.data())
    def pay(self, data):
        key = data.draw(st.sampled_from(sorted(self.debts)))
        self.primary.unprotect([self.primary.slot_of(key)])
        self.debts -= Counter([key])

    @rule(keys=BATCH, ends=st.booleans())
    def use(self, keys, ends):
        self.primary.touch(self.ctx, keys)
        self.used.update(keys)
        if ends:
            self.primary.close_request(self.ctx)
            self.begin()

    @rule(really=st.sampled_from([False, False, True]), data=st.data())
    def reset(self, really, data):
        if really:
            pinned = [key for key, refs in self.refs.items() if refs > 0]
            late = [self.primary.slot_of(key) for key in pinned if data.draw(st.booleans())]
            self.primary.reset(late)
            self.held += late
            self.refs.clear()
            self.debts.clear()

    @invariant()
    def the_model_agrees(self):
        if not hasattr(self, "primary"):
            return
        assert {key: refs for key, _, refs in self.primary.resident()} == self.refs
        slots = [slot for _, slot, _ in self.primary.resident()]
        free = list(self.primary.pool.unused)
        assert sorted(slots + free + self.held) == list(range(self.num_slots))
        assert sum(self.primary.counts.values()) == self.num_slots
        assert self.primary.counts["held"] == len(self.held)
        answers = {-1: PENDING, None: MISS}
        for key in KEYS:
            refs = self.refs.get(key)
            assert self.primary.lookup(key) is answers.get(refs, HIT)
        assert sorted(ranked(self.primary)) == sorted(self.refs)
        assert not list(self.primary.policy.violations())
        assert not self.primary.forgotten()
        skipped = {self.primary.key_of(slot) for slot in self.primary.policy.skipped()}
        assert all(self.refs[key] or self.debts[key] for key in skipped)
        debts = {self.primary.key_of(slot): count for slot, count in self.primary.debts().items()}
        assert debts == self.debts
        assert self.primary.protected_blocks == sum(not self.refs[key] for key in self.debts)

    @invariant()
    def events_tell_what_is_readable(self):
        if not hasattr(self, "primary"):
            return
        for event in self.primary.take_events():
            if event.metadata_only:
                assert not self.replayed & set(event.keys)
            elif event.removed:
                self.replayed -= set(event.keys)
            else:
                self.replayed |= set(event.keys)
        assert self.replayed == {key for key, refs in self.refs.items() if refs >= 0}


class TestPrimary(PrimaryMachine.TestCase):
    settings = AS_THE_PROFILE
