"""What is known of objects: what was seen last, and only so much of it."""

import pytest

from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.object import packs as module
from kvoffload_async.tiers.object.packs import Chains

K = [key_of(number) for number in range(20)]


@pytest.fixture
def chains():
    return Chains()


def test_a_block_is_in_the_object_that_was_seen_with_it(chains):
    chains.saw_object(K[:4])
    assert [chains.first_of(key) for key in K[:5]] == [K[0]] * 4 + [None]
    assert [chains.name_of(key) for key in K[3:5]] == [K[0], K[4]]
    assert [chains.blocks_beside(key) for key in K[3:5]] == [4, 1]
    assert [chains.length_at(K, index) for index in range(5)] == [4, 1, 1, 1, 1]


def test_of_an_object_holds_what_was_seen_of_it_last(chains):
    chains.saw_object(K[:4])
    chains.saw_object(K[:2])
    assert [chains.first_of(key) for key in K[:4]] == [K[0], K[0], None, None]
    assert chains.length_at(K, 0) == 2


def test_an_object_that_was_lost_has_no_block(chains):
    chains.saw_object(K[:4])
    chains.saw_object(K[2:6])
    chains.lost_object(K[0])
    chains.lost_object(K[10])
    assert [chains.first_of(key) for key in K[:6]] == [None, None, *[K[2]] * 4]


def test_a_block_of_two_objects_is_in_the_one_seen_last(chains):
    chains.saw_object(K[:4])
    chains.saw_object(K[2:6])
    assert chains.first_of(K[2]) == K[2]
    chains.saw_object(K[:4])
    assert [chains.first_of(key) for key in K[:6]] == [K[0]] * 4 + [K[2]] * 2


def test_an_object_is_as_long_as_the_chain_goes_on_in_it(chains):
    chains.saw_object(K[:4])
    assert chains.length_at([*K[:2], K[7], K[2]], 0) == 2
    assert chains.length_at(K[:3], 0) == 3


def test_a_block_follows_only_what_was_right_before_it(chains):
    chains.saw_chain(K[:3])
    assert chains.follows(K[0], K[1])
    assert not chains.follows(K[0], K[2])
    assert not chains.follows(K[2], K[3])
    chains.saw_chain(K[:1])
    chains.saw_chain([])
    assert chains.follows(K[1], K[2])


def test_no_more_is_remembered_than_fits_and_what_was_seen_first_goes_first(chains, monkeypatch):
    monkeypatch.setattr(module, "MOST_REMEMBERED", 8)
    for number in range(0, 10_000, 5):
        seen = [key_of(number + i) for i in range(5)]
        chains.saw_chain(seen)
        chains.saw_object(seen)
        chains.saw_object(seen[3:4])
    assert len(chains) == 3 * 8
    assert chains.follows(seen[3], seen[4])
    assert chains.first_of(seen[2]) == seen[0]
    assert chains.first_of(key_of(0)) is None


def test_what_is_seen_again_is_remembered_longer(chains, monkeypatch):
    monkeypatch.setattr(module, "MOST_REMEMBERED", 3)
    for key in (*K[:3], K[0], K[3]):
        chains.saw_object([key])
    assert [chains.first_of(key) is not None for key in K[:4]] == [True, False, True, True]
