"""The native engine's checksums are those of the package xxhash, however a block is cut."""

import os
import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st
from native_engine import PREFIX, digest, native, opened_engine, outcomes
from xxh3 import address_of, addresses

GOLDEN = {  # key -> the digest of 1,000 bytes; what is on disk already is compared with it
    b"": "b68e7a8a51ffa1432324d9e38eaa9e55",
    b"key": "9d78809e43caaac067586e4546244822",
    bytes(range(256)): "419a3f81903614dbfc24bf1a4ac1f2eb",
}
MIB = 1 << 20


@pytest.fixture(scope="module")
def engine():
    with opened_engine(piece_bytes=64 << 10) as engine:
        yield engine


@pytest.fixture(scope="module")
def file():
    fd = os.memfd_create("digests")
    yield fd
    os.close(fd)


def moved(engine, fd, data, key):
    """Store a block and load it; return both digests, and what was loaded."""
    loaded = bytearray(len(data))
    both = []
    for buffer, is_store in ((data, True), (loaded, False)):
        memory = engine.map(buffer, len(data), len(data))
        ticket = engine.extents(memory, is_store, [0], [(fd, 0, 1)], [key], PREFIX)
        errors, found = outcomes(engine, ticket)
        assert errors == {}
        both.append(found)
        memory.release()
    return *both, bytes(loaded)


@pytest.mark.parametrize("key", GOLDEN)
def test_golden_vectors(engine, file, key):
    data = bytes((index * 131 + 7) & 0xFF for index in range(1000))
    stored, loaded, _ = moved(engine, file, data, key)
    assert stored == loaded == bytes.fromhex(GOLDEN[key])


@given(
    size=st.one_of(
        st.integers(1, 600),
        st.integers(1, 5 * MIB),
        st.sampled_from([64 << 10, (64 << 10) + 1, (64 << 10) - 1, MIB, 5 * MIB]),
    ),
    key=st.binary(max_size=300),
    fill=st.binary(min_size=1, max_size=64),
)
def test_pieces_make_the_whole(engine, file, size, key, fill):
    data = (fill * (size // len(fill) + 1))[:size]
    stored, loaded, read = moved(engine, file, data, key)
    assert stored == loaded == digest(key, data)
    assert read == data


@given(count=st.integers(1, 40), row_bytes=st.integers(1, 5000), pad=st.integers(0, 600))
def test_many_small_blocks_in_one_call(engine, file, count, row_bytes, pad):
    data = os.urandom(count * row_bytes)
    memory = engine.map(data, row_bytes, row_bytes + pad)
    keys = [b"%d" % index for index in range(count)]
    ticket = engine.extents(memory, True, range(count), [(file, 0, count)], keys, PREFIX)
    errors, found = outcomes(engine, ticket)
    assert errors == {}
    rows = [data[start : start + row_bytes] for start in range(0, len(data), row_bytes)]
    assert found == b"".join(map(digest, keys, rows))
    slots = b"".join(row + bytes(pad) for row in rows)
    assert os.pread(file, len(slots), 0) == slots


def test_what_does_not_compute_xxh3_is_refused():
    other = address_of("XXH64")  # which takes a seed, and whatever that is where none is given
    native.check_hashes(addresses())
    with pytest.raises(RuntimeError, match="hashes: the functions do not compute XXH3"):
        native.check_hashes((other, *addresses()[1:]))


def test_they_are_compared_in_a_process_with_many_open_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("no more than 1,024 files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    held = [os.memfd_create("held")]
    try:
        while held[-1] < 1024:  # as many as `select` can look at
            held.append(os.dup(held[0]))
        native.check_hashes(addresses())
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
