"""The maintenance of objects of several blocks: each block is checked, and each object removed."""

import pytest
from remote.object.test_maintenance import Store
from remote.object.tiers import tier_on

from kvoffload_async.testing import TierHarness
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.files.digests import IntegrityKey
from kvoffload_async.tiers.object.client import name_of
from kvoffload_async.tiers.object.packs import is_chunk_boundary

K = [key for key in map(key_of, range(50)) if not is_chunk_boundary(key, 64)][:10]
BLOCK_BYTES = 4096


class PackStore(Store):
    """A directory with one pack of ten blocks, beside ten objects of one block each."""

    def __init__(self, folder, **options):
        super().__init__(folder, **options)
        packed = [key_of(1000 + number) for number in range(10)]
        packed = [key for key in packed if not is_chunk_boundary(key, 64)]
        self.num_packed = len(packed)
        tier = tier_on(self.connection, pack_bytes=1 << 20, **options)
        with TierHarness(tier) as harness:
            harness.run(harness.tier.longest_prefixes([packed]))
            assert harness.store(packed) == {}
            self.num_objects = 11
        self.pack = name_of(self.namespace, packed[0])
        assert len(self.names()) == self.num_objects


@pytest.fixture
def store(tmp_path):
    return PackStore(tmp_path / "blocks")


def verified(store, *arguments):
    status, found, said = store.run("verify", *arguments)
    return status, found["verification"], said


def test_every_block_of_a_pack_is_verified(store):
    status, found, _ = verified(store)
    assert (status, found["verified"]) == (0, 10 + store.num_packed)
    assert store.run("inspect")[1]["objects"] == store.num_objects


@pytest.mark.parametrize(
    ("at", "corrupt"), [(-1, 1), (-BLOCK_BYTES - 1, 1), (70, 1), (16, 1), (120, 1)]
)
def test_of_a_damaged_pack_the_bad_blocks_are_counted_and_the_object_is_named(store, at, corrupt):
    value = bytearray(store.path(store.pack).read_bytes())
    value[at] ^= 1
    store.path(store.pack).write_bytes(value)
    status, found, said = verified(store)
    assert (status, found["corrupt_blocks"]) == (1, corrupt)
    assert store.pack in said


def test_of_a_pack_whose_table_is_wrong_nothing_is_believed(store):
    value = bytearray(store.path(store.pack).read_bytes())
    for row in (0, 1):
        value[64 + row * (36 + 16) + 36] ^= 1  # its checksum
    store.path(store.pack).write_bytes(value)
    _, found, said = verified(store)
    assert found["corrupt_blocks"] == 1
    assert "its header is not that block's" in said


def test_a_pack_that_was_cut_off_is_corrupt(store):
    value = store.path(store.pack).read_bytes()
    store.path(store.pack).write_bytes(value[:-1])
    assert verified(store)[1]["corrupt_blocks"] == 1
    store.path(store.pack).write_bytes(value[:100])
    assert verified(store)[1]["corrupt_blocks"] == 1


def test_a_pack_under_the_name_of_another_block_is_corrupt(store):
    name = name_of(store.namespace, K[0])
    store.path(name).write_bytes(store.path(store.pack).read_bytes())
    status, _, said = verified(store)
    assert status == 1
    assert name in said


def test_a_newer_pack_is_no_fault(store):
    value = bytearray(store.path(store.pack).read_bytes())
    value[4] = 9
    store.path(store.pack).write_bytes(value)
    status, found, _ = verified(store)
    assert (status, found["newer"]) == (0, 1)


def test_a_pack_with_two_bad_blocks_is_removed_once(store):
    value = bytearray(store.path(store.pack).read_bytes())
    for number in (1, 2):
        value[-number * BLOCK_BYTES] ^= 1
    store.path(store.pack).write_bytes(value)
    assert verified(store)[1]["corrupt_blocks"] == 2
    _, found, _ = store.run("gc", "--corrupt", "--dry-run")
    assert (found["corrupt_objects"], len(store.names())) == (1, store.num_objects)
    _, found, _ = store.run("gc", "--corrupt")
    assert (found["corrupt_objects"], found["freed_bytes"]) == (1, len(value))
    assert store.pack not in store.names()
    assert verified(store)[0] == 0


def test_packs_with_an_integrity_key_are_verified_with_it(tmp_path):
    store = PackStore(tmp_path / "blocks", integrity_key=IntegrityKey(b"k" * 32))
    key_file = tmp_path / "key"
    key_file.write_bytes(b"k" * 32)
    key_file.chmod(0o600)
    assert verified(store)[1]["other_key"] == 10 + 1, "nobody can tell what is in the pack"
    assert verified(store, "--integrity-key-file", str(key_file))[1]["other_key"] == 0
