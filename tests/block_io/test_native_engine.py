"""What the native engine does with a batch."""

import errno
import os
import struct
from pathlib import Path

import pytest
from native_engine import (
    ATTRIBUTE,
    BLOCKS,
    PREFIX,
    ROW_BYTES,
    VALUE_PREFIX,
    Block,
    digest,
    keys_of,
    opened_engine,
    outcomes,
)


def test_extents_come_back(engine, block):
    assert outcomes(engine, block.extents(is_store=True)) == ({}, block.digests)
    assert outcomes(engine, block.extents(is_store=False)) == ({}, block.digests)
    assert block.loaded == block.data


def test_without_keys_there_are_no_digests(engine, block):
    assert outcomes(engine, block.extents(is_store=True, keys=None)) == ({}, b"")


def test_a_file_that_ends_early_and_one_that_fails_are_told_apart(engine, block, tmp_path):
    outcomes(engine, block.extents(is_store=True))
    os.truncate(tmp_path / "extents", 1024 + ROW_BYTES)
    write_only = os.open(tmp_path / "extents", os.O_WRONLY)
    runs = [(block.fd, 0, 3), (write_only, 0, 2), (block.fd, 0, 1)]
    errors, digests = outcomes(engine, block.extents(is_store=False, runs=runs))
    os.close(write_only)
    assert errors == {2: -1, 3: errno.EBADF, 4: errno.EBADF}
    assert digests[:32] == block.digests[:32]


def test_files_come_back(engine, block, tmp_path):
    statuses, digests, numbers = outcomes(engine, block.store_files())
    disk_bytes = struct.unpack(f"{2 * BLOCKS}q", numbers)
    assert (statuses, digests) == (bytes(BLOCKS), block.digests)
    status = (tmp_path / "leaf/0.bin").stat()
    assert (status.st_blocks * 512, status.st_mode & 0o777) == (disk_bytes[0], 0o600)
    assert os.getxattr(tmp_path / "leaf/0.bin", ATTRIBUTE) == VALUE_PREFIX + block.digests[:16]
    assert outcomes(engine, block.load_files()) == (bytes(BLOCKS), block.digests)
    assert block.loaded == block.data
    assert outcomes(engine, block.store_files())[0] == b"\1" * BLOCKS
    assert outcomes(engine, engine.has_files(block.root, ["leaf/0.bin", "leaf/x", "x/0.bin"])) == (
        b"\1\0\0"
    )


def test_without_a_digest_nothing_is_compared(engine, block, tmp_path):
    assert outcomes(engine, block.store_files(has_digest=False))[:2] == (bytes(BLOCKS), b"")
    assert os.listxattr(tmp_path / "leaf/0.bin") == []
    assert outcomes(engine, block.load_files())[0] == b"\1" * BLOCKS
    assert outcomes(engine, block.load_files(verify=False)) == (bytes(BLOCKS), b"")


def test_a_remembered_value_or_the_attribute_must_match(engine, block, tmp_path):
    outcomes(engine, block.store_files())
    values = [VALUE_PREFIX + block.digests[at : at + 16] for at in range(0, BLOCKS * 16, 16)]
    for index in (0, 1):
        os.removexattr(tmp_path / f"leaf/{index}.bin", ATTRIBUTE)
    other = b"\x02" + values[4][1:]  # the same checksum, and not as one that counts
    os.setxattr(tmp_path / "leaf/4.bin", ATTRIBUTE, other)
    expected = [values[0], values[0], values[0], None, other, b""]
    assert outcomes(engine, block.load_files(expected=expected))[0] == b"\0\1\0\0\1\0"


VICTIM_BYTES = 9000


@pytest.fixture
def victim(tmp_path):
    """A file with a checksum, larger than a row, in another folder than the blocks."""
    (tmp_path / "old").mkdir()
    path = tmp_path / "old/victim"
    path.write_bytes(b"x" * VICTIM_BYTES)
    os.setxattr(path, ATTRIBUTE, VALUE_PREFIX + bytes(16))
    return path


def store_in_place_of(block, victim, **changed):
    """Store the first block in the place of a victim; return status and bytes that were freed."""
    names = [f"old/{victim.name}", *[""] * (BLOCKS - 1)]
    outcome = outcomes(block.engine, block.store_files(**{"victims": names, **changed}))
    return outcome[0][0], struct.unpack(f"{2 * BLOCKS}q", outcome[2])[BLOCKS]


def holds_block(path, block):
    value = VALUE_PREFIX + block.digests[:16]
    is_whole = path.read_bytes() == block.data[:ROW_BYTES]
    return is_whole and os.getxattr(path, ATTRIBUTE) == value


def test_a_victim_is_overwritten_and_cut_to_its_size(block, victim, tmp_path):
    before = victim.stat()
    assert store_in_place_of(block, victim) == (0, before.st_blocks * 512)
    assert not victim.exists()
    assert (tmp_path / "leaf/0.bin").stat().st_ino == before.st_ino
    assert holds_block(tmp_path / "leaf/0.bin", block)
    assert sorted(path.name for path in (tmp_path / "leaf").iterdir()) == [
        f"{index}.bin" for index in range(BLOCKS)
    ]


def unmark(victim):
    os.removexattr(victim, ATTRIBUTE)


def mark_otherwise(victim):
    os.setxattr(victim, ATTRIBUTE, b"\2" + bytes(16))


def link(victim):
    os.link(victim, victim.with_name("other"))


def announce_a_reader(victim):
    (victim.parents[1] / "marker").touch()


@pytest.mark.parametrize("prevent", [unmark, mark_otherwise, link, announce_a_reader])
def test_a_victim_that_somebody_may_read_unverified_is_removed(block, victim, tmp_path, prevent):
    prevent(victim)
    with victim.open("rb") as reader:
        freed_bytes = victim.stat().st_blocks * 512
        assert store_in_place_of(block, victim) == (0, freed_bytes)
        assert reader.read() == b"x" * VICTIM_BYTES
    assert not victim.exists()
    assert holds_block(tmp_path / "leaf/0.bin", block)


def test_no_victim_is_overwritten_without_a_marker(block, victim, tmp_path):
    with victim.open("rb") as reader:
        assert store_in_place_of(block, victim, marker="")[0] == 0
        assert reader.read() == b"x" * VICTIM_BYTES
    assert holds_block(tmp_path / "leaf/0.bin", block)


def test_a_victim_that_is_gone_or_not_a_file_is_reported(block, victim, tmp_path):
    victim.unlink()
    assert store_in_place_of(block, victim) == (4, -1)
    victim.mkdir()
    assert store_in_place_of(block, victim) == (2, -1)
    victim.rmdir()
    victim.symlink_to(tmp_path / "leaf")
    assert store_in_place_of(block, victim) == (2, -1)
    assert not (tmp_path / "leaf/0.bin").exists()
    assert victim.is_symlink()


def test_a_victim_stays_if_its_block_is_there(block, victim, tmp_path):
    (tmp_path / "leaf/0.bin").touch()
    assert store_in_place_of(block, victim) == (1, -1)
    assert victim.exists()


def test_what_may_not_be_written_is_only_looked_up(engine, block, tmp_path):
    (tmp_path / "leaf/1.bin").touch()
    statuses, _, _ = outcomes(engine, block.store_files(may_write=b"\0\0\1\1\1\1"))
    assert statuses == b"\2\1\0\0\0\0"
    assert not (tmp_path / "leaf/0.bin").exists()


@pytest.fixture(params=[0o000, 0o077])
def _umask(request):
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_umask")
@pytest.mark.parametrize(
    ("folder_mode", "file_mode", "expected"),
    [
        *((0o700, -1, 0o600), (0o770, -1, 0o660), (0o775, -1, 0o660), (0o777, -1, 0o666)),
        *((0o1777, -1, 0o660), (0o700, 0o644, 0o644)),
    ],
)
def test_permissions(block, folder_mode, file_mode, expected):
    folder = Path(block.root[1]) / "leaf"
    folder.chmod(folder_mode)
    outcomes(block.engine, block.store_files(file_mode=file_mode))
    assert (folder / "0.bin").stat().st_mode & 0o777 == expected


def test_copies(engine, block):
    parts = struct.pack("12q", 10, 500, 300, 1, 0, 0, 5000, 0, 1, 1, 0, 0)
    assert outcomes(engine, engine.copies(block.target, block.source, parts)) is None
    assert block.loaded[10:310] == block.data[500:800]
    assert block.loaded[5000] == block.data[0]
    assert not any(block.loaded[:10])
    assert not any(block.loaded[310:5000])


def test_what_has_ended_counts_no_more_among_what_may_wait(tmp_path):
    with opened_engine(queued=2) as engine:
        block = Block(engine, tmp_path, BLOCKS, ROW_BYTES)
        for _ in range(10):
            assert outcomes(engine, block.extents(is_store=True))[0] == {}
        block.close()


def test_an_empty_batch_ends(engine, block):
    assert outcomes(engine, engine.has_files(block.root, [])) == b""
    empty = {"rows": [], "runs": [], "keys": []}
    assert outcomes(engine, block.extents(is_store=True, **empty)) == ({}, b"")


def test_one_event_for_all_that_has_ended(engine, block):
    tickets = [block.extents(is_store=True) for _ in range(5)]
    outcomes(engine, *tickets)
    assert engine.take() == []
    with pytest.raises(BlockingIOError):
        os.read(engine.fd, 8)
    counters = engine.counters()
    assert counters["batches"] == 5
    assert counters["hashed_bytes"] == 5 * BLOCKS * ROW_BYTES
    assert counters["bytes"] == 5 * BLOCKS * 1024
    assert 1 <= counters["wake_ups"] <= 5


def test_the_prefix_is_part_of_the_seed(engine, block):
    _, digests = outcomes(engine, block.extents(is_store=True, prefix=b"other\0"))
    assert digests != block.digests
    assert block.digests[:16] == digest(keys_of(1)[0], block.data[:ROW_BYTES])
    assert PREFIX != b"other\0"
