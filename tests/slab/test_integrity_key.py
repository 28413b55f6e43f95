"""A store with an integrity key: what a neighbour writes into its files is never served."""

import numpy as np
import pytest
from slab.stores import BLOCK, FIELDS, K, records_of

from kvoffload_async import ConfigError
from kvoffload_async.testing.harness import content_of
from kvoffload_async.tiers.files.digests import IntegrityKey, create_digester
from kvoffload_async.tiers.files.ops import FileOps, read_file
from kvoffload_async.tiers.slab.addresses import segment_of, slot_of
from kvoffload_async.tiers.slab.layout import StoreLayout, segment_name
from kvoffload_async.tiers.slab.manifest import Manifest
from kvoffload_async.tiers.slab.records import (
    HAS_DIGEST,
    KEYED,
    checkpoint,
    keys_of,
    scan,
)

KEY, OTHER = IntegrityKey(b"k" * 16), IntegrityKey(b"o" * 16)
BLOCKS = K[:6]


@pytest.fixture
def filled(slab_store):
    with slab_store.open(integrity_key=KEY) as harness:
        assert harness.store(BLOCKS) == {}
    return slab_store


def served(store, key=KEY, **options):
    with store.open(integrity_key=key, **options) as harness:
        present = harness.contains(BLOCKS)
        failures = harness.load(BLOCKS)
        loaded = {i for i in range(len(BLOCKS)) if i not in failures}
        assert all(harness.holds(BLOCKS[i], i) for i in loaded)
        assert {BLOCKS[i] for i in loaded} <= present
        return loaded


def rewrite_journal(store, change):
    """Write a journal whose frames are right, as anybody can who reads this package's code."""
    seed = Manifest.decode(store.manifest.read_bytes()).journal_seed
    scanned = scan(read_file(FileOps(), str(store.journal)), seed)
    records = records_of(scanned)
    change(records)
    frames = checkpoint(scanned.sequence + 1, records, seed)
    store.journal.write_bytes(b"".join(frames))


def keys_in_order(store):
    seed = Manifest.decode(store.manifest.read_bytes()).journal_seed
    return keys_of(records_of(scan(read_file(FileOps(), str(store.journal)), seed)))


def overwrite(store, key, content):
    address = store.addresses()[key]
    with (store.folder / segment_name(segment_of(address))).open("r+b") as file:
        file.seek(store.layout.manifest.offset_of(slot_of(address)))
        file.write(content)


def test_what_was_stored_with_a_key_is_served_with_it(filled):
    assert served(filled) == set(range(6))
    assert served(filled, fsync=True) == set(range(6))


def test_manifest_and_records_say_that_there_is_a_key_and_which(filled):
    manifest = Manifest.decode(filled.manifest.read_bytes())
    assert manifest.key_id == KEY.id.hex()
    scanned = scan(read_file(FileOps(), str(filled.journal)), manifest.journal_seed)
    assert (records_of(scanned)["flags"] == HAS_DIGEST | KEYED).all()
    digester = create_digester(manifest.layout, KEY)
    for key, record in zip(keys_of(records_of(scanned)), records_of(scanned), strict=True):
        data = memoryview(content_of(key, BLOCK).tobytes())
        assert record["digest"].tobytes() == digester.digest(key, data)


@pytest.mark.parametrize(
    ("before", "after", "difference"),
    [
        (None, KEY, "checksums without an integrity key"),
        (KEY, None, f"checksums by the integrity key with the id {KEY.id.hex()}"),
        (OTHER, KEY, f"checksums by the integrity key with the id {OTHER.id.hex()}"),
    ],
    ids=["added", "removed", "changed"],
)
def test_another_key_is_another_layout(slab_store, before, after, difference):
    with slab_store.open(integrity_key=before) as harness:
        harness.store(BLOCKS)
    with pytest.raises(ConfigError, match=rf"contains incompatible blocks \({difference}\)"):
        served(slab_store, after)
    assert served(slab_store, before) == set(range(6)), "nothing was lost by that"
    assert served(slab_store, after, on_mismatch="new_namespace") == set()
    assert served(slab_store, before) == set(range(6))
    assert served(slab_store, after, on_mismatch="replace") == set()
    assert Manifest.decode(slab_store.manifest.read_bytes()).key_id == (
        after.id.hex() if after else None
    )


def test_each_key_has_a_namespace_of_its_own(slab_store):
    layouts = [
        StoreLayout(str(slab_store.root), FIELDS, 0, BLOCK, key_id)
        for key_id in (None, KEY.id.hex(), OTHER.id.hex())
    ]
    assert len({layout.own_folder for layout in layouts}) == 3
    assert len({layout.folder for layout in layouts}) == 1


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("flag", [8, 1 << 15])
def test_a_record_of_a_newer_release_is_a_miss_whether_blocks_are_verified_or_not(
    slab_store, flag, verify
):
    with slab_store.open() as harness:
        assert harness.store(BLOCKS) == {}

    def mark(records):
        records["flags"][2] |= flag

    newer = BLOCKS.index(keys_in_order(slab_store)[2])
    rewrite_journal(slab_store, mark)
    assert served(slab_store, None, verify=verify) == set(range(6)) - {newer}
    with slab_store.open(verify=verify) as harness:
        assert harness.store(BLOCKS) == {}
        assert harness.load(BLOCKS) == {}


# -- the neighbour --------------------------------------------------------------------------------


def set_digests(store, key, flags):
    digester = create_digester(store.layout.manifest.layout, key)

    def change(records):
        records["flags"] = flags
        for index, block in enumerate(keys_of(records)):
            digest = digester.digest(block, memoryview(bytes(BLOCK)))
            records["digest"][index] = np.void(digest)

    return change


@pytest.mark.parametrize("flags", [0, HAS_DIGEST, KEYED, HAS_DIGEST | KEYED, 7], ids=bin)
@pytest.mark.parametrize("key", [None, OTHER], ids=["no key", "a key of his own"])
def test_blocks_that_a_neighbour_makes_are_not_served(filled, flags, key):
    for block in BLOCKS:
        overwrite(filled, block, bytes(BLOCK))
    rewrite_journal(filled, set_digests(filled, key, flags))
    assert served(filled) == set()
    assert served(filled) == set(), "they are gone from the journal as well"


def test_blocks_in_swapped_places_are_not_served(filled):
    def swap(records):
        records["address"] = records["address"][::-1].copy()

    rewrite_journal(filled, swap)
    assert served(filled) == set()


def test_a_block_under_another_key_is_not_served(filled):
    def rename(records):
        records["key"] = records["key"][::-1].copy()

    rewrite_journal(filled, rename)
    assert served(filled) == set()


def test_a_block_that_is_damaged_is_dropped_and_the_others_are_served(filled):
    filled.damage(BLOCKS[2])
    assert served(filled) == {0, 1, 3, 4, 5}


def test_records_with_a_key_in_a_store_without_one_are_dropped(slab_store):
    with slab_store.open() as harness:
        harness.store(BLOCKS)

    def mark(records):
        records["flags"][:3] |= KEYED

    rewrite_journal(slab_store, mark)
    for verify in (False, True):
        assert len(served(slab_store, None, verify=verify)) == 3
