"""The shared count: what is granted, told, presumed, and what survives a crash."""

import errno

import pytest
from faulty_files import FaultyFileOps
from fs.counted import MANY, grown, living, opened, settle, state, walk

from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.fs.usage import (
    FILE_BYTES,
    MAX_WRITERS,
    NUM_BUCKETS,
    SLOT_BYTES,
    NewerCountError,
    Usage,
    UsageFile,
    WriterCount,
    parsed,
    read_usage,
)

__all__ = ["living", "opened"]

NEWER = b"kvo.use\n" * 2048


# -- granting and telling -----------------------------------------------------------------------


def test_a_count_that_was_never_taken_grants_nothing_before_a_walk(opened):
    usage = opened(is_known=False)
    assert usage.reserve(100, 3, MANY) == 0
    assert not usage.is_complete
    assert walk(usage, {7: 4096}) == []
    assert usage.is_complete
    assert usage.reserve(100, 3, MANY) == 3
    assert state(usage) == (4096, 300, 0)


def test_room_that_is_released_during_a_change_counts_until_what_was_written_does(
    opened, monkeypatch
):
    usage = opened()
    assert usage.reserve(100, 1, MANY) == 1
    begin_change = usage._own.begin_change

    def and_record(found):
        monkeypatch.undo()
        begun = begin_change(found)
        usage.record(100, grown(100))
        return begun

    monkeypatch.setattr(usage._own, "begin_change", and_record)
    assert usage.read().total_bytes == 100
    assert usage.read().total_bytes == 100


@pytest.mark.parametrize("step", ["reserve", "add_untold"])
def test_a_change_between_the_steps_of_a_record_does_not_count_too_little(
    opened, monkeypatch, step
):
    usage = opened()
    assert usage.reserve(100, 1, MANY) == 1
    take_step, totals = getattr(usage._own, step), []

    def and_read(argument):
        monkeypatch.undo()
        take_step(argument)
        totals.append(usage.read().total_bytes)

    monkeypatch.setattr(usage._own, step, and_read)
    usage.record(100, grown(100))
    assert totals[0] >= 100
    assert usage.read().total_bytes == 100


def test_beside_another_counter_its_count_goes_on(opened):
    first = opened("first")
    settle(first, 0, grown(70))
    second = opened("second", is_known=False)
    assert second.is_complete
    assert state(second) == state(first) == (70, 0, 0)


def test_the_count_outlives_all_who_count(opened):
    first = opened("first")
    settle(first, 0, grown(70))
    first.close()
    second = opened("second", is_known=False)
    assert second.is_complete
    assert second.read().settled_bytes == 70


def test_a_writers_own_entry_is_counted_as_long_as_it_is_there(opened, place):
    first = opened("first")
    second = UsageFile(FileOps(), str(place.folder), "second", lambda: {"first"})
    second.open(entry_bytes=4096)
    assert first.read().settled_bytes == 4096
    second.close()
    assert first.read().settled_bytes == 0


def test_room_is_granted_up_to_the_capacity_by_all_together(opened):
    first, second = opened("first"), opened("second")
    settle(first, 0, grown(100))
    assert first.reserve(100, 5, 1000) == 5
    assert second.reserve(100, 5, 1000) == 4
    assert second.reserve(100, 5, 1000) == 0
    settle(first, 500, grown(250))
    assert second.reserve(100, 5, 1000) == 2
    assert second.reserve(100, 5, 10) == 0


def test_settling_gives_back_and_counts(opened):
    usage = opened()
    usage.reserve(100, 3, MANY)
    settle(usage, 200, grown(150, 30))
    after = usage.read()
    assert after.settled_bytes == 120
    assert after.bucket(7)[0] == 120
    assert after.reserved_bytes == {"me": 100}
    assert after.changed_bytes == 512
    settle(usage, 900, grown(removed=900))
    assert usage.read().total_bytes == 0


def test_closing_gives_back_what_was_set_aside(opened):
    first, second = opened("first"), opened("second")
    first.reserve(100, 3, MANY)
    first.close()
    first.close()
    assert second.read().reserved_bytes == {"second": 0}
    with pytest.raises(OSError, match="is closed"):
        first.read()


def test_a_writer_that_goes_on_under_another_id_keeps_what_it_had_reserved(opened, living):
    usage, other = opened("old"), opened("other")
    usage.reserve(100, 3, MANY)
    living.remove("old")
    living.add("new")
    usage.rename_writer("new")
    assert other.read().reserved_bytes == {"old": 300, "other": 0}
    assert usage.read().reserved_bytes == {"new": 300, "other": 0}
    other.begin_cycle()
    assert other.read().presumed_bytes == 0
    settle(usage, 300, grown(250))
    assert usage.read().reserved_bytes == {"new": 0, "other": 0}


def test_without_a_place_among_the_writers_nothing_is_granted(opened, living):
    first = opened("w0")
    living |= {f"w{number}" for number in range(MAX_WRITERS)}
    others = {f"w{number}": WriterCount(0, 0, 0, 0) for number in range(1, MAX_WRITERS)}
    first._change(lambda usage: usage.writers.update(others))
    late = opened("late", is_known=False)
    assert late.reserve(100, 1, MANY) == 0
    settle(late, 0, grown(70))
    assert late.read().settled_bytes == 70
    living.discard("w5")
    first.begin_cycle()
    assert late.reserve(100, 1, MANY) == 1
    assert first.read().reserved_bytes["late"] == 100


# -- the dead -----------------------------------------------------------------------------------


def killed(opened, living, ops=None) -> UsageFile:
    dead = opened("dead", ops)
    assert dead.reserve(100, 3, MANY) == 3
    living.discard("dead")
    return dead


@pytest.mark.parametrize("how", ["open", "cycle"])
def test_what_a_dead_writer_had_reserved_is_presumed_used(opened, living, how):
    other = opened("other")
    killed(opened, living)
    if how == "open":
        opened("new")
    else:
        assert other.begin_cycle() == 300
    assert state(other) == (0, 0, 300)
    assert other.reserve(100, 1, 399) == 0
    assert other.reserve(100, 1, 400) == 1


def test_a_cycle_that_began_before_a_death_does_not_give_up_what_is_presumed(opened, living):
    other = opened("other")
    ever = other.begin_cycle()
    killed(opened, living)
    later = other.begin_cycle()
    other.end_cycle(ever)
    assert other.read().presumed_bytes == 300
    other.end_cycle(later)
    other.end_cycle(ever)
    assert other.read().presumed_bytes == 0


def test_two_cycles_give_up_what_is_presumed_once(opened, living):
    first, second = opened("first"), opened("second")
    killed(opened, living)
    both = first.begin_cycle(), second.begin_cycle()
    killed(opened, living)
    first.begin_cycle()
    first.end_cycle(both[0])
    second.end_cycle(both[1])
    assert first.read().presumed_bytes == 300


# -- what a crash leaves ------------------------------------------------------------------------


def test_a_change_that_was_cut_off_leaves_the_state_before_it(opened, place):
    usage = opened()
    usage.reserve(100, 3, MANY)
    before = read_usage(FileOps(), str(place.folder)).sequence
    settle(usage, 300, grown(250))
    content = bytearray((place.folder / ".usage").read_bytes())
    newest = (before + 1) % 2 * SLOT_BYTES
    content[newest + 2000 : newest + SLOT_BYTES] = b"x" * (SLOT_BYTES - 2000)
    (place.folder / ".usage").write_bytes(content)
    read = read_usage(FileOps(), str(place.folder))
    assert read.sequence == before
    assert (read.settled_bytes, read.reserved_bytes) == (0, {"me": 300})


@pytest.mark.parametrize(
    "garbage",
    [b"", b"{", b"[1, {}]", b"null", b"[" * 20_000, bytes(FILE_BYTES), NEWER],
)
def test_a_file_that_does_not_parse_grants_nothing_before_a_walk(opened, place, garbage):
    usage = opened()
    usage.reserve(10, 5, MANY)
    (place.folder / ".usage").write_bytes(garbage)
    if garbage != NEWER:
        assert read_usage(FileOps(), str(place.folder)) is None
        assert usage.reserve(10, 5, MANY) == 0
        assert usage.read().reserved_bytes == {"me": 50}
        walk(usage, {7: 4096})
        assert usage.reserve(10, 5, MANY) == 5
        assert state(usage) == (4096, 100, 0)
    else:
        with pytest.raises(NewerCountError, match="format"):
            usage.reserve(10, 5, MANY)
        (place.folder / ".usage").unlink()


def test_a_count_that_was_removed_is_made_again_and_knows_nothing(opened, place):
    usage = opened()
    settle(usage, 0, grown(70))
    (place.folder / ".usage").unlink()
    assert usage.reserve(10, 5, MANY) == 0
    walk(usage, {7: 70})
    assert usage.reserve(10, 5, MANY) == 5


def test_a_newer_format_is_left_as_it_is(opened, place):
    usage = opened()
    path = place.folder / ".usage"
    usage.close()
    content = bytearray(path.read_bytes())
    content[8] = 2  # of one slot: its checksum is not looked at before its version
    path.write_bytes(content)
    with pytest.raises(NewerCountError, match=r"format 2 .* knows format 1"):
        UsageFile(FileOps(), str(place.folder), "me", set).open()
    assert path.read_bytes() == content
    path.unlink()


def test_the_largest_count_fits():
    usage = Usage()
    for number in range(NUM_BUCKETS):
        usage.set(number, 2**50)
        usage.change(number, 2**41, 0)
    for number in range(MAX_WRITERS):
        usage.writers[f"{2**22}-{number:012}"] = WriterCount(2**60, 2**40 + 3, 2**40 + 1, 7)
    again = parsed(memoryview(bytes(usage.packed()) + bytes(SLOT_BYTES)))
    assert again.settled_bytes == usage.settled_bytes == NUM_BUCKETS * (2**50 + 2**41)
    assert again.reserved_bytes == usage.reserved_bytes
    assert again.writers[f"{2**22}-{5:012}"] == WriterCount(2**60, 3, 1, 7)
    assert again.is_complete


def test_what_another_change_has_told_is_not_told_again(opened):
    ops = FaultyFileOps()
    usage = opened(ops=ops)
    usage.record(0, grown(10), usage.begin())
    usage.record(0, grown(10), usage.begin())
    before = len(ops.calls)
    usage.tell()
    assert usage.read().settled_bytes == 20
    told = ops.counts(before)["lock"]
    usage.tell()
    assert ops.counts(before)["lock"] == told == 2


def test_what_could_not_be_told_is_told_by_the_next_call(opened):
    ops = FaultyFileOps()
    usage = opened(ops=ops)
    usage.record(0, grown(10), usage.begin())
    ops.fail(errno.EIO, on="pwrite", times=1)
    with pytest.raises(OSError, match="Input/output"):
        usage.tell()
    before = len(ops.calls)
    usage.tell()
    assert ops.counts(before)["pwrite"] == 1
    assert usage.read().settled_bytes == 10
