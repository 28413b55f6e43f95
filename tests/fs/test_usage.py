"""The shared count: what is granted, reported, kept of the dead, and what survives a crash."""

import errno
import struct

import pytest
import xxhash
from faulty_files import FaultyFileOps
from fs.counted import MANY, count, granted, grown, living, opened, reserved, state, walk

from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.fs.usage import (
    FILE_BYTES,
    MAX_WRITERS,
    NUM_BUCKETS,
    SLOT_BYTES,
    VERSION,
    NewerCountError,
    Sum,
    Usage,
    UsageFile,
    WriterCount,
    parsed,
    read_usage,
)

__all__ = ["living", "opened"]

NEWER = b"kvo.use\n" * 2048


# -- granting and reporting ---------------------------------------------------------------------


def test_a_count_that_was_never_taken_grants_nothing_before_a_walk(opened):
    usage = opened(is_known=False)
    assert granted(usage, 100, 3, MANY) == 0
    assert not usage.is_complete
    walk(usage, {7: 4096})
    assert usage.is_complete
    assert granted(usage, 100, 3, MANY) == 3
    assert state(usage) == (4096 + 300, 300, 300)  # the first may still move something


def test_what_an_operation_may_move_is_published_beside_what_it_reserves(opened):
    usage, other = opened(), opened("other")
    operation = usage.begin(100, 5, 200)
    assert (operation.reserved_bytes, operation.moving_bytes) == (200, 300)
    assert state(other) == (0, 200, 300)
    count(usage, grown(200), operation)
    assert state(other) == (200, 0, 0)


def test_room_that_is_released_during_a_change_counts_until_what_was_written_does(
    opened, monkeypatch
):
    usage = opened()
    operation = usage.begin(100, 1, MANY)
    merge = usage._merge

    def and_end(found):
        monkeypatch.undo()
        begun = merge(found)
        usage.end(operation, grown(100))
        return begun

    monkeypatch.setattr(usage, "_merge", and_end)
    assert usage.read().total_bytes == 100
    assert usage.read().total_bytes == 100


def test_beside_another_counter_its_count_goes_on(opened):
    first = opened("first")
    count(first, grown(70))
    second = opened("second", is_known=False)
    assert second.is_complete
    assert state(second) == state(first) == (70, 0, 0)


def test_the_count_outlives_all_who_count(opened):
    first = opened("first")
    count(first, grown(70))
    first.close()
    second = opened("second", is_known=False)
    assert second.is_complete
    assert second.read().settled_bytes == 70


def test_a_writers_own_entry_is_counted_as_long_as_it_is_there(opened, directory):
    first = opened("first")
    second = UsageFile(FileOps(), str(directory.folder), "second", lambda: {"first"})
    second.open(entry_bytes=4096)
    assert first.read().settled_bytes == 4096
    second.close()
    assert first.read().settled_bytes == 0


def test_room_is_granted_up_to_the_capacity_by_all_together(opened):
    first, second = opened("first"), opened("second")
    count(first, grown(100))
    operation = first.begin(100, 5, 1000)
    assert operation.reserved_bytes == 500
    assert granted(second, 100, 5, 1000) == 4
    assert granted(second, 100, 5, 1000) == 0
    count(first, grown(250), operation)
    assert granted(second, 100, 5, 1000) == 2
    assert granted(second, 100, 5, 10) == 0


def test_ending_gives_back_and_counts(opened):
    usage = opened()
    kept = usage.begin(100, 1, MANY)
    count(usage, grown(150, 30), usage.begin(100, 2, MANY))
    after = usage.read()
    assert after.settled_bytes == 120
    assert reserved(after) == {"me": 100}
    assert after.changed_bytes == 180
    count(usage, grown(removed=900), kept)
    assert usage.read().total_bytes == 0


def test_closing_gives_back_what_was_set_aside(opened):
    first, second = opened("first"), opened("second")
    first.begin(100, 3, MANY)
    first.close()
    first.close()
    assert reserved(second.read()) == {"second": 0}
    with pytest.raises(OSError, match="is closed"):
        first.read()


def test_a_writer_that_goes_on_under_another_id_keeps_what_it_had_reserved(opened, living):
    usage, other = opened("old"), opened("other")
    operation = usage.begin(100, 3, MANY)
    living.remove("old")
    living.add("new")
    usage.rename_writer("new")
    assert reserved(other.read()) == {"old": 300, "other": 0}
    assert reserved(usage.read()) == {"new": 300, "other": 0}
    walk(other)
    assert state(other) == (0, 300, 0)
    count(usage, grown(250), operation)
    assert reserved(usage.read()) == {"new": 0, "other": 0}


def test_without_a_place_among_the_writers_nothing_is_granted(opened, living):
    first = opened("w0")
    living |= {f"w{number}" for number in range(MAX_WRITERS)}
    others = {f"w{number}": WriterCount() for number in range(1, MAX_WRITERS)}
    first._change(lambda usage: usage.writers.update(others))
    late = opened("late", is_known=False)
    assert granted(late, 100, 1, MANY) == 0
    count(late, grown(70))
    assert late.read().settled_bytes == 70
    walk(late, {7: 4096})
    assert late.read().settled_bytes == 70, "corrected by a walk of which nobody knew"
    living.discard("w5")
    assert granted(late, 100, 1, MANY) == 1
    assert reserved(first.read())["late"] == 100


# -- the dead -----------------------------------------------------------------------------------


def killed(opened, living, unit_bytes=100) -> UsageFile:
    dead = opened("dead")
    assert granted(dead, unit_bytes, 3, MANY) == 3
    living.discard("dead")
    return dead


def test_what_a_dead_writer_had_reserved_counts_until_a_walk_has_seen_what_it_left(opened, living):
    other = opened("other")
    killed(opened, living)
    opened("new")
    assert state(other) == (0, 300, 0)
    for capacity_bytes, reserved_bytes in ((399, 0), (400, 100)):
        operation = other.begin(100, 1, capacity_bytes)
        assert operation.reserved_bytes == reserved_bytes
        other.end(operation)
    walk(other, {7: 200})
    assert state(other) == (200, 0, 0)
    assert other.read().writers.keys() == {"other", "new"}


def test_a_walk_that_began_before_a_death_does_not_drop_what_was_reserved(opened, living):
    other = opened("other")
    other.begin_walk()
    killed(opened, living)
    other.advance(0, 0, NUM_BUCKETS)
    other.advance(0, NUM_BUCKETS, NUM_BUCKETS, 100)
    other.end_walk()
    assert state(other) == (100, 300, 0)
    walk(other, {7: 200})
    assert state(other) == (200, 0, 0)


def test_a_walk_under_way_takes_over_what_is_dropped_by_another(opened, living):
    first, second = opened("first"), opened("second")
    first.begin_walk()
    first.advance(0, 0, NUM_BUCKETS)
    killed(opened, living)
    walk(second)
    assert state(second) == (0, 0, 0)
    first.advance(0, NUM_BUCKETS, NUM_BUCKETS)
    first.end_walk()
    assert state(first) == (0, 0, 0), "it agrees within what is in doubt"
    assert granted(first, 100, 1, 100) == 1


def test_if_all_places_are_the_deads_one_becomes_free_and_what_it_had_reserved_is_counted(
    opened, living
):
    first = opened("w0")
    others = {f"w{number}": WriterCount(10) for number in range(1, MAX_WRITERS)}
    first._change(lambda usage: usage.writers.update(others))
    late = opened("late")
    assert late.read().writers.keys() == {"w0", "late"}
    assert state(late) == (10 * (MAX_WRITERS - 1), 0, 0)


# -- what a crash leaves ------------------------------------------------------------------------


def test_a_change_that_was_cut_off_leaves_the_state_before_it(opened, directory):
    usage = opened()
    operation = usage.begin(100, 3, MANY)
    before = read_usage(FileOps(), str(directory.folder)).sequence
    count(usage, grown(250), operation)
    content = bytearray((directory.folder / ".usage").read_bytes())
    newest = (before + 1) % 2 * SLOT_BYTES
    content[newest + 100 : newest + SLOT_BYTES] = b"x" * (SLOT_BYTES - 100)
    (directory.folder / ".usage").write_bytes(content)
    read = read_usage(FileOps(), str(directory.folder))
    assert read.sequence == before
    assert (read.settled_bytes, reserved(read)) == (0, {"me": 300})


def former() -> bytes:
    """A count of version 1, which had other fields."""
    slot = Usage(total=Sum(4096, 0, 1, NUM_BUCKETS, NUM_BUCKETS)).packed()
    slot[8] = VERSION - 1
    return bytes(slot).ljust(SLOT_BYTES, b"\0") * 2


def absurd() -> bytes:
    """A count that is valid, with a number that no directory has."""
    slot = Usage(writers={"1-a": WriterCount(2**63)}).packed()
    return bytes(slot).ljust(SLOT_BYTES, b"\0") * 2


def too_many() -> bytes:
    """A count with a right checksum over more writers than fit into a slot."""
    slot = bytearray(Usage().packed().ljust(SLOT_BYTES, b"\0"))
    struct.pack_into("<I", slot, 40, 2**31)
    digest = xxhash.xxh3_64(bytes(slot[:32]))
    digest.update(bytes(slot[40:]))
    struct.pack_into("<Q", slot, 32, digest.intdigest())
    return bytes(slot) * 2


@pytest.mark.parametrize(
    "garbage",
    [
        *(b"", b"{", b"[1, {}]", b"null", b"[" * 20_000, bytes(FILE_BYTES)),
        *(former(), absurd(), too_many(), NEWER),
    ],
)
def test_a_file_that_does_not_parse_grants_nothing_before_a_walk(opened, directory, garbage):
    usage = opened()
    usage.begin(10, 5, MANY)
    (directory.folder / ".usage").write_bytes(garbage)
    if garbage != NEWER:
        assert read_usage(FileOps(), str(directory.folder)) is None
        usage.end(usage.begin(10, 5, MANY))
        assert not usage.is_complete
        assert reserved(usage.read()) == {"me": 50}
        walk(usage, {7: 4096})
        assert granted(usage, 10, 5, MANY) == 5
        assert state(usage) == (4096, 100, 0)
    else:
        with pytest.raises(NewerCountError, match="format"):
            usage.begin(10, 5, MANY)
        (directory.folder / ".usage").unlink()


LARGEST = 2**62 - 1
EMPTY = (0, 0, 1, NUM_BUCKETS, NUM_BUCKETS)
BUSY = WriterCount(LARGEST, LARGEST, 7, Sum(LARGEST, LARGEST, 1, 4, 5))


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(Usage(LARGEST, 0, Sum(*EMPTY)), id="sequence"),
        pytest.param(Usage(1, LARGEST, Sum(*EMPTY)), id="changed"),
        pytest.param(Usage(1, 0, Sum(LARGEST, *EMPTY[1:])), id="total"),
        pytest.param(Usage(1, 0, Sum(0, 0, 1, 65_535, 65_535)), id="buckets"),
        pytest.param(Usage(1, 0, Sum(*EMPTY), {"1-a": BUSY, "1-b": BUSY}), id="two writers"),
        pytest.param(
            Usage(1, 0, Sum(*EMPTY), {f"1-{n}": BUSY for n in range(MAX_WRITERS)}), id="all writers"
        ),
    ],
)
def test_a_count_with_the_largest_numbers_loses_no_change_and_is_right_after_walks(
    opened, directory, found
):
    slot = bytes(found.packed()).ljust(SLOT_BYTES, b"\0")
    (directory.folder / ".usage").write_bytes(slot * 2)
    usage = opened(is_known=False)
    count(usage, grown(100))
    walk(usage, {7: 700})
    walk(usage, {7: 700})
    for expected_bytes in (800, 900, 1000, 1000):
        operation = usage.begin(100, 1, 1000)
        count(usage, grown(operation.reserved_bytes), operation)
        assert state(usage) == (expected_bytes, 0, 0)


def test_a_count_that_was_removed_is_made_again_and_knows_nothing(opened, directory):
    usage = opened()
    count(usage, grown(70))
    (directory.folder / ".usage").unlink()
    assert granted(usage, 10, 0, MANY) == 0
    assert not usage.is_complete
    walk(usage, {7: 70})
    assert granted(usage, 10, 5, MANY) == 5


def test_a_newer_format_is_left_as_it_is(opened, directory):
    usage = opened()
    path = directory.folder / ".usage"
    usage.close()
    content = bytearray(path.read_bytes())
    content[8] = 3  # of one slot: its checksum is not looked at before its version
    path.write_bytes(content)
    with pytest.raises(NewerCountError, match=r"format 3 .* knows format 2"):
        UsageFile(FileOps(), str(directory.folder), "me", set).open()
    assert path.read_bytes() == content
    path.unlink()


def test_the_largest_count_fits():
    largest = Sum(2**61, 2**61, 2**32 - 1, NUM_BUCKETS, NUM_BUCKETS)
    usage = Usage(2**61, 2**61, largest)
    for number in range(MAX_WRITERS):
        usage.writers[f"{2**22}-{number:012}"] = WriterCount(2**61, 2**61, 7, largest)
    packed = bytes(usage.packed())
    assert len(packed) <= SLOT_BYTES
    again = parsed(memoryview(packed.ljust(FILE_BYTES, b"\0")))
    assert again == usage
    assert again.is_complete


def test_what_another_change_has_reported_is_not_reported_again(opened):
    ops = FaultyFileOps()
    usage = opened(ops=ops)
    for operation in [usage.begin(10, 1), usage.begin(10, 1)]:
        usage.end(operation, grown(10))
    before = len(ops.calls)
    usage.report()
    assert usage.read().settled_bytes == 20
    reported = ops.counts(before)["lock"]
    usage.report()
    assert ops.counts(before)["lock"] == reported == 2


def test_what_could_not_be_reported_is_reported_by_the_next_call(opened):
    ops = FaultyFileOps()
    usage = opened(ops=ops)
    usage.end(usage.begin(10, 1), grown(10))
    ops.fail(errno.EIO, on="pwrite", times=1)
    with pytest.raises(OSError, match="Input/output"):
        usage.report()
    before = len(ops.calls)
    usage.report()
    assert ops.counts(before)["pwrite"] == 1
    assert usage.read().settled_bytes == 10
