"""What is where: whom the policy makes room for, and how much."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvoffload_async.policies.lru import LruPolicy
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.slab.addresses import SlotNumbers, address_of
from kvoffload_async.tiers.slab.catalog import Catalog
from kvoffload_async.types import OffloadKey

K = [key_of(number) for number in range(60)]


class AskedPolicy(LruPolicy):
    """Remembers for whom room was to be made."""

    def __init__(self, capacity_blocks):
        super().__init__(capacity_blocks)
        self.asked: list[tuple[list[OffloadKey], int]] = []
        self.num_questions = 0
        self.evictable: list[int] = []

    def released(self, slots):
        self.evictable += slots
        super().released(slots)

    def make_room(self, incoming, count, is_evictable):
        self.asked.append((list(incoming), count))

        def counted(slot):
            self.num_questions += 1
            return is_evictable(slot)

        return super().make_room(incoming, count, counted)


def filled(num_slots: int, num_blocks: int) -> tuple[Catalog, AskedPolicy]:
    policy = AskedPolicy(num_slots)
    catalog = Catalog(policy, 16)
    catalog.add_segment(0, num_slots)
    addresses, _, _ = catalog.claim(K[:num_blocks])
    catalog.admit(K[:num_blocks], addresses)
    policy.asked.clear()
    return catalog, policy


def test_room_is_made_only_for_those_that_can_have_some():
    catalog, policy = filled(10, 10)
    addresses, victims, freed = catalog.claim(K[20:45])
    assert (len(addresses), len(victims), len(freed)) == (10, 10, 10)
    assert policy.asked == [(K[20:30], 10)]
    assert not list(catalog.violations())


def test_a_policy_learns_who_comes_also_where_there_is_room():
    catalog, policy = filled(10, 4)
    catalog.claim(K[20:23])
    assert policy.asked == [(K[20:23], 0)]


def test_what_goes_ahead_makes_room_for_keys_that_no_block_has():
    catalog, policy = filled(40, 40)
    addresses, victims, _ = catalog.claim(K[50:53], ahead=16)
    (incoming, count), *_ = policy.asked
    assert incoming[:3] == K[50:53]
    assert len(set(incoming)) == len(incoming) == count == len(victims) == 19
    assert not set(incoming[3:]) & set(K)
    assert (len(addresses), catalog.num_free) == (3, 16)
    _, victims, _ = catalog.claim(K[53:56], ahead=16)
    assert not victims
    assert not list(catalog.violations())


def test_pinned_blocks_do_not_go_ahead():
    catalog, _ = filled(20, 20)
    catalog.pin([address for address in catalog.find(K[:18]) if address is not None])
    addresses, victims, _ = catalog.claim(K[30:31], ahead=16)
    assert len(addresses) == 1
    assert set(victims) == set(K[18:20])


def test_each_pinned_block_is_asked_about_once_and_goes_at_its_rank_when_it_is_unpinned():
    catalog, policy = filled(40, 40)
    oldest = list(catalog._ranking.resident())
    pinned = catalog.find(oldest[:30])
    catalog.pin(pinned)
    for number in range(8):
        _, victims, _ = catalog.claim([key_of(100 + number)])
        assert victims == [oldest[30 + number]]
        assert not list(catalog.violations())
    assert policy.num_questions == 30 + 8
    catalog.unpin(pinned[3:5])
    _, victims, _ = catalog.claim([key_of(110), key_of(111), key_of(112)])
    assert victims == [*oldest[3:5], oldest[38]]
    assert policy.num_questions == 30 + 8 + 3


def test_a_dropped_block_that_was_passed_over_is_not_confused_with_the_next_one_in_its_slot():
    catalog, policy = filled(3, 3)
    oldest = list(catalog._ranking.resident())
    addresses = catalog.find(oldest)
    catalog.pin(addresses[:2])
    (taken,), victims, _ = catalog.claim(K[10:11])
    assert victims == oldest[2:]
    catalog.drop(oldest[0], addresses[0])
    catalog.admit(K[10:11], [taken])
    catalog.pin([taken])
    assert catalog.claim(K[11:12]) == ([], [], [])
    catalog.unpin(addresses[:1])
    assert policy.evictable == []
    assert not list(catalog.violations())
    catalog.unpin([taken])
    _, victims, _ = catalog.claim(K[12:14])
    assert victims == K[10:11]


def test_a_use_of_a_block_that_was_dropped_meanwhile_is_not_counted_for_the_next_one_in_its_slot():
    catalog, _ = filled(3, 3)
    oldest = list(catalog._ranking.resident())
    addresses = catalog.find(oldest[:2])
    slots = catalog._ranking.find(oldest[:2])
    catalog.pin(addresses)
    (address,), _, _ = catalog.claim(K[10:11])
    catalog.drop(oldest[0], addresses[0])
    catalog.admit(K[10:11], [address])
    assert catalog._ranking.find(K[10:11]) == slots[:1]
    catalog.used(oldest[:2])
    assert list(catalog._ranking.resident()) == [K[10], oldest[1]]
    assert not list(catalog.violations())


PINNINGS = st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 5), min_size=1)), max_size=20)


@given(PINNINGS)
def test_a_block_may_go_when_everybody_who_pinned_it_has_unpinned_it(pinnings):
    catalog, _ = filled(6, 6)
    address_of = catalog.find(K[:6])
    held: list[set[int]] = []
    for is_pin, blocks in pinnings:
        if is_pin:
            held.append(blocks)
            catalog.pin([address_of[block] for block in blocks])
        elif held:
            catalog.unpin([address_of[block] for block in held.pop(0)])
        assert catalog.num_evictable == 6 - len(set().union(*held))
        assert not list(catalog.violations())
    _, victims, _ = catalog.claim(K[20:26])
    assert {K.index(key) for key in victims} == set(range(6)) - set().union(*held)


@given(st.permutations(range(3)))
def test_a_dropped_blocks_place_is_free_when_the_last_pin_goes(order):
    catalog, _ = filled(6, 6)
    address = catalog.find(K[:1])
    pinnings = [address, [*address, *catalog.find(K[1:3])], address]
    for pinning in pinnings:
        catalog.pin(pinning)
    catalog.drop(K[0], address[0])
    for index in order:
        assert catalog.num_free == 0
        catalog.unpin(pinnings[index])
    assert catalog.num_free == 1
    assert not list(catalog.violations())


# -- what is found at the opening ------------------------------------------------------------------


SIZES = st.dictionaries(st.integers(0, 40), st.integers(1, 6), max_size=4)


@given(SIZES, st.lists(st.tuples(st.integers(0, 41), st.integers(0, 7)), unique=True))
def test_every_slot_has_a_number_of_its_own_and_what_is_none_has_none(sizes, asked):
    numbers = SlotNumbers(sizes)
    every = [
        address_of(segment, slot) for segment in sorted(sizes) for slot in range(sizes[segment])
    ]
    found, exists = numbers.of(np.array(every, dtype=np.int64))
    assert found.tolist() == list(range(numbers.total))
    assert exists.all()
    assert [n for _, first, behind in numbers.ranges() for n in range(first, behind)] == [*found]
    _, exists = numbers.of(np.array([address_of(*address) for address in asked], dtype=np.int64))
    assert exists.tolist() == [slot < sizes.get(segment, 0) for segment, slot in asked]


@given(SIZES, st.randoms(use_true_random=False))
def test_a_catalog_that_is_filled_has_those_blocks_and_the_other_slots_free(sizes, draw):
    policy = LruPolicy(sum(sizes.values()))
    catalog = Catalog(policy, 4)
    every = [address_of(segment, slot) for segment, slots in sizes.items() for slot in range(slots)]
    addresses = draw.sample(every, draw.randint(0, len(every)))
    keys = K[: len(addresses)]
    order = np.array(draw.sample(range(len(keys)), len(keys)), dtype=np.int64)
    portions = [(part, [keys[n] for n in part]) for part in np.array_split(order, 2) if len(part)]
    assert catalog.fill(sizes, np.array(addresses, dtype=np.int64), portions)
    assert dict(catalog.items()) == dict(zip(keys, addresses, strict=True))
    assert list(catalog._ranking.resident()) == keys
    assert catalog.num_free == len(every) - len(keys)
    assert not list(catalog.violations())


def test_a_catalog_says_that_a_key_came_twice():
    catalog = Catalog(LruPolicy(4), 4)
    assert not catalog.fill({0: 4}, np.arange(2), [(np.arange(2), [K[0], K[0]])])
