"""Names of blocks sealed with AES-SIV: what a tier sees, and what its owner does."""

import asyncio
import logging

import pytest
from sealed_names import key_file, name_of, sealing

from kvoffload_async.config import ConfigError
from kvoffload_async.errors import BlockMissingError, TierError
from kvoffload_async.tables.keymap import MAX_KEY_BYTES, KeyMap
from kvoffload_async.testing.harness import TierHarness, key_of
from kvoffload_async.tiers._sealed_names import NameKeys, read_name_keys
from kvoffload_async.tiers.example import ExampleTier
from kvoffload_async.types import make_offload_key

K = [key_of(i) for i in range(600)]
OTHER = "another secret to seal names with"


class Recording(ExampleTier):
    """Records the keys that it gets."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.heard = []

    async def open(self, env):
        self.env = env
        await super().open(env)

    async def contains(self, keys):
        self.seen += keys
        return await super().contains(keys)

    async def store(self, job):
        self.seen += job.keys
        return await super().store(job)

    async def load(self, job):
        self.seen += job.keys
        return await super().load(job)

    def touch(self, keys):
        self.heard.append(("touch", keys))

    def pin(self, keys):
        self.heard.append(("pin", keys))

    def unpin(self, keys):
        self.heard.append(("unpin", keys))

    def discard(self, keys):
        self.heard.append(("discard", keys))


@pytest.fixture
def paths(tmp_path):
    return [key_file(tmp_path), key_file(tmp_path, OTHER)]


@pytest.fixture
def harness(paths):
    with TierHarness(sealing(Recording, paths[:1])()) as harness:
        yield harness


@pytest.fixture
def rotated(paths):
    """A tier with two name keys; `old` stores as if there were the second alone."""
    with TierHarness(sealing(Recording, paths)()) as harness:
        yield harness


def store_old(harness, paths, keys):
    """Store blocks as an engine that has only the second key."""
    names = NameKeys(read_name_keys(paths[1:]))
    job = harness.store_job(keys, range(len(keys)))
    sealed = harness.job(list(names.sealed(0, keys)), range(len(keys)), is_promotion=False)
    assert job.keys == tuple(keys)
    assert harness.run(harness.tier._tier.store(sealed)) == {}


def test_a_tier_sees_only_names_that_do_not_tell_the_key(harness):
    assert harness.store(K[:3]) == {}
    assert harness.contains(K[:4]) == set(K[:3])
    assert harness.load(K[:3], [5, 6, 7]) == {}
    assert harness.holds(K[2], 7)
    seen = b"".join(harness.tier._tier.seen)
    assert not [key for key in K[:4] if key[:-4] in seen]
    assert {len(name) for name in harness.tier._tier.seen} == {52}


def test_equal_keys_have_equal_names_and_each_group_its_own(paths):
    first, second = (NameKeys(read_name_keys(paths[:1])) for _ in range(2))
    keys = [make_offload_key(b"h" * 32, group) for group in (0, 1, 70_000)]
    names = list(first.sealed(0, keys))
    assert names == list(second.sealed(0, keys))
    assert [name[-4:] for name in names] == [key[-4:] for key in keys]
    assert len({name[:-4] for name in names}) == len(names)
    assert first.opened(names) == keys


def test_keys_of_every_length_that_tiers_take_come_back(paths):
    names = NameKeys(read_name_keys(paths[:1]))
    keys = [make_offload_key(bytes(range(1, n + 1)), n) for n in range(1, 77)]
    sealed = list(names.sealed(0, keys))
    assert names.opened(sealed) == keys
    assert max(map(len, sealed)) == MAX_KEY_BYTES


def test_a_key_that_is_too_long_fails_alone_and_is_absent(harness):
    long = make_offload_key(b"l" * 77)
    job = harness.store_job([K[0], long, K[1]], [0, 1, 2])
    failures = harness.run(harness.tier.store(job))
    assert list(failures) == [1]
    assert isinstance(failures[1], TierError)
    assert str(failures[1]) == "a key of 81 bytes is too long for name_key_file"
    assert harness.contains([long, K[0], K[1]]) == {K[0], K[1]}
    failures = harness.load([long, K[1]], [4, 5])
    assert list(failures) == [0]
    assert isinstance(failures[0], BlockMissingError)
    assert harness.holds(K[1], 5)
    assert harness.run(harness.tier.longest_prefixes([[K[0], K[1], long], [long, K[0]]])) == [2, 0]
    assert isinstance(harness.load([long])[0], BlockMissingError)


@pytest.mark.parametrize("change", [0, 15, 16, 47, 48, 51])
def test_a_changed_name_is_skipped_counted_and_reported_once(paths, change, caplog):
    names = NameKeys(read_name_keys(paths[:1]))
    sealed = bytearray(next(iter(names.sealed(0, [K[0]]))))
    sealed[change] ^= 1
    assert names.opened([bytes(sealed), b"short", b"x" * 20, K[1]]) == []
    assert names.opened([K[1]]) == []
    assert names.unknown_names == 5
    assert [record.getMessage()[:14] for record in caplog.records] == ["name_key_file:"]


def test_blocks_of_older_name_keys_are_found_and_loaded(rotated, paths):
    store_old(rotated, paths, K[:2])
    rotated.store(K[2:4])
    assert name_of(rotated.tier, K[2]) in rotated.tier._tier.seen
    assert rotated.contains(K[:5]) == set(K[:4])
    failures = rotated.load(K[:5], range(5, 10))
    assert list(failures) == [4]
    assert isinstance(failures[4], BlockMissingError)
    assert all(rotated.holds(K[i], 5 + i) for i in range(4))
    assert rotated.run(rotated.tier.longest_prefixes([K[:5], K[4:6]])) == [4, 0]


def test_blocks_of_a_key_that_is_not_given_are_missing(harness, paths):
    store_old(harness, paths, K[:2])
    assert harness.contains(K[:2]) == set()
    assert list(harness.load(K[:2])) == [0, 1]
    assert harness.is_untouched(0)


def test_announcements_have_keys_and_strangers_names_are_counted(rotated):
    tier = rotated.tier
    names = [name_of(tier, K[0]), K[1], name_of(tier, K[2], 1)]
    rotated.on_loop(lambda: tier._tier.env.blocks_appeared(names))
    assert rotated.announced() == {K[0], K[2]}
    rotated.on_loop(lambda: tier._tier.env.blocks_evicted(names[:1]))
    assert rotated.announced() == {K[2]}
    assert tier.gauges()["unknown_names"] == 1


class Found(Recording):
    """Finds blocks when it is opened, and evicts some."""

    names = ()

    async def open(self, env):
        await super().open(env)
        found = KeyMap(len(self.names))
        found.update(list(self.names), range(len(self.names)))
        env.blocks_appeared(found)
        env.blocks_evicted(iter(self.names[:2]))
        env.blocks_appeared(self.names[:1])


def test_announcements_of_the_opening_are_opened_in_order(paths):
    class Here(Found):
        names = (*NameKeys(read_name_keys(paths[:1])).sealed(0, K), K[0])

    with TierHarness(sealing(Here, paths[:1])()) as harness:
        assert harness.announced() == set(K) - {K[1]}
        assert harness.tier.gauges()["unknown_names"] == 1


def test_many_touches_reach_the_tier_in_order_and_in_pieces(harness):
    harness.on_loop(lambda: harness.tier.touch(K))
    harness.run(asyncio.sleep(0.01))
    heard = harness.tier._tier.heard
    assert [len(keys) for _, keys in heard] == [256, 256, 88]
    expected = list(NameKeys.sealed(harness.tier._names, 0, K))
    assert [name for _, keys in heard for name in keys] == expected


def test_pins_and_discards_reach_the_names_of_every_key(rotated):
    for hook in ("pin", "unpin", "discard"):
        rotated.on_loop(lambda hook=hook: getattr(rotated.tier, hook)(K[:2]))
    expected = [[name_of(rotated.tier, key, number) for key in K[:2]] for number in (0, 1)]
    heard = rotated.tier._tier.heard
    assert heard == [(hook, names) for hook in ("pin", "unpin", "discard") for names in expected]


def test_a_deletion_reaches_the_names_of_every_key_and_tells_which_failed(rotated, paths):
    store_old(rotated, paths, K[:2])
    assert rotated.store(K[2:4]) == {}
    assert rotated.run(rotated.tier.delete(K[:3])) == {}
    assert rotated.contains(K[:4]) == {K[3]}
    failing = name_of(rotated.tier, K[1], 1)

    async def delete(names):
        return {names.index(failing): TierError("no")} if failing in names else {}

    rotated.tier._tier.delete = delete
    long = make_offload_key(b"l" * 77)
    assert list(rotated.run(rotated.tier.delete([long, K[0], K[1]]))) == [2]


def test_the_names_of_many_keys_take_bounded_memory(paths):
    names = NameKeys(read_name_keys(paths[:1]))
    names.sealed(0, [key_of(i) for i in range(20_000)])
    assert names._sealed.cache_info().currsize == 16_384


def test_two_files_with_one_key_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="name_key_file: two of the files have the same key"):
        read_name_keys([key_file(tmp_path), key_file(tmp_path)])


def test_the_description_names_the_key_by_its_id_alone(paths, caplog):
    caplog.set_level(logging.DEBUG)
    first, second = (NameKeys(read_name_keys([path])) for path in paths)
    assert first.id != second.id
    assert (
        sealing(ExampleTier, paths[:1])().describe().endswith(f"names sealed with key {first.id}")
    )
