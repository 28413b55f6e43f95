"""With encryption keys, nobody reads a store's blocks, and no block is served as another."""

import json
import random
from functools import partial

import numpy as np
import pytest
from command_line import command
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from implementations import each_implementation
from sealed_names import check_secrecy, content_below
from slab.stores import BLOCK, K, SlabStore, records_of

from kvoffload_async import BlockMissingError, ConfigError, CorruptBlockError
from kvoffload_async.abc.tier import KVIdentity
from kvoffload_async.testing.harness import content_of
from kvoffload_async.tiers.files.ops import FileOps, read_file
from kvoffload_async.tiers.files.sealing import EncryptionKey
from kvoffload_async.tiers.slab.addresses import segment_of, slot_of
from kvoffload_async.tiers.slab.layout import segment_name
from kvoffload_async.tiers.slab.records import checkpoint, keys_of, scan
from kvoffload_async.tiers.slab.tier import SlabSettings

__all__ = ["command", "each_implementation"]

pytestmark = pytest.mark.usefixtures("each_implementation")

SECRET = bytes(range(32))
KEY, OTHER = EncryptionKey(SECRET), EncryptionKey(SECRET[::-1])
BLOCKS = K[:12]
STORED = BLOCK + 52


def opened(store, *keys, **options):
    return store.open(encryption_keys=keys or (KEY,), **options)


@pytest.fixture
def filled(slab_store) -> SlabStore:
    with opened(slab_store) as harness:
        assert harness.store(BLOCKS) == {}
    return slab_store


def place(store, key):
    address = store.addresses()[key]
    return store.folder / segment_name(segment_of(address)), store.size_of(slot_of(address))


def read_at(path, offset):
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(STORED)


def write_at(path, offset, content):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def served(store, *keys, **options):
    with opened(store, *keys, **options) as harness:
        failures = harness.load(BLOCKS)
        loaded = {i for i in range(len(BLOCKS)) if i not in failures}
        assert all(harness.holds(BLOCKS[i], i) for i in loaded)
        # Wiped, or valid for that key: then only its record names another tag.
        assert all(harness.holds(BLOCKS[i], i) for i in failures if harness.rows[i].any())
        return loaded


EVERY = set(range(len(BLOCKS)))


@pytest.mark.parametrize("options", [{}, {"direct_io": True}, {"fsync": True}])
def test_blocks_are_stored_and_served_also_after_a_restart(slab_store, options):
    with opened(slab_store, **options) as harness:
        assert harness.store(BLOCKS) == {}
        assert harness.load(BLOCKS) == {}
        assert all(harness.holds(key, slot) for slot, key in enumerate(BLOCKS))
    assert served(slab_store, **options) == EVERY


@pytest.mark.parametrize("block_bytes", [512, 4044, 4045, 4096, 12345])
def test_blocks_of_any_length_have_room_for_their_seals(tmp_path, block_bytes):
    store = SlabStore(tmp_path / "root", block_bytes=block_bytes)
    for _ in range(2):
        with opened(store) as harness:
            assert harness.store(BLOCKS) == {}
            assert harness.load(BLOCKS) == {}
            assert all(harness.holds(key, slot) for slot, key in enumerate(BLOCKS))
    assert store.own_manifest().slot_bytes == -(-(block_bytes + 52) // 4096) * 4096


def test_any_library_reads_a_block(filled):
    manifest = json.loads(filled.manifest.read_text())
    assert manifest["version"] == 3
    scanned = scan(read_file(FileOps(), str(filled.journal)), filled.own_manifest().journal_seed)
    tags = dict(zip(keys_of(records_of(scanned)), records_of(scanned)["digest"], strict=True))
    for key in BLOCKS:
        stored = read_at(*place(filled, key))
        body, seal = stored[:BLOCK], stored[BLOCK:]
        salt, nonce, tag = seal[8:24], seal[24:36], seal[36:]
        assert (seal[:8], tags[key].tobytes()) == (KEY.id, tag)
        parts = (b"slab 3", manifest["layout"].encode(), b"", b"", key)
        bound = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        subkey = HKDF(SHA256(), 32, salt=salt, info=b"kvoffload-seal slab 3").derive(SECRET)
        data = AESGCM(subkey).decrypt(nonce, body + tag, bound)
        assert data == content_of(key, BLOCK).tobytes()


def test_no_byte_of_a_block_is_in_a_file(filled):
    files = [path.read_bytes() for path in filled.folder.iterdir()]
    for key in BLOCKS:
        content = content_of(key, BLOCK).tobytes()
        assert not any(
            content[at : at + 16] in data for data in files for at in (0, 64, BLOCK - 16)
        )


def test_the_first_key_writes_and_all_read(filled):
    assert served(filled, OTHER, KEY) == EVERY
    with opened(filled, OTHER, KEY) as harness:
        harness.store(K[12:14])
    assert read_at(*place(filled, K[12]))[BLOCK : BLOCK + 8] == OTHER.id
    assert served(filled, KEY) == EVERY


def test_a_lost_key_is_warned_of_once_and_the_store_fills_again(filled, caplog):
    assert served(filled, OTHER) == set()
    assert caplog.text.count(f"a key that is not given (id {KEY.id.hex()})") == 1
    with opened(filled, OTHER) as harness:
        assert harness.store(BLOCKS) == {}
    assert served(filled, OTHER) == EVERY


def test_blocks_of_a_key_that_is_not_given_are_missing_unless_they_are_damaged(filled):
    fd, offset = place(filled, BLOCKS[0])
    write_at(fd, offset + STORED - 1, bytes([read_at(fd, offset)[-1] ^ 1]))
    with opened(filled, OTHER) as harness:
        failures = harness.load(BLOCKS)
        assert harness.contains(BLOCKS) == set()
    assert {i for i, error in failures.items() if type(error) is CorruptBlockError} == {0}
    assert {i for i, error in failures.items() if type(error) is BlockMissingError} == EVERY - {0}


@pytest.mark.parametrize("before", [{}, {"encryption_keys": (KEY,)}])
def test_encrypted_and_other_blocks_are_in_different_stores(slab_store, before):
    after = {} if before else {"encryption_keys": (KEY,)}
    with slab_store.open(**before) as harness:
        harness.store(BLOCKS)
    words = "that are encrypted" if before else "that are not encrypted"
    with pytest.raises(ConfigError, match=words):
        slab_store.open(**after).__enter__()
    with slab_store.open(on_mismatch="new_namespace", **after) as harness:
        assert harness.contains(BLOCKS) == set()
        assert harness.store(BLOCKS) == {}
        assert harness.load(BLOCKS) == {}
    with slab_store.open(**before) as harness:
        assert harness.load(BLOCKS) == {}
    with slab_store.open(on_mismatch="replace", **after) as harness:
        assert harness.contains(BLOCKS) == set()


def test_10_000_tampered_blocks_are_not_served_and_leave_no_byte(slab_store, tmp_path):
    """Other bits, another block's slot, another layout's, another key's, an older one's."""
    rng = random.Random(0)
    images = {}
    for name, root, key, fields in [
        ("layout", "one", KEY, {"model_name": "m/x", "fingerprint": "other"}),
        ("key", "two", OTHER, None),
        ("older", "three", KEY, None),
    ]:
        other = SlabStore(tmp_path / root)
        with opened(other, key, fields=fields) as harness:
            harness.store(BLOCKS)
        images[name] = [read_at(*place(other, key)) for key in BLOCKS]
    with opened(slab_store) as harness:
        harness.store(BLOCKS)
        places = [place(slab_store, key) for key in BLOCKS]
        own = [read_at(*each) for each in places]
        tries = 0
        while tries < 10_000:
            for index, each in enumerate(places):
                match rng.randrange(4):
                    case 0:
                        content = bytearray(own[index])
                        content[rng.randrange(STORED)] ^= 1 << rng.randrange(8)
                    case 1:
                        content = own[(index + rng.randrange(1, len(own))) % len(own)]
                    case 2:
                        content = images[rng.choice(["layout", "key", "older"])][index]
                    case _:
                        content = own[index][:BLOCK] + rng.choice(own)[BLOCK:] + b""
                        if content == own[index]:
                            content = bytes(STORED)
                write_at(*each, bytes(content))
            assert set(harness.load(BLOCKS)) == EVERY
            tries += len(BLOCKS)
            assert harness.contains(BLOCKS) == set()
            assert harness.store(BLOCKS) == {}
            places = [place(slab_store, key) for key in BLOCKS]
            own = [read_at(*each) for each in places]
        for index, each in enumerate(places):
            write_at(*each, bytes([own[index][0] ^ 1]))
        harness.rows[: len(BLOCKS)] = 7
        assert set(harness.load(BLOCKS)) == EVERY
        assert not harness.rows[: len(BLOCKS)].any()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"verify": "off"}, "verify: 'off' does not go with encryption_key_file"),
        ({"integrity_key_file": "same"}, "integrity_key_file: does not go with encryption_key"),
    ],
)
def test_options_that_do_not_go_with_it_are_refused(tmp_path, options, why):
    path = tmp_path / "key"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    given = {
        "root_dir": str(tmp_path / "root"),
        "capacity_bytes": 1 << 24,
        "encryption_key_file": str(path),
    } | {key: str(path) if value == "same" else value for key, value in options.items()}
    with pytest.raises(ConfigError, match=why):
        SlabSettings.of(given, KVIdentity("m", run_config={"model_name": "m"}))


@pytest.mark.parametrize("columns", [["address"], ["key"], ["digest"], ["key", "digest"]], ids=str)
def test_a_journal_that_others_have_written_serves_no_block(filled, columns):
    """Its frames are right, as anybody can make them; what belongs to a block is moved."""
    seed = filled.own_manifest().journal_seed
    scanned = scan(read_file(FileOps(), str(filled.journal)), seed)
    records = records_of(scanned).copy()
    for column in columns:
        records[column] = np.roll(records[column], 1)
    filled.journal.write_bytes(b"".join(checkpoint(scanned.sequence + 1, records, seed)))
    assert served(filled) == set()


@pytest.fixture
def key_files(tmp_path):
    paths = [tmp_path / "one", tmp_path / "other"]
    for path, secret in zip(paths, (SECRET, SECRET[::-1]), strict=True):
        path.write_bytes(secret)
        path.chmod(0o600)
    return [argument for path in paths for argument in ("--encryption-key-file", path)]


def verification(command, store, *arguments):
    result = command.run("store", "verify", store.root, "--json", *arguments)
    (found,) = json.loads(result.stdout)["slab_stores"]
    found = found["verification"]
    return found["verified"], found["other_key"], len(found["corrupt"])


def test_verify_with_the_keys_finds_corrupt_blocks_and_gc_removes_them(filled, command, key_files):
    with opened(filled, OTHER, KEY) as harness:
        assert harness.store(K[12:14]) == {}
    filled.damage(BLOCKS[3])
    assert verification(command, filled, *key_files) == (13, 0, 1)
    assert verification(command, filled, *key_files[:2]) == (11, 2, 1)
    assert verification(command, filled) == (0, 14, 0)
    command.run("store", "gc", filled.root, "--corrupt", *key_files[:2])
    assert verification(command, filled, *key_files) == (13, 0, 0)


def test_a_key_for_encryption_does_not_verify_other_blocks(slab_store, command, key_files):
    with slab_store.open() as harness:
        harness.store(BLOCKS)
    assert verification(command, slab_store, *key_files) == (0, 12, 0)


def test_maintenance_leaves_encrypted_blocks(filled, command):
    report = command.run("store", "verify", filled.root)
    assert "another key" in report.output
    command.run("store", "gc", filled.root, "--corrupt")
    assert served(filled) == EVERY


def test_only_without_keys_files_and_logs_tell_anything_of_1000_prompts(
    slab_store, tmp_path, caplog
):
    tier = partial(slab_store.tier, capacity_bytes=1 << 24, on_mismatch="new_namespace")
    check_secrecy(tier, lambda: content_below(slab_store.root), tmp_path, caplog)
