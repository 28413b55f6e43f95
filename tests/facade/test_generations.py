"""Generations: a manager serves and stores blocks of the present one alone."""

import pytest
from facade.worlds import EXCLUSIVE, HIT, MISS, SLOT_BYTES, World
from hypothesis import given
from hypothesis import strategies as st

from kvoffload_async.errors import ClosedError, ConfigError, StateError
from kvoffload_async.facade.generation import Generation
from kvoffload_async.facade.manager import OffloadingManager
from kvoffload_async.facade.spec import TieringOffloadingSpec
from kvoffload_async.types import (
    ReqContext,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)

HASHES = [bytes([number]) * 32 for number in range(4)]


def keys_of(manager, *numbers):
    return [manager.generation.key(HASHES[number]) for number in numbers]


def store(world, ctx, keys):
    output = world.manager.prepare_store(keys, ctx)
    world.manager.complete_store(output.keys_to_store, ctx)
    return list(output.keys_to_store)


@pytest.fixture
def world():
    world = World(EXCLUSIVE, generation=1)
    yield world
    world.end()


@pytest.fixture
def ctx(world):
    ctx = ReqContext("r")
    world.manager.on_new_request(ctx)
    return ctx


def test_without_a_generation_keys_are_what_they_always_were():
    assert OffloadingManager.generation.key(HASHES[0], 3) == make_offload_key(HASHES[0], 3)
    assert OffloadingManager.generation.has(make_offload_key(b"x"))


@given(
    st.binary(min_size=1, max_size=40),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 3),
)
def test_a_key_is_of_its_generation_alone(block_hash, one, other, group):
    key = Generation(one).key(block_hash, group)
    assert Generation(str(one)).has(key)
    assert Generation(other).has(key) == (one == other)
    assert get_offload_group_idx(key) == group
    tagged = get_offload_block_hash(key)
    assert (tagged[: len(block_hash) - 1], tagged[-1:]) == (block_hash[:-1], block_hash[-1:])


def test_what_was_stored_is_served_until_the_generation_changes(world, ctx):
    keys = keys_of(world.manager, 0, 1)
    assert store(world, ctx, keys) == keys
    world.rest()
    assert [world.manager.lookup(key, ctx) for key in keys] == [HIT, HIT]
    world.manager.invalidate(2)
    assert [world.manager.lookup(key, ctx) for key in keys] == [MISS, MISS]
    new = keys_of(world.manager, 0, 1)
    assert [world.manager.lookup(key, ctx) for key in new] == [MISS, MISS]
    world.evict_everything()
    assert [world.manager.lookup(key, ctx) for key in (*keys, *new)] == [MISS] * 4
    assert store(world, ctx, new) == new
    world.rest()


def test_a_generation_that_comes_again_finds_its_blocks(world, ctx):
    keys = keys_of(world.manager, 0)
    store(world, ctx, keys)
    world.rest()
    for generation in ("other", "1"):
        world.manager.invalidate(generation)
    assert world.manager.lookup(keys[0], ctx) is HIT


def test_old_keys_are_neither_stored_nor_pinned(world, ctx):
    old = keys_of(world.manager, 0, 1)
    store(world, ctx, old[:1])
    world.manager.invalidate("next")
    new = keys_of(world.manager, 2)
    assert store(world, ctx, [*old, *new]) == new
    with pytest.raises(StateError, match=r"not of generation 'next'.*invalidated"):
        world.manager.prepare_load(old[:1], ctx)
    assert world.counts["pinned"] == 2, "the cascades' own"
    world.rest()


def test_what_is_on_the_way_ends_and_is_not_served(world, ctx):
    old = keys_of(world.manager, 0, 1)
    output = world.manager.prepare_store(old[:1], ctx)
    store(world, ctx, old[1:])
    world.step()
    assert world.parked(), "a cascade is under way"
    world.manager.invalidate(2)
    world.manager.complete_store(output.keys_to_store, ctx)
    world.rest()
    assert [world.manager.lookup(key, ctx) for key in old] == [MISS, MISS]
    assert not world.counts["pinned"]
    assert world.counts["idle"] == 2, "until others need the room"


def test_what_is_no_label_is_refused_and_changes_nothing(world):
    before = world.manager.generation
    for label in ("", None, True, "x" * 201):
        with pytest.raises(ConfigError, match="generation: "):
            world.manager.invalidate(label)
    assert world.manager.generation is before


def test_a_manager_that_was_shut_down_has_no_generations():
    world = World()
    world.end()
    with pytest.raises(ClosedError):
        world.manager.invalidate(1)


def test_the_configuration_says_with_which_generation_a_manager_begins():
    config = {"cpu_bytes_to_use": 4 * 4096, "block_bytes": SLOT_BYTES, "generation": "rev-5"}
    with TieringOffloadingSpec(config) as spec:
        assert spec.get_manager().generation.label == "rev-5"


@pytest.mark.parametrize("stop_at_miss", [False, True])
def test_keys_of_another_generation_are_misses_among_those_looked_up(world, ctx, stop_at_miss):
    first, second, third = keys_of(world.manager, 0, 1, 2)
    store(world, ctx, [first, third])
    other = Generation(2).key(HASHES[1])
    answers = world.manager.lookup_many([first, other, third], ctx, stop_at_miss=stop_at_miss)
    assert answers == ([HIT, MISS] if stop_at_miss else [HIT, MISS, HIT])
    assert world.manager.lookup_many([first, second], ctx) == [HIT, MISS]
