"""Damage of a slab store: named by the command, and only what verifies is served and kept."""

import itertools
import os

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slab.maintenance.slabs import BLOCK, NUM_BLOCKS, Slab, deaf_to
from slab.stores import flip

from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.files.digests import BlockDigester
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.slab.addresses import segment_of, slot_of
from kvoffload_async.tiers.slab.layout import BAD_JOURNAL, JOURNAL, NEXT_JOURNAL, segment_name
from kvoffload_async.tiers.slab.manifest import HEADER_BYTES
from kvoffload_async.tiers.slab.records import (
    RECORD_BYTES,
    addresses_of,
    frame,
    keys_of,
    put_records,
)
from kvoffload_async.types import JobMetadata, ReqContext, as_block_ids

_numbers = itertools.count()


def test_a_flipped_bit_is_named_by_verify_and_dropped_by_gc(slab):
    slab.flip(3)
    path, offset = slab.address(3)
    slot = (offset - slab.offset_of(0)) // BLOCK
    complaint = (
        f"corrupt: {key_of(3).hex()} (segment {int(path.stem[-6:])}, slot {slot}): wrong checksum"
    )
    assert slab.complaints("verify") == [complaint]
    found = slab.run("verify", exit_code=1)["verification"]
    assert (found["checked"], found["verified"], len(found["corrupt"])) == (12, 11, 1)
    changed = slab.run("gc", "--corrupt")
    assert changed["blocks"] == 11
    assert [f"corrupt: {name}: wrong checksum" for name in changed["corrupt"]] == [complaint]
    assert slab.run("verify")["verification"]["verified"] == 11
    assert slab.served() == [i for i in range(12) if i != 3]


def test_gc_of_a_sound_store_changes_nothing(slab):
    before = slab.files()
    changed = slab.run("gc", "--corrupt")
    assert slab.files() == before
    assert changed["blocks"] == 12


def test_a_damaged_journal_costs_its_frame_and_no_other_block(slab):
    first_half, second_half = range(6), range(6, 12)
    other = Slab(slab.command, "other")
    tier = other.open()
    other.rows[:] = other.truth
    assert other.job(tier, first_half).success
    kept = other.journal.stat().st_size
    assert other.job(tier, second_half).success
    flip(other.journal, RECORD_BYTES + 50)  # in the first frame's first record
    copy = slab.root / "m_r0"
    for path in set(other.folder.iterdir()) - {other.folder / NEXT_JOURNAL}:
        (copy / path.name).write_bytes(path.read_bytes())
    tier.shutdown()
    other.close()
    assert slab.complaints("inspect") == [f"{kept} bytes of the journal are damaged"]
    assert slab.served() == list(second_half)
    assert slab.run("inspect")["damaged_bytes"] == 0


def test_blocks_before_damage_are_suspect_and_served_once_verified(slab):
    tier = slab.open()
    slab.rows[:] = slab.truth
    extra = tuple(key_of(100 + i) for i in range(4))
    for number, key in enumerate(extra):
        rows = as_block_ids([number])
        tier.submit_store(JobMetadata(number, (key,), rows, False, ReqContext("r")))
        assert tier.drain_jobs(30.0)
    journal = slab.journal.read_bytes()
    tier.shutdown()
    slab.journal.write_bytes(journal)
    flip(slab.journal, len(journal) - 3 * RECORD_BYTES)  # the last frame but one
    assert slab.run("inspect", exit_code=1)["suspect"] == 14
    assert slab.run("verify", exit_code=1)["verification"]["verified"] == 15
    assert slab.served() == list(range(12))
    assert slab.run("inspect")["blocks"] == 15


def test_of_two_records_of_a_key_the_later_one_counts(slab):
    """As it is when the removal of the first was damaged."""
    path, offset = slab.address(3)
    contents = slab.contents()
    free = max(addresses_of(contents.live)) + 1
    with (slab.folder / segment_name(segment_of(free))).open("r+b") as file:
        file.seek(slab.offset_of(slot_of(free)))
        file.write(path.read_bytes()[offset : offset + BLOCK])
    digest = BlockDigester(contents.manifest.layout).digest(key_of(3), slab.truth[3].data)
    puts = put_records([key_of(3)], free, [digest])
    seed = contents.manifest.journal_seed
    with slab.journal.open("ab") as file:
        file.write(frame(contents.scanned.sequence + 1, puts, seed))
    slab.flip(2)
    assert slab.run("gc", "--corrupt")["blocks"] == 11
    assert slab.address(3)[1] == slab.offset_of(slot_of(free))
    assert slab.served() == [i for i in range(12) if i != 2]


def test_a_torn_tail_is_no_problem_and_is_cut_at_the_next_opening(slab):
    with slab.journal.open("ab") as file:
        file.write(b"KVSLABF1" + bytes(60))
    assert slab.run("inspect")["torn_bytes"] == 68
    assert slab.served() == list(range(12))
    assert slab.run("inspect")["torn_bytes"] == 0


def test_without_a_journal_nothing_can_be_served_and_inspect_says_so(slab):
    slab.journal.unlink()
    assert slab.complaints("inspect") == ["the journal is missing: the blocks cannot be identified"]
    assert slab.served() == []
    assert slab.run("inspect")["problems"] == []


def test_a_shortened_segment_loses_only_what_was_behind_its_end(slab):
    path, _ = slab.address(0)
    os.truncate(path, slab.offset_of(3) + 1)
    found = slab.run("verify")
    assert found["verification"]["verified"] == found["blocks"] == 7
    assert len(slab.served()) == 7


def test_a_segment_that_cannot_be_read_is_said_and_its_blocks_are_kept(slab, monkeypatch):
    monkeypatch.setattr("kvoffload_async.tiers.files.maintenance.FileOps", deaf_to(segment_name(0)))
    assert all("unreadable: " in line for line in slab.complaints("verify"))
    assert len(slab.complaints("gc", "--corrupt")) == 8
    monkeypatch.undo()
    assert slab.served() == list(range(12))


def test_a_gc_that_cannot_write_leaves_what_it_found(slab, monkeypatch):
    class Full(FileOps):
        def fdatasync(self, fd):
            raise OSError(28, "No space left on device")

    slab.flip(3)
    before = slab.files()
    monkeypatch.setattr("kvoffload_async.tiers.files.maintenance.FileOps", Full)
    (complaint,) = slab.complaints("gc", "--corrupt")
    assert complaint == "the journal cannot be written: No space left on device"
    assert {k: v for k, v in slab.files().items() if k != "journal.tmp"} == before
    monkeypatch.undo()
    assert slab.served() == [i for i in range(12) if i != 3]


@settings(
    max_examples=settings().max_examples // 10,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # a directory an example
)
@given(data=st.data())
def test_gc_keeps_exactly_what_verifies_whatever_is_damaged(command, data):
    slab = Slab(command, f"root{next(_numbers)}")
    slab.store_blocks()
    names = [JOURNAL, segment_name(0), segment_name(1)]
    for _ in range(data.draw(st.integers(1, 4))):
        path = slab.folder / data.draw(st.sampled_from(names))
        start = 0 if path.name == JOURNAL else HEADER_BYTES
        flip(path, data.draw(st.integers(start, path.stat().st_size - 1)))
    contents = slab.contents()
    sound = {
        key
        for key, address in zip(keys_of(contents.live), addresses_of(contents.live), strict=True)
        if _is_sound(slab, key, address)
    }
    assert slab.run("gc", "--corrupt")["blocks"] == len(sound)
    assert {key_of(number) for number in slab.served()} == sound
    found = slab.run("verify", exit_code=None)
    assert found["verification"]["verified"] == len(sound)
    assert all(problem.startswith(BAD_JOURNAL) for problem in found["problems"])
    slab.close()


def _is_sound(slab, key, address):
    data = (slab.folder / segment_name(segment_of(address))).read_bytes()
    offset = slab.offset_of(slot_of(address))
    number = next(i for i in range(NUM_BLOCKS) if key_of(i) == key)
    return data[offset : offset + BLOCK] == slab.truth[number].tobytes()
