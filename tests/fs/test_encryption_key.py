"""With encryption keys, nobody reads a directory's blocks, and no block is served as another."""

import errno
import json
import os
import random
from pathlib import Path

import pytest
from command_line import command
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from faulty_files import FaultyFileOps
from fs.directories import BLOCK, FsDirectory, item, load, load_key, store, store_key
from implementations import IMPLEMENTATIONS, each_implementation

from kvoffload_async import BlockMissingError, ConfigError, CorruptBlockError
from kvoffload_async.abc.tier import KVIdentity
from kvoffload_async.testing.harness import content_of, key_of
from kvoffload_async.tiers.files.digests import IntegrityKey
from kvoffload_async.tiers.files.sealing import EncryptionKey
from kvoffload_async.tiers.fs.digest_attribute import ATTRIBUTE
from kvoffload_async.tiers.fs.operations import StoreStatus
from kvoffload_async.tiers.fs.settings import FsSettings

__all__ = ["command", "each_implementation"]

SECRET = bytes(range(32))
KEY, OTHER = EncryptionKey(SECRET), EncryptionKey(SECRET[::-1])
K = [key_of(number) for number in range(12)]
A, B = K[:2]


@pytest.fixture(autouse=True)
def attributes(tmp_path):
    try:
        os.setxattr(tmp_path, ATTRIBUTE, b"")
    except OSError:
        pytest.skip("no extended attributes here")


def files(directory, *keys, ops=None, **options):
    return directory.files(
        ops, verify="required", reuses_inodes=True, encryption_keys=keys or (KEY,), **options
    )


def stored(directory, key):
    return os.getxattr(directory.path(key), ATTRIBUTE), directory.path(key).read_bytes()


def put(directory, key, value, content):
    os.setxattr(directory.put(key, content), ATTRIBUTE, value)


def associated(directory, key):
    layout = directory.namespace.layout_of(BLOCK).encode()
    parts = (b"fs 2", layout, b"", b"", key)
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def subkey(salt):
    return HKDF(SHA256(), 32, salt=salt, info=b"kvoffload-seal fs 2").derive(SECRET)


# -- the format, over `cryptography` alone ---------------------------------------------------------


def test_any_library_reads_a_block(directory):
    store_key(files(directory), A)
    value, body = stored(directory, A)
    assert (value[0], len(value), len(body)) == (3, 53, BLOCK)
    assert value[1:9] == KEY.id
    assert content_of(A, BLOCK).tobytes() not in body
    salt, nonce, tag = value[9:25], value[25:37], value[37:]
    opened = AESGCM(subkey(salt)).decrypt(nonce, body + tag, associated(directory, A))
    assert opened == content_of(A, BLOCK).tobytes()


def test_any_library_writes_a_block(directory):
    salt, nonce = os.urandom(16), os.urandom(12)
    data = content_of(A, BLOCK).tobytes()
    body = AESGCM(subkey(salt)).encrypt(nonce, data, associated(directory, A))
    put(directory, A, b"\x03" + KEY.id + salt + nonce + body[BLOCK:], body[:BLOCK])
    assert load_key(files(directory), A) is None


# -- keys ------------------------------------------------------------------------------------------


def test_the_first_key_writes_and_all_read(directory):
    store_key(files(directory, KEY), A)
    store_key(files(directory, OTHER, KEY), B)
    assert stored(directory, B)[0][1:9] == OTHER.id
    assert load(files(directory, OTHER, KEY), A, B)[0] == {}


@pytest.mark.parametrize(
    "options",
    [
        {"encryption_keys": (OTHER,)},
        {},
        {"verify": "required"},
        {"verify": "off"},
        {"integrity_key": IntegrityKey(SECRET)},
    ],
)
def test_what_no_key_opens_is_a_miss_and_its_file_stays(directory, options):
    store_key(files(directory), A)
    failures, (row,) = load(directory.files(**options), A)
    assert isinstance(failures[0].error, BlockMissingError)
    assert failures[0].freed_bytes is None
    assert row == bytes(BLOCK)
    assert load_key(files(directory), A) is None


@pytest.mark.parametrize(
    "before", [{}, {"integrity_key": IntegrityKey(SECRET)}, {"encryption_keys": (OTHER,)}]
)
def test_a_store_replaces_what_no_key_opens(directory, before):
    store_key(directory.files(verify="required", **before), A)
    assert isinstance(load_key(files(directory), A).error, BlockMissingError)
    assert store_key(files(directory), A).status is StoreStatus.WRITTEN
    assert store_key(files(directory, OTHER, KEY), A).status is StoreStatus.PRESENT
    assert load_key(files(directory), A) is None


def test_a_lost_key_is_an_empty_cache_and_warned_of_once(directory, caplog):
    for key in K:
        store_key(files(directory), key)
    failures, _ = load(files(directory, OTHER), *K)
    assert set(failures) == set(range(len(K)))
    assert caplog.text.count(f"a key that is not given (id {KEY.id.hex()})") == 1


# -- nobody else writes or reads -------------------------------------------------------------------


def test_no_byte_of_a_block_is_in_the_directory_even_before_it_is_published(directory):
    ops = FaultyFileOps()
    ops.fail(errno.EIO, on="publish")
    ops.fail(errno.EIO, on="unlink")
    assert store_key(files(directory, ops=ops), A).error is not None
    (temp,) = directory.temps()
    body = Path(temp).read_bytes()
    content = content_of(A, BLOCK).tobytes()
    assert len(body) == BLOCK
    assert not any(content[at : at + 8] in body for at in range(0, BLOCK - 8, 8))


def test_10_000_tampered_blocks_are_not_served_and_leave_no_byte(directory):
    """Other bits, another block's bytes, another rank's, another key's, shorter and longer ones."""
    rng = random.Random(0)
    tiers = {key: files(directory, key) for key in (KEY, OTHER)}
    other = FsDirectory(directory.root, rank=1)
    store(files(other), *map(item, K, range(len(K))))
    others = [stored(other, key) for key in K]
    own = {}
    for by, tier in tiers.items():
        store(tier, *map(item, K, range(len(K))))
        own[by] = [stored(directory, key) for key in K]

    def tampered(index):
        value, body = own[KEY][index]
        match rng.randrange(6):
            case 0:
                at = rng.randrange(len(value) * 8)
                return flipped(value, at), body
            case 1:
                return value, flipped(body, rng.randrange(len(body) * 8))
            case 2:
                return own[KEY][(index + rng.randrange(1, len(K))) % len(K)]
            case 3:
                return others[index]
            case 4:  # an older version, of another key
                return value[:9] + own[OTHER][index][0][9:], own[OTHER][index][1]
            case _:
                return value, own[OTHER][index][1]

    for number in range(10_000):
        index = number % len(K)
        put(directory, K[index], *tampered(index))
        remembers = number % 2  # the seal that it has written
        failures, (row,) = load(tiers[KEY] if remembers else files(directory), K[index])
        if remembers and not failures:  # then the attribute alone is changed
            assert row == content_of(K[index], BLOCK).tobytes()
        else:
            assert isinstance(failures[0].error, CorruptBlockError | BlockMissingError)
            assert not any(row)


def flipped(data, bit):
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_a_wrong_tag_wipes_the_row(directory):
    store_key(files(directory), A)
    value, body = stored(directory, A)
    put(directory, A, flipped(value, 52 * 8), body)  # the bytes would decrypt to the block
    failures, (row,) = load(files(directory), A)
    assert isinstance(failures[0].error, CorruptBlockError)
    assert row == bytes(BLOCK)


# -- in a tier -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("each_implementation")
@pytest.mark.parametrize("capacity_bytes", [None, 512 << 10])
@pytest.mark.parametrize("direct_io", [False, True])
def test_a_tier_stores_and_serves_and_evicts(directory, capacity_bytes, direct_io):
    options = {"capacity_bytes": capacity_bytes, "direct_io": direct_io}
    with directory.open(verify="required", encryption_keys=(KEY,), **options) as harness:
        assert harness.store(K) == {}
        assert harness.load(K) == {}
        assert all(harness.holds(key, slot) for slot, key in enumerate(K))
        if capacity_bytes:
            assert directory.counted_bytes() == directory.disk_bytes()


def used(monkeypatch, implementation):
    monkeypatch.setenv("KVOFFLOAD_NATIVE", "0" if implementation == "python" else "")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_each_implementation_serves_what_the_other_has_stored(
    directory, implementation, monkeypatch
):
    options = {"verify": "required", "encryption_keys": (KEY,)}
    used(monkeypatch, implementation)
    with directory.open(**options) as harness:
        assert harness.store(K) == {}
    values = [stored(directory, key) for key in K]
    assert len({value for value, _ in values}) == len(K)
    for key, (value, body) in zip(K, values, strict=True):
        bound, salt = associated(directory, key), value[9:25]
        data = AESGCM(subkey(salt)).decrypt(value[25:37], body + value[37:], bound)
        assert data == content_of(key, BLOCK).tobytes()
    used(monkeypatch, "python" if implementation == "native" else "native")
    with directory.open(**options) as harness:
        assert harness.load(K) == {}
        assert all(harness.holds(key, slot) for slot, key in enumerate(K))


@pytest.mark.usefixtures("each_implementation")
def test_a_tier_serves_no_tampered_block_and_leaves_no_byte(directory):
    rng = random.Random(1)
    with directory.open(verify="required", encryption_keys=(KEY,)) as harness:
        assert harness.store(K) == {}
        own = [stored(directory, key) for key in K]
        for _ in range(50):
            tampered = {index for index in range(len(K)) if rng.randrange(2)}
            for index in tampered:
                body = flipped(own[index][1], rng.randrange(BLOCK * 8))
                put(directory, K[index], own[index][0], rng.choice([body, own[index - 1][1]]))
            harness.rows[: len(K)] = 7
            assert set(harness.load(K)) == tampered
            for index, key in enumerate(K):
                assert harness.holds(key, index) is (index not in tampered)
                assert index not in tampered or not harness.rows[index].any()
                put(directory, key, *own[index])


def test_an_evicted_blocks_inode_is_used_again(directory):
    tier = files(directory)
    store_key(tier, A)
    inode = directory.path(A).stat().st_ino
    assert store_key(tier, B, victim=A).freed_bytes is not None
    assert directory.path(B).stat().st_ino == inode
    assert load_key(files(directory), B) is None


def test_maintenance_leaves_encrypted_blocks(directory, command):
    for key in K:
        store_key(files(directory), key)
    report = command.run("store", "verify", directory.root)
    assert "another key" in report.output
    command.run("store", "gc", directory.root, "--corrupt")
    assert load(files(directory), *K)[0] == {}


def test_verify_with_the_keys_finds_corrupt_blocks(directory, command, tmp_path):
    path = tmp_path / "key"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    store_key(files(directory), A)
    store_key(files(directory), B)
    store_key(files(directory, OTHER), K[2])
    value, body = stored(directory, B)
    put(directory, B, value, flipped(body, 9))
    result = command.run("store", "verify", directory.root, "--json", "--encryption-key-file", path)
    (found,) = json.loads(result.stdout)["namespaces"]
    found = found["verification"]
    assert (found["verified"], found["other_key"], len(found["corrupt"])) == (1, 1, 1)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"verify": "off"}, "verify: 'off' does not go with encryption_key_file"),
        ({"trust_vllm_directory": True}, "trust_vllm_directory: does not go with encryption_key"),
        ({"integrity_key_file": "same"}, "integrity_key_file: does not go with encryption_key"),
    ],
)
def test_options_that_do_not_go_with_it_are_refused(tmp_path, options, why):
    path = tmp_path / "key"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    given = {"root_dir": str(tmp_path / "root"), "encryption_key_file": str(path)} | {
        key: str(path) if value == "same" else value for key, value in options.items()
    }
    with pytest.raises(ConfigError, match=why):
        FsSettings.of(given, KVIdentity("m", run_config={"model_name": "m"}))
    assert not (tmp_path / "root").exists()


def test_a_filesystem_without_attributes_is_refused(directory):
    ops = FaultyFileOps()
    ops.fail(errno.EOPNOTSUPP, on="set_xattr")
    with pytest.raises(ConfigError, match="extended attributes"):
        directory.open(ops, verify="required", encryption_keys=(KEY,)).__enter__()
