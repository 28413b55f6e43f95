"""Sealing: key files, nonces, and blocks that open only as the blocks they are."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import assume, given
from hypothesis import strategies as st

from kvoffload_async import ConfigError
from kvoffload_async.tiers.files import sealing
from kvoffload_async.tiers.files.digests import TenantRings
from kvoffload_async.tiers.files.sealing import (
    SEAL_BYTES,
    EncryptionKey,
    Nonces,
    Sealer,
    parse_encryption_keys,
)

SECRET = bytes(range(32))
KEY = EncryptionKey(SECRET)
OTHER = EncryptionKey(SECRET[::-1])
TENANTS = KEY.of("tenant")


def sealed(sealer: Sealer, key: bytes, data: bytes, header: bytes = b"") -> tuple[bytes, bytearray]:
    body = bytearray(len(data))
    return sealer.seal(key, memoryview(data), memoryview(body), header), body


# -- the format ------------------------------------------------------------------------------------


def framed(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def test_a_keys_id_is_what_it_always_was():
    assert KEY.id.hex() == "5eae47d4dda91408"


@pytest.mark.parametrize("data", [b"", b"data", bytes(100_000)], ids=len)
def test_any_library_opens_a_block(data):
    seal, body = sealed(Sealer([TENANTS], "fs 2", "layout"), b"key", data, b"header")
    assert len(seal) == SEAL_BYTES
    assert seal[:8] == TENANTS.id
    info = b"kvoffload-seal fs 2"
    subkey = HKDF(SHA256(), 32, salt=seal[8:24], info=info).derive(SECRET)
    associated = framed(b"fs 2", b"layout", b"tenant", b"header", b"key")
    assert AESGCM(subkey).decrypt(seal[24:36], bytes(body) + seal[36:], associated) == data


def test_every_seal_is_new_and_every_key_opens_its_blocks():
    first, second = Sealer([KEY], "fs 2", "l"), Sealer([OTHER, KEY], "fs 2", "l")
    for sealer, opens in ((first, (first, second)), (second, (second,))):
        seals = set()
        for _ in range(3):
            seal, body = sealed(sealer, b"k", b"data" * 100)
            seals.add(seal)
            for opener in opens:
                opened = bytearray(body)
                assert opener.open_into(b"k", seal, memoryview(opened))
                assert opened == b"data" * 100
        assert len(seals) == 3


# -- nothing else opens ----------------------------------------------------------------------------

parts = st.tuples(
    st.sampled_from([KEY, OTHER, TENANTS, KEY.of("other")]),
    st.sampled_from(["fs 2", "slab 3"]),
    st.text("ab", max_size=2),
    st.binary(max_size=2),
    st.binary(max_size=2),
)


@given(parts, parts)
def test_a_block_does_not_open_as_another(one, other):
    assume(one != other)
    key, purpose, layout, header, block = one
    seal, body = sealed(Sealer([key], purpose, layout), block, b"secret", header)
    key, purpose, layout, header, block = other
    assert not Sealer([key], purpose, layout).open_into(block, seal, memoryview(body), header)
    assert body == bytes(6)


@given(st.data())
def test_a_changed_block_does_not_open_and_is_wiped(data):
    sealer = Sealer([KEY], "fs 2", "l")
    seal, body = sealed(sealer, b"k", b"secret" * 10)
    changed = bytearray(seal + body)
    at = data.draw(st.integers(0, len(changed) - 1))
    changed[at] ^= 1 << data.draw(st.integers(0, 7))
    body[:] = changed[SEAL_BYTES:]
    assert not sealer.open_into(b"k", bytes(changed[:SEAL_BYTES]), memoryview(body))
    assert body == bytes(60)


def test_a_key_that_is_not_given_is_reported_once(caplog):
    seal, body = sealed(Sealer([KEY], "fs 2", "l"), b"k", b"secret")
    sealer = Sealer([OTHER], "fs 2", "l")
    for _ in range(3):
        assert not sealer.open_into(b"k", seal, memoryview(body))
    assert body == bytes(6)
    (record,) = caplog.records
    assert f"sealed with a key that is not given (id {KEY.id.hex()})" in record.getMessage()


def test_at_most_as_many_keys_are_reported_as_there_are_tenants(caplog):
    rings = [[KEY.of("a")], [OTHER.of("b")]]
    sealer = Sealer(TenantRings(rings, lambda _: 0), "fs 2", "l")
    for number in (0, 1, 0, 2, 3):
        assert not sealer.has_key(bytes([number]) * SEAL_BYTES)
    assert [record.args[0] for record in caplog.records] == [bytes([n] * 8).hex() for n in (0, 1)]
    assert all(map(sealer.has_key, (ring[0].id + bytes(SEAL_BYTES - 8) for ring in rings)))


@pytest.mark.parametrize("seal", [b"", bytes(51), KEY.id, KEY.id + bytes(45)], ids=len)
def test_a_seal_of_another_length_opens_nothing(seal):
    body = bytearray(b"secret")
    assert not Sealer([KEY], "fs 2", "l").open_into(b"k", seal, memoryview(body))
    assert body == bytes(6)


# -- nonces ----------------------------------------------------------------------------------------


def taken(nonces: Nonces, count: int) -> list[bytes]:
    return [nonces.take() for _ in range(count)]


def in_child(nonces: Nonces, count: int, *, is_killed: bool = False) -> bytes:
    """Return what a forked child takes and, in the middle of it, a child that it forks.

    Args:
        nonces: Where they take from.
        count: How many the two take.
        is_killed: The child goes on until it is killed.
    """
    read, write = os.pipe()
    if not (child := os.fork()):
        signal.alarm(60)  # a lock of the parent's threads would stop it for ever
        with os.fdopen(write, "wb", buffering=0) as pipe:
            pipe.write(b"".join(taken(nonces, count // 2)))
            if not (copy := os.fork()):
                pipe.write(b"".join(taken(nonces, count - count // 2)))
                os._exit(0)
            status = os.waitpid(copy, 0)[1]
            while is_killed:
                pipe.write(b"".join(taken(nonces, 100)))
        os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        content = pipe.read(28 * count)
        if is_killed:
            os.kill(child, signal.SIGKILL)
            content += pipe.read()
    assert os.waitpid(child, 0)[1] == (signal.SIGKILL if is_killed else 0)
    return content[: len(content) // 28 * 28]


def never_twice(count: int, forks: int) -> None:
    nonces, each = sealing._nonces, count // (8 + forks)
    with ThreadPoolExecutor(8) as pool:
        results = [pool.submit(taken, nonces, each) for _ in range(8)]
        took = [
            in_child(nonces, each, is_killed=number % 2 == 0)  # forked amid the threads
            for number in range(forks)
        ]
        took += [b"".join(result.result()) for result in results]
    assert all(len(found) >= 28 * each for found in took)
    words = np.frombuffer(b"".join(took), np.uint32).reshape(-1, 7)
    # Different sums of half a salt and the counter: sorting 28 bytes each would take a minute.
    sums = words[:, :2].copy().view(np.uint64) + words[:, 5:].copy().view(np.uint64)
    assert len(np.unique(sums)) == len(sums) >= each * (8 + forks)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_200_000_nonces_of_threads_forks_and_killed_processes_differ():
    never_twice(200_000, forks=8)


def test_only_one_thread_at_a_time_takes_a_nonce():
    inside, most, pause = [0], [0], threading.Event()

    def clock():
        inside[0] += 1
        most.append(inside[0])
        pause.wait(0.001)  # others would come in here
        inside[0] -= 1
        return sealing.time.time()

    nonces = Nonces(clock)
    with ThreadPoolExecutor(4) as pool:
        took = [pool.submit(taken, nonces, 10) for _ in range(4)]
    assert len({nonce for each in took for nonce in each.result()}) == 40
    assert max(most) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_10_million_nonces_of_threads_forks_and_killed_processes_differ():
    never_twice(10_000_040, forks=32)


def salts_after(nonces: Nonces, event) -> tuple[bytes, bytes]:
    before = nonces.take()[:20]
    event()
    return before, nonces.take()[:20]


def test_a_salt_serves_so_many_blocks_and_no_more(monkeypatch):
    monkeypatch.setattr(sealing, "BLOCKS_PER_SALT", 5)
    drawn = [nonce[:20] for nonce in taken(Nonces(), 20)]
    assert [drawn.count(salt) for salt in dict.fromkeys(drawn)] == [5, 5, 5, 5]


def test_a_salt_ends_when_the_wall_clock_jumps():
    now = [1000.0]
    nonces = Nonces(clock=lambda: now[0] + sealing.time.monotonic())
    one, other = salts_after(nonces, lambda: None)
    assert one == other
    for jump in (-5, 5):
        one, other = salts_after(nonces, lambda jump=jump: now.__setitem__(0, now[0] + jump))
        assert one[:16] != other[:16]


def test_a_salt_ends_with_the_boot(monkeypatch):
    monkeypatch.setattr(Nonces, "_BOOT_CHECK_S", 0)
    one, other = salts_after(nonces := Nonces(), lambda: None)
    assert one == other
    one, other = salts_after(nonces, lambda: monkeypatch.setattr(sealing, "boot_id", lambda: "b"))
    assert one[:16] != other[:16]


def test_a_fork_amid_a_take_leaves_no_lock_behind():
    nonces = sealing._nonces
    with nonces._lock:
        child = in_child(nonces, 2)
    assert len(child) == 56
    assert threading.active_count() >= 1


def test_the_subkeys_of_many_salts_take_bounded_memory(monkeypatch):
    derived = []
    subkey = EncryptionKey.subkey
    monkeypatch.setattr(
        EncryptionKey, "subkey", lambda key, *salt: derived.append(salt) or subkey(key, *salt)
    )
    sealer, salts = (
        Sealer([KEY], "fs 2", "l"),
        [bytes([n // 256, n % 256] * 8) for n in range(1025)],
    )
    for salt in [*salts, salts[-1], salts[0]]:
        sealer.opening(b"k", KEY.id + salt + bytes(28))
    assert len(derived) == 1026


# -- key files -------------------------------------------------------------------------------------


@pytest.fixture
def key_file(tmp_path):
    def make(name, secret=SECRET, mode=0o600):
        path = tmp_path / name
        path.write_bytes(secret)
        path.chmod(mode)
        return str(path)

    return make


def parsed(value):
    return parse_encryption_keys(value, "encryption_key_file")


def test_one_file_or_a_list_is_given(key_file):
    one, other = key_file("one"), key_file("other", SECRET[::-1])
    assert [key.id for key in parsed(one)] == [KEY.id]
    assert [key.id for key in parsed([other, one])] == [OTHER.id, KEY.id]


def test_bad_files_are_refused(key_file, tmp_path):
    one = key_file("one")
    for value, why in [
        ([], "the list is empty"),
        ([one, key_file("copy")], "two of the files have the same key"),
        (key_file("short", bytes(15)), "has only 15 bytes"),
        ([one, key_file("long", bytes(65))], "has more than 64 bytes"),
        (key_file("open", mode=0o644), "accessible to all users"),
        (str(tmp_path / "none"), "cannot be read"),
        ("relative", "absolute path"),
        (7, "absolute path"),
        ([one, None], "absolute path"),
    ]:
        with pytest.raises(ConfigError, match=f"^encryption_key_file: .*{why}"):
            parsed(value)


def test_cryptography_is_required_and_not_an_old_one(key_file, monkeypatch):
    metadata = sealing.importlib.metadata

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    for version in (missing, lambda name: "49.0.0"):
        monkeypatch.setattr(metadata, "version", version)
        with pytest.raises(ConfigError, match=r"cryptography.*kvoffload-async\[encryption\]"):
            parsed(key_file("one"))
