"""Naive cache policies, written from their definitions with lists and no thought of speed.

They know nothing of the policies they check. `NaiveArc` is the paper's figure 4 read line by line:
one key at a time, evicting and inserting in one go. `Rig` drives a policy the way the engine does,
`PolicyMachine` in every way that the contract allows, beside its model.
"""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvoffload_async.abc.policy import CachePolicy
from kvoffload_async.policies.arc import ArcPolicy
from kvoffload_async.tiers.files.ranking import KeyRanking
from kvoffload_async.types import OffloadKey, make_offload_key

Evictable = Callable[[OffloadKey], bool]


class NoVictimError(Exception):
    pass


def key(name: int | str) -> OffloadKey:
    return make_offload_key(str(name).encode())


def keys(names: Iterable[int | str]) -> list[OffloadKey]:
    return [key(name) for name in names]


def anything(_: OffloadKey) -> bool:
    return True


def nothing(_: OffloadKey) -> bool:
    return False


class NaiveLru:
    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.order: list[OffloadKey] = []

    def resident(self) -> list[OffloadKey]:
        return self.order

    def state(self) -> object:
        return tuple(self.order)

    def make_room(
        self, incoming: Sequence[OffloadKey], count: int, is_evictable: Evictable
    ) -> list[OffloadKey] | None:
        victims = [key for key in self.order if is_evictable(key)][:count]
        if len(victims) < count:
            return None
        self.order = [key for key in self.order if key not in victims]
        return victims

    def admit(self, keys: Sequence[OffloadKey]) -> None:
        self.order = self.order + list(keys)

    def store(
        self, incoming: Sequence[OffloadKey], count: int, is_evictable: Evictable
    ) -> list[OffloadKey] | None:
        victims = self.make_room(incoming, count, is_evictable)
        if victims is not None:
            self.admit(incoming)
        return victims

    def access(self, keys: Sequence[OffloadKey], reused: Evictable) -> None:
        for key in reversed(keys):
            if key in self.order:
                self.order.remove(key)
                self.order.append(key)

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        self.order = [key for key in self.order if key not in keys]

    def clear(self) -> None:
        self.order = []


class NaiveArc:
    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.clear()

    def clear(self) -> None:
        self.T1: list[OffloadKey] = []
        self.T2: list[OffloadKey] = []
        self.B1: list[OffloadKey] = []
        self.B2: list[OffloadKey] = []
        self.p = 0.0

    def resident(self) -> list[OffloadKey]:
        return self.T1 + self.T2

    def state(self) -> object:
        return tuple(self.T1), tuple(self.T2), tuple(self.B1), tuple(self.B2), self.p

    def store(
        self, incoming: Sequence[OffloadKey], count: int, is_evictable: Evictable
    ) -> list[OffloadKey] | None:
        """The paper's misses, one key at a time, the last `count` of them into a full cache."""
        before = deepcopy(self.__dict__)
        present = set(self.resident())
        num_free = len(incoming) - count
        try:
            found = [
                self._miss(x, turn >= num_free, lambda key: key in present and is_evictable(key))
                for turn, x in enumerate(incoming)
            ]
        except NoVictimError:
            self.__dict__ = before
            return None
        return [victim for victim in found if victim is not None]

    def make_room(
        self, incoming: Sequence[OffloadKey], count: int, is_evictable: Evictable
    ) -> list[OffloadKey] | None:
        """Only the evictions and the adaptation of `store`; the insertions are still to come."""
        future = deepcopy(self)
        victims = future.store(incoming, count, is_evictable)
        if victims is not None:
            self.p = future.p
            for victim in victims:
                if victim in self.T1:
                    self.T1.remove(victim)
                    self.B1.append(victim)
                else:
                    self.T2.remove(victim)
                    self.B2.append(victim)
        return victims

    def admit(self, keys: Sequence[OffloadKey]) -> None:
        for x in keys:
            if x in self.B1 + self.B2:
                (self.B1 if x in self.B1 else self.B2).remove(x)
                self.T2.append(x)
            else:
                self.T1.append(x)
                while len(self.T1) + len(self.B1) > self.capacity_blocks:
                    self.B1.pop(0)
                while len(self.T1 + self.T2 + self.B1 + self.B2) > 2 * self.capacity_blocks:
                    self.B2.pop(0)

    def access(self, keys: Sequence[OffloadKey], reused: Evictable) -> None:
        for x in reversed(keys):
            for resident in (self.T1, self.T2):
                if x in resident:
                    resident.remove(x)
                    (self.T2 if reused(x) else resident).append(x)
                    break

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        self.T1 = [key for key in self.T1 if key not in keys]
        self.T2 = [key for key in self.T2 if key not in keys]

    def _miss(self, x: OffloadKey, full: bool, is_evictable: Evictable) -> OffloadKey | None:
        c = self.capacity_blocks
        ghosts = next((ghosts for ghosts in (self.B1, self.B2) if x in ghosts), None)
        if ghosts is not None:  # cases II and III
            self._adapt(x)
            victim = self._replace(x, is_evictable) if full else None
            ghosts.remove(x)
            self.T2.append(x)
            return victim
        if len(self.T1) == c:  # case IV A, second half: T1 is the whole cache
            assert full
            assert not self.B1
            victim = self._oldest(self.T1, is_evictable)
            if victim is None:
                raise NoVictimError
            self.T1.remove(victim)  # no ghost
        else:
            if len(self.T1) + len(self.B1) == c:  # case IV A, first half
                self.B1.pop(0)
            elif len(self.T1 + self.T2 + self.B1 + self.B2) == 2 * c:  # case IV B
                self.B2.pop(0)
            victim = self._replace(x, is_evictable) if full else None
        self.T1.append(x)
        return victim

    def _adapt(self, x: OffloadKey) -> None:
        b1, b2 = len(self.B1), len(self.B2)
        if x in self.B1:
            self.p = min(self.p + (1.0 if b1 >= b2 else b2 / b1), self.capacity_blocks)
        else:
            self.p = max(self.p - (1.0 if b2 >= b1 else b1 / b2), 0)

    def _replace(self, x: OffloadKey, is_evictable: Evictable) -> OffloadKey:
        if self.T1 and (len(self.T1) > self.p or (x in self.B2 and len(self.T1) == self.p)):
            preferred = ((self.T1, self.B1), (self.T2, self.B2))
        else:
            preferred = ((self.T2, self.B2), (self.T1, self.B1))
        for resident, ghosts in preferred:
            victim = self._oldest(resident, is_evictable)
            if victim is not None:
                resident.remove(victim)
                ghosts.append(victim)
                return victim
        raise NoVictimError

    @staticmethod
    def _oldest(resident: list[OffloadKey], is_evictable: Evictable) -> OffloadKey | None:
        return next((key for key in resident if is_evictable(key)), None)


def arc_state(policy: ArcPolicy) -> object:
    return (*policy.lists(), policy.p)


def check_arc_invariants(policy: ArcPolicy) -> None:
    c = policy.capacity_blocks
    t1, t2, b1, b2 = map(list, policy.lists())
    assert len(t1) + len(t2) <= c
    assert len(t1) + len(b1) <= c
    assert len(t1 + t2 + b1 + b2) <= 2 * c
    assert len(set(t1 + t2 + b1 + b2)) == len(t1 + t2 + b1 + b2)
    assert 0 <= policy.p <= c


class Rig:
    """One cache with a policy, driven like the engine's: miss, make room, admit, access.

    The policy ranks slots, but is told of keys: `policy` is a `KeyRanking`, and `inner` in it.
    """

    def __init__(self, policy: CachePolicy, pinned: Iterable[OffloadKey] = ()) -> None:
        self.inner: Any = policy
        self.policy = KeyRanking(policy)
        self.pinned = set(pinned)
        self.num_scans = 0

    def is_evictable(self, key: OffloadKey) -> bool:
        self.num_scans += 1
        return key not in self.pinned

    def unpin(self, keys: Iterable[OffloadKey]) -> None:
        keys = [key for key in keys if key in self.pinned]
        self.pinned.difference_update(keys)
        self.policy.released(keys)

    def store(self, *names: int | str) -> list[OffloadKey] | None:
        """Make absent keys resident; the victims, or None if there was no room."""
        incoming = keys(names)
        num_free = self.policy.capacity_blocks - len(list(self.policy.resident()))
        count = max(0, len(incoming) - num_free)
        victims = self.policy.make_room(incoming, count, self.is_evictable)
        if victims is not None:
            self.policy.admit(incoming)
        return victims

    def reuse(self, *names: int | str) -> None:
        self.policy.access(keys(names), anything)

    def request(self, *names: int | str) -> set[OffloadKey]:
        """Serve one request, head first; the keys it found."""
        prompt = keys(names)
        found = set(prompt) & set(self.policy.resident())
        pinned_for_it = set(prompt) - self.pinned
        self.pinned |= pinned_for_it
        assert self.store(*(n for n in names if key(n) not in found)) is not None
        self.unpin(pinned_for_it)
        self.policy.access(prompt, lambda key: key in found)
        return found


UNIVERSE = keys(range(12))
some_keys = st.lists(st.sampled_from(UNIVERSE), unique=True, max_size=10)
few_keys = st.lists(st.sampled_from(UNIVERSE), unique=True, max_size=2)
pins = st.sets(st.sampled_from(UNIVERSE), max_size=6)


class PolicyMachine(RuleBasedStateMachine):
    """A policy and its model under the same operations, in caches so small that all cases occur."""

    policy_type: ClassVar[type[CachePolicy]]
    model_type: ClassVar[Any]

    def policy_state(self) -> object:
        raise NotImplementedError

    @initialize(capacity_blocks=st.integers(1, 5))
    def start(self, capacity_blocks):
        self.inner = self.policy_type(capacity_blocks)
        self.policy = KeyRanking(self.inner)
        self.model = self.model_type(capacity_blocks)
        self.pinned: set[OffloadKey] = set()
        self.num_refused = self.num_chances = 0

    def absent(self, names):
        """The longest part of `names` that can be stored, and the victims it needs at least."""
        capacity_blocks, present = self.policy.capacity_blocks, self.model.resident()
        incoming = [key for key in names if key not in present][:capacity_blocks]
        return incoming, max(0, len(incoming) - (capacity_blocks - len(present)))

    def choose_victims(self, model_call, incoming, count, also_pinned):
        """Make room while `also_pinned` are pinned too, as for the time of one operation."""
        present, before = set(self.model.resident()), self.policy_state()
        pinned = self.pinned | also_pinned
        refused: set[OffloadKey] = set()
        num_accepted = 0

        def is_evictable(key):
            nonlocal num_accepted
            num_accepted += key not in pinned
            self.num_refused += key in pinned
            refused.update({key} & pinned)
            return key not in pinned

        expected = model_call(incoming, count, lambda key: key not in pinned)
        victims = self.policy.make_room(incoming, count, is_evictable)
        assert victims == expected
        assert num_accepted <= 3 * count
        self.release(sorted(refused - self.pinned))
        if victims is None:
            assert self.policy_state() == before
            assert len(present - pinned) < count
            return False
        assert len(set(victims)) == count
        assert set(victims) <= present - pinned
        return True

    def release(self, names):
        self.policy.released(names)
        self.num_chances += len(names)

    @rule(names=some_keys, pinned=pins)
    def store(self, names, pinned):
        incoming, count = self.absent(names)
        if self.choose_victims(self.model.store, incoming, count, pinned):
            self.policy.admit(incoming)
            self.num_chances += len(incoming)

    @rule(names=some_keys, pinned=pins, num_withheld=st.integers(0, 3), data=st.data())
    def store_a_part_with_slots_withheld(self, names, pinned, num_withheld, data):
        incoming, count = self.absent(names)
        count = min(len(incoming), count + num_withheld)
        if self.choose_victims(self.model.make_room, incoming, count, pinned):
            part = [key for key in incoming if data.draw(st.booleans())]
            self.policy.admit(part)
            self.model.admit(part)
            self.num_chances += len(part)

    @rule(names=pins)
    def pin(self, names):
        self.pinned |= names

    @rule(names=pins)
    def unpin(self, names):
        self.pinned -= names
        self.release(sorted(names))

    @rule(names=some_keys, found=pins)
    def access(self, names, found):
        self.policy.access(names, found.__contains__)
        self.model.access(names, found.__contains__)
        self.num_chances += len(names)

    @rule(names=some_keys, pinned=pins)
    def serve(self, names, pinned):
        names = names[: self.policy.capacity_blocks]
        found = set(names) & set(self.model.resident())
        self.store(names, pinned | set(names))
        self.access(names, found)

    @rule(names=few_keys)
    def discard(self, names):
        self.policy.discard(names)
        self.model.discard(names)

    @rule(really=st.integers(0, 15).map(lambda n: n == 15))
    def clear(self, really):
        if really:  # seldom: it takes many steps to fill the ghosts again
            self.policy.clear()
            self.model.clear()

    @invariant()
    def policy_and_model_agree(self):
        assert self.policy_state() == self.model.state()
        assert sorted(self.policy.resident()) == sorted(self.model.resident())
        assert list(self.policy.violations()) == []

    @invariant()
    def no_evictable_slot_is_skipped(self):
        assert set(self.policy.skipped()) <= self.pinned

    @invariant()
    def what_must_stay_is_asked_about_once_for_each_time_it_was_put_in_moved_or_released(self):
        assert self.num_refused <= self.num_chances
