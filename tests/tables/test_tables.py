"""Keys, numbers and lists of numbers, against dictionaries and lists."""

import errno
import gc
import hashlib
import mmap
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvoffload_async.errors import StateError
from kvoffload_async.facade.generation import Generation
from kvoffload_async.policies.arc import ArcPolicy
from kvoffload_async.policies.lru import LruPolicy
from kvoffload_async.tables.arrays import (
    MAX_NUMBERS,
    Objects,
    integers,
    long_integers,
    small_integers,
)
from kvoffload_async.tables.keymap import MOST_PARTS, KeyMap, KeyTable
from kvoffload_async.tables.lists import FreeNumbers, NumberLists
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.files import ranking as ranking_module
from kvoffload_async.tiers.files.ranking import KeyRanking, placeholders
from kvoffload_async.types import OffloadKey, make_offload_key

K = [key_of(number) for number in range(40)]
CAPACITY = 12

some_keys = st.lists(st.sampled_from(K), unique=True, max_size=6)


# -- maps ---------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["update", "fill", "discard", "discard_present", "change", "pop"]),
            some_keys,
        )
    )
)
def test_a_map_is_a_dictionary(steps):
    found, model = KeyMap(), {}
    for number, (what, keys) in enumerate(steps):
        numbers = range(1000 * number, 1000 * number + len(keys))
        if what.startswith("discard"):
            there = [key for key in keys if key in model]
            assert getattr(found, what)(keys) in (None, there)
            for key in keys:
                model.pop(key, None)
            continue
        if what == "pop":
            popped = found.pop(len(keys))
            assert len(popped) == min(len(keys), len(model))
            assert all(model.pop(key) == number for key, number in popped)
            continue
        if what == "change":
            other = [key for key in keys if model.get(key) != 7]
            assert found.change([*keys, *keys], 7) == other
            model.update(dict.fromkeys(keys, 7))
            continue
        model.update(zip(keys, numbers, strict=True))
        getattr(found, what)(keys, numbers)
    assert (len(found), set(found), dict(found.items())) == (len(model), model.keys(), model)
    assert found.find(K) == [found.get(key) for key in K] == [model.get(key) for key in K]
    assert [key in found for key in K] == [key in model for key in K]
    found.clear()
    assert not found


@given(some_keys, st.integers(1, 4), st.sampled_from([1, 10_000, 1 << 20]))
def test_a_map_is_read_in_portions_while_it_changes(keys, count, capacity):
    spread = KeyMap(capacity)
    spread.update(keys, range(len(keys)))
    found, last = [], None
    while portion := spread.following(last, count):
        assert len(portion) <= count
        found += portion
        last = portion[-1]
        spread.discard([last])
    assert sorted(found) == sorted(keys)


def test_a_copy_is_its_own():
    one = KeyMap()
    one.update(K[:3], [0, 1, 2])
    copied = one.copy()
    one.update(K[2:4], [7, 8])
    assert dict(one.items()) == dict(zip(K[:4], [0, 1, 7, 8], strict=True))
    assert dict(copied.items()) == dict(zip(K[:3], [0, 1, 2], strict=True))


def test_keys_are_spread_evenly_whether_their_hashes_are_random_or_counted():
    for keys in (
        [key_of(number) for number in range(64 * MOST_PARTS)],
        [make_offload_key(number.to_bytes(32, "big")) for number in range(64 * MOST_PARTS)],
    ):
        spread = KeyMap()
        spread.update(keys, range(len(keys)))
        assert max(map(len, spread.parts)) < 2 * 64


@given(st.lists(st.sampled_from(K), min_size=1), st.booleans())
def test_a_table_is_filled_with_many_keys_as_with_one_by_one(keys, by_part):
    keys = sorted(
        dict.fromkeys(keys), key=lambda key: (key[0] + key[-5]) % MOST_PARTS if by_part else key
    )
    numbers = np.random.default_rng(0).permutation(len(keys))
    filled, added = KeyTable(len(K)), KeyTable(len(K))
    filled.fill(keys, numbers)
    added.add(keys, numbers.tolist())
    assert filled.items() == added.items()
    assert filled.keys_in(range(len(keys))) == added.keys_of(range(len(keys)))
    assert filled.remove([0]) == added.remove([0])


@pytest.mark.parametrize("call", ["get", "find", "update", "fill"])
def test_what_is_too_short_to_be_a_key_is_an_error_that_says_so(call):
    short = OffloadKey(b"abc")
    arguments = {"get": [short], "find": [[K[0], short]], "update": [[K[0], short], [1, 2]]}
    arguments["fill"] = arguments["update"]
    with pytest.raises(StateError, match=r"b'abc' is too short: .*make_offload_key"):
        getattr(KeyMap(), call)(*arguments[call])


def test_arrays_start_with_zeros_and_none():
    for make in integers, small_integers, long_integers:
        assert list(make(3)) == [0, 0, 0]
    assert Objects().find([0, 10**6]) == [None, None]


def resident_bytes():
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("policy", [LruPolicy, ArcPolicy])
def test_a_ranking_for_as_many_blocks_as_can_be_numbered_takes_memory_for_those_it_has(policy):
    before = resident_bytes()
    tracemalloc.start()
    try:
        ranking = KeyRanking(policy(MAX_NUMBERS))
        numbers = long_integers(MAX_NUMBERS)
        ranking.admit(K[:3])
        numbers[MAX_NUMBERS - 1] = 7
        traced_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert traced_bytes < 1 << 20
    assert resident_bytes() - before < 16 << 20
    assert ranking.resident() == K[:3]
    assert (numbers[0], numbers[MAX_NUMBERS - 1]) == (0, 7)


def test_objects_are_in_parts_which_the_collector_does_not_traverse():
    objects = Objects()
    assert not objects.parts, "an empty table has none"
    objects.update([5000, 4095, 4096], "abc")
    assert len(objects.parts) == 2
    assert not any(map(gc.is_tracked, objects.parts.values()))
    assert objects.get(5000) == "a"
    assert objects.find([4096, 0, 4095]) == ["c", None, "b"]
    assert objects.find_range(range(4094, 4098)) == [None, "b", "c", None]
    assert objects.find_range(range(4095, 4096)) == ["b"]
    assert objects.find_range(range(0)) == []
    assert objects.find_range(range(9000))[4094:4097] == [None, "b", "c"]
    objects.clear()
    assert objects.find([4095]) == [None]


def test_tables_of_integers_need_no_kernel_with_huge_pages(monkeypatch):
    class Unadvised(mmap.mmap):
        def madvise(self, option):
            assert option == mmap.MADV_NOHUGEPAGE
            raise OSError(errno.EINVAL, "no such advice")

    monkeypatch.setattr(mmap, "mmap", Unadvised)
    assert list(integers(3)) == [0, 0, 0]


def test_a_table_without_address_space_is_an_error_of_memory(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(MemoryError, match="no address space for a table of 40 bytes"):
        long_integers(5)


def test_a_table_finds_keys_and_numbers():
    table = KeyTable(4)
    table.add(K[:3], [2, 0, 3])
    assert table.find(K[:4]) == [2, 0, 3, None]
    assert table.keys_of([0, 2]) == [K[1], K[0]]
    assert table.remove([0]) == [K[1]]
    assert K[1] not in table
    assert table.items() == [(K[0], 2), (K[2], 3)]
    table.clear()
    assert table.items() == []


# -- numbers ------------------------------------------------------------------------------------


def test_numbers_never_taken_come_first_then_the_last_returned():
    free = FreeNumbers(4)
    assert free.take(2) == [0, 1]
    free.give_back([0, 1])
    assert (free.count, list(free)) == (4, [2, 3, 0, 1])
    assert free.take(3) == [2, 3, 1]
    free.reset([3, 2])
    assert free.take(2) == [2, 3]


class ListsMachine(RuleBasedStateMachine):
    """Two linked lists beside two plain ones."""

    def __init__(self):
        super().__init__()
        self.lists = NumberLists(CAPACITY, 2)
        self.model: list[list[int]] = [[], []]

    def where(self, number):
        return next(which for which in (0, 1) if number in self.model[which])

    @rule(data=st.data(), which=st.integers(0, 1))
    def append(self, data, which):
        absent = sorted(set(range(CAPACITY)) - {*self.model[0], *self.model[1]})
        numbers = data.draw(st.lists(st.sampled_from(absent), unique=True)) if absent else []
        self.lists.append(numbers, which)
        self.model[which] += numbers

    @rule(which=st.integers(0, 1), start=st.integers(0, CAPACITY - 1), length=st.integers(1, 5))
    def append_range(self, which, start, length):
        numbers = range(start, min(start + length, CAPACITY))
        if not {*self.model[0], *self.model[1]}.intersection(numbers):
            self.lists.append(numbers, which)
            self.model[which] += numbers

    @precondition(lambda self: any(self.model))
    @rule(data=st.data(), which=st.integers(0, 1), how=st.sampled_from(["any", "run", "nur"]))
    def move_or_remove(self, data, which, how):
        members = [*self.model[0], *self.model[1]]
        numbers = data.draw(st.lists(st.sampled_from(members), unique=True))
        if how != "any":
            numbers = sorted(numbers, key=members.index, reverse=how == "nur")
        for number in numbers:
            self.model[self.where(number)].remove(number)
        if data.draw(st.booleans()):
            self.lists.remove(numbers)
        else:
            self.lists.move_to_end(numbers, which)
            self.model[which] += numbers

    @rule(count=st.integers(0, 5), which=st.integers(0, 1))
    def take_front(self, count, which):
        expected = self.model[which][:count]
        assert self.lists.take_front(len(expected), which) == expected
        del self.model[which][:count]

    @rule(really=st.integers(0, 9).map(lambda n: n == 9))
    def clear(self, really):
        if really:
            self.lists.clear()
            self.model = [[], []]

    @invariant()
    def both_agree_in_both_directions(self):
        for which in 0, 1:
            assert list(self.lists.walk(which)) == self.model[which]
            back, ring = [], CAPACITY + which
            while (ring := self.lists._before[ring]) < CAPACITY:
                back.append(ring)
            assert back == self.model[which][::-1]


TestLists = pytest.mark.stateful(ListsMachine.TestCase)


# -- ranking ------------------------------------------------------------------------------------


def test_a_ranking_ignores_keys_that_are_absent_or_named_twice():
    ranking = KeyRanking(LruPolicy(4))
    ranking.admit(K[:3])
    ranking.access([K[0], K[9], K[0]], lambda _key: True)
    assert ranking.resident() == [K[1], K[2], K[0]]
    ranking.discard([K[1], K[9], K[1]])
    assert (len(ranking), set(ranking), K[1] in ranking) == (2, {K[2], K[0]}, False)
    assert list(ranking.violations()) == []


@pytest.mark.parametrize("policy", [LruPolicy, ArcPolicy])
def test_a_ranking_that_is_filled_ranks_as_one_that_admits(policy, monkeypatch):
    monkeypatch.setattr(ranking_module, "_PORTION", 7)
    filled, admitted = KeyRanking(policy(40)), KeyRanking(policy(40))
    order = np.random.default_rng(1).permutation(30)
    filled.fill(30, [(part, [K[n] for n in part]) for part in np.split(order, [11, 12])])
    admitted.admit(K[:30])
    for ranking in filled, admitted:
        assert ranking.resident() == K[:30]
        assert list(ranking.violations()) == []
        assert len(ranking) == 30
    assert filled.admit(K[30:33]) == admitted.admit(K[30:33])
    assert filled.make_room(K[33:40], 7, bool) == admitted.make_room(K[33:40], 7, bool)


def test_a_policy_that_ranks_other_slots_than_it_was_given_is_a_violation():
    policy = LruPolicy(4)
    ranking = KeyRanking(policy)
    ranking.admit(K[:2])
    policy.discard([0])
    assert list(ranking.violations()) == ["the policy ranks 1 slots, not those of the 2 keys"]


def test_nobody_is_a_key_of_its_own():
    assert len({*placeholders(1000), *K}) == 1000 + len(K)


@pytest.mark.parametrize("generation", [None, "of these weights"])
@pytest.mark.parametrize(
    "block_hash",
    [
        pytest.param(lambda number: hashlib.sha256(str(number).encode()).digest(), id="hashes"),
        pytest.param(lambda number: number.to_bytes(32, "big"), id="big-endian counters"),
        pytest.param(lambda number: number.to_bytes(32, "little"), id="little-endian counters"),
        pytest.param(lambda number: bytes([number % 256]) * 32, id="one byte repeated"),
    ],
)
def test_keys_of_any_hashes_and_generation_spread_over_the_parts(block_hash, generation):
    of_generation, spread = Generation(generation), KeyMap()
    keys = [of_generation.key(block_hash(number)) for number in range(10_000)]
    spread.update(keys, range(len(keys)))
    fullest = max(map(len, spread.distinct))
    assert fullest <= len(spread) * 4 // MOST_PARTS + 1
