"""`kvoffload store` on slab stores: what it finds, what it repairs, and what it leaves alone."""

import fcntl
import itertools
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvoffload_async.cli.store.slab import verification as verification_module
from kvoffload_async.cli.store.slab.stores import SlabStore, read_contents
from kvoffload_async.facade.slab import SlabTierManager
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.fs.ops import FileOps
from kvoffload_async.tiers.sealing import BlockDigester
from kvoffload_async.tiers.slab.layout import JOURNAL, LOCK, MANIFEST, segment_name
from kvoffload_async.tiers.slab.manifest import Manifest
from kvoffload_async.tiers.slab.places import segment_of, slot_of
from kvoffload_async.tiers.slab.records import (
    RECORD_BYTES,
    frame,
    keys_of,
    places_of,
    put_records,
    seed_of,
)
from kvoffload_async.types import JobMetadata, LookupResult, ReqContext, as_block_ids

BLOCK = 4096
NUM_BLOCKS = 12
_numbers = itertools.count()


class Slab:
    """A directory with a slab store in it, and the tier that fills it."""

    def __init__(self, command, name="root"):
        self.command = command
        self.root = command.directory / name
        self.buffer = PrimaryBuffer(NUM_BLOCKS, BLOCK)
        self.rows = np.asarray(self.buffer.view)
        self.truth = np.random.default_rng(7).integers(
            256, size=(NUM_BLOCKS, BLOCK), dtype=np.uint8
        )

    def close(self):
        del self.rows
        self.buffer.release()

    @property
    def folder(self):
        return self.root / "m_r0"

    @property
    def journal(self):
        return self.folder / JOURNAL

    @property
    def manifest(self):
        return self.folder / MANIFEST

    @property
    def store(self):
        return SlabStore(str(self.folder))

    def open(self, **options):
        options = {"capacity_bytes": "1MiB", "segment_bytes": "32KiB", "model": "m"} | options
        return SlabTierManager(None, self.buffer.view, root_dir=str(self.root), **options)

    def job(self, tier, keys, *, is_load=False):
        request = ReqContext("r")
        rows = as_block_ids(keys)
        job = JobMetadata(1, tuple(map(key_of, keys)), rows, is_load, request)
        (tier.submit_load if is_load else tier.submit_store)(job)
        assert tier.drain_jobs(30.0)
        (result,) = tier.get_finished_jobs()
        return result

    def store_blocks(self, keys=range(NUM_BLOCKS), **options):
        tier = self.open(**options)
        self.rows[:] = self.truth
        assert self.job(tier, keys).success
        tier.shutdown()

    def served(self, **options):
        """Open the store; return the numbers of the blocks that it serves, each with its bytes."""
        tier = self.open(**options)
        self.rows[:] = 0
        known = [
            i
            for i in range(NUM_BLOCKS)
            if tier.lookup(key_of(i), ReqContext("r")) is LookupResult.HIT
        ]
        result = self.job(tier, known, is_load=True)
        right = result.successful_keys or ()
        loaded = [i for i in known if result.success or key_of(i) in right]
        tier.shutdown()
        assert all(np.array_equal(self.rows[i], self.truth[i]) for i in loaded)
        return loaded

    def place(self, number):
        contents = read_contents(FileOps(), self.store)
        places = dict(zip(keys_of(contents.live), places_of(contents.live), strict=True))
        place = places[key_of(number)]
        return self.folder / segment_name(segment_of(place)), slot_of(place) * BLOCK

    def flip(self, number, at=100):
        path, offset = self.place(number)
        flip(path, offset + at)

    def run(self, verb, *arguments, exit_code=0, directory=None):
        result = self.command.run("store", verb, directory or self.root, "--json", *arguments)
        assert result.exit_code == exit_code, result.output
        report = json.loads(result.stdout)
        assert report["namespaces"] == []
        (store,) = report["slab_stores"]
        assert store["name"] == "m_r0"
        return store

    def complaints(self, verb, *arguments):
        result = self.command.run("store", verb, self.root, *arguments)
        assert result.exit_code == 1, result.output
        lines = result.stderr.splitlines()
        assert all(line.startswith("kvoffload: error: m_r0: ") for line in lines)
        return [line.removeprefix("kvoffload: error: m_r0: ") for line in lines]

    def files(self):
        return {p.name: p.read_bytes() for p in self.folder.iterdir() if p.name != LOCK}


def flip(path, offset):
    with Path(path).open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.fixture
def slab(command):
    made = Slab(command)
    made.store_blocks()
    yield made
    made.close()


# -- inspect ----------------------------------------------------------------------------------


def test_inspect_counts_what_is_there_and_changes_nothing(slab):
    before = slab.files()
    found = slab.run("inspect")
    assert slab.files() == before
    assert found["model"] == "m"
    assert found["rank"] == 0
    assert found["block_bytes"] == BLOCK
    assert found["in_use_by"] is None
    assert (found["blocks"], found["sealed"], found["suspect"]) == (12, 12, 0)
    assert (found["segments"], found["slots"], found["free_slots"]) == (2, 16, 4)
    assert found["journal_bytes"] == slab.journal.stat().st_size
    assert found["damaged_bytes"] == found["torn_bytes"] == 0
    assert found["disk_bytes"] >= 16 * BLOCK
    assert found["temps"] == found["strangers"] == found["problems"] == []


def test_a_stores_own_folder_will_do(slab):
    assert slab.run("inspect", directory=slab.folder)["blocks"] == 12


def test_blocks_without_a_checksum_are_told_apart(command):
    slab = Slab(command)
    slab.store_blocks(verify=False)
    found = slab.run("verify")
    assert found["sealed"] == found["verification"]["sealed"] == 0
    assert found["blocks"] == found["verification"]["unsealed"] == 12
    slab.close()


def test_a_directory_with_both_kinds_of_store_shows_both(slab):
    trace = slab.command.trace([[1, 2, 3]])
    slab.command.figures(trace, "--primary-blocks", 8, "--tier", f"fs:root_dir={slab.root}")
    for verb in ("inspect", "verify", "gc", "repair"):
        result = slab.command.run("store", verb, slab.root, "--json")
        assert result.exit_code == 0, result.output
        report = json.loads(result.stdout)
        assert len(report["namespaces"]) == len(report["slab_stores"]) == 1
        assert slab.command.run("store", verb, slab.root).exit_code == 0


@pytest.mark.parametrize("verb", ["inspect", "verify", "gc", "repair"])
def test_for_people_there_is_a_table(slab, verb):
    result = slab.command.run("store", verb, slab.root)
    assert result.exit_code == 0, result.output
    assert "m_r0" in result.stdout
    assert "12" in result.stdout


# -- while a tier is at work ------------------------------------------------------------------


def test_a_store_in_use_can_be_inspected_and_verified(slab):
    tier = slab.open()
    slab.rows[:] = slab.truth
    assert slab.job(tier, range(6)).success
    before = slab.files()
    found = slab.run("verify")
    assert slab.files() == before
    assert found["in_use_by"] == str(os.getpid())
    assert found["verification"]["sealed"] == 12
    assert slab.job(tier, range(12), is_load=True).success
    tier.shutdown()


@pytest.mark.parametrize("verb", ["gc", "repair"])
def test_what_changes_a_store_refuses_one_in_use_and_names_the_process(slab, verb):
    tier = slab.open()
    before = slab.files()
    message = slab.command.refusal("store", verb, slab.root)
    assert f"in use by process {os.getpid()}; end that first" in message
    assert slab.files() == before
    tier.shutdown()


def test_a_tier_cannot_open_what_is_being_repaired(slab, monkeypatch):
    seen = []

    class Curious(FileOps):
        def fdatasync(self, fd):
            with (slab.folder / LOCK).open("r+b") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    seen.append(lock.read().decode().strip())
            super().fdatasync(fd)

    monkeypatch.setattr("kvoffload_async.cli.store.command.FileOps", Curious)
    slab.flip(3)
    slab.run("repair")
    assert seen == [str(os.getpid())]


def test_looking_does_not_keep_a_tier_from_opening(slab):
    slab.run("verify")
    assert slab.served() == list(range(12))


def test_a_block_that_is_replaced_while_it_is_read_is_not_corrupt(slab, monkeypatch):
    """Between the reading of the journal and that of the slots, a tier gives them to others."""
    check = verification_module.SlotChecker.check
    tiers = []
    one_at_a_time = threading.Lock()

    def late(self, batch):
        with one_at_a_time:
            overwrite()
        return check(self, batch)

    def overwrite():
        if not tiers:
            tiers.append(slab.open(capacity_bytes="160KiB", segment_bytes="32KiB"))
            slab.rows[:] = slab.truth[::-1]
            for start in (100, 112, 124):
                keys = tuple(key_of(start + i) for i in range(NUM_BLOCKS))
                rows = as_block_ids(range(NUM_BLOCKS))
                tiers[0].submit_store(JobMetadata(start, keys, rows, False, ReqContext("r")))
                assert tiers[0].drain_jobs(30.0)
                assert all(result.success for result in tiers[0].get_finished_jobs())

    monkeypatch.setattr(verification_module.SlotChecker, "check", late)
    found = slab.run("verify")["verification"]
    assert found["changed"] > 0
    assert found["changed"] + found["checked"] == 12
    assert found["corrupt"] == []
    tiers[0].shutdown()


# -- damage -----------------------------------------------------------------------------------


def test_a_flipped_bit_is_named_by_verify_and_dropped_by_repair(slab):
    slab.flip(3)
    path, offset = slab.place(3)
    complaint = (
        f"corrupt: {key_of(3).hex()} (segment {int(path.stem[-6:])}, slot {offset // BLOCK}): "
        "wrong checksum"
    )
    assert slab.complaints("verify") == [complaint]
    found = slab.run("verify", exit_code=1)["verification"]
    assert (found["checked"], found["sealed"], len(found["corrupt"])) == (12, 11, 1)
    mended = slab.run("repair")
    assert mended["journal_rebuilt"]
    assert not mended["manifest_rebuilt"]
    assert mended["blocks"] == 11
    assert [bad["key"] for bad in mended["dropped"]] == [key_of(3).hex()]
    assert slab.run("verify")["verification"]["sealed"] == 11
    assert slab.served() == [i for i in range(12) if i != 3]


def test_repair_of_a_sound_store_changes_nothing(slab):
    before = slab.files()
    mended = slab.run("repair")
    assert slab.files() == before
    assert mended["blocks"] == 12
    assert not mended["journal_rebuilt"]


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
    for path in other.folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    tier.shutdown()
    other.close()
    assert slab.complaints("inspect") == [f"{kept} bytes of the journal are damaged"]
    mended = slab.run("repair")
    assert mended["journal_rebuilt"]
    assert mended["blocks"] == 6
    assert slab.run("inspect")["damaged_bytes"] == 0
    assert slab.served() == list(second_half)


def test_blocks_before_damage_are_suspect_until_repair_has_verified_them(slab):
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
    mended = slab.run("repair")
    assert mended["blocks"] == 15
    found = slab.run("inspect")
    assert (found["blocks"], found["suspect"]) == (15, 0)
    assert slab.served() == list(range(12))


def test_of_two_records_of_a_key_the_later_one_counts(slab):
    """As it is when the removal of the first was damaged."""
    path, offset = slab.place(3)
    contents = read_contents(FileOps(), slab.store)
    free = max(places_of(contents.live)) + 1
    with (slab.folder / segment_name(segment_of(free))).open("r+b") as file:
        file.seek(slot_of(free) * BLOCK)
        file.write(path.read_bytes()[offset : offset + BLOCK])
    digest = BlockDigester(contents.manifest.layout).digest(key_of(3), slab.truth[3].data)
    puts = put_records([key_of(3)], free, [digest])
    seed = seed_of(contents.manifest.layout)
    with slab.journal.open("ab") as file:
        file.write(frame(contents.scanned.generation + 1, puts, seed))
    slab.flip(2)
    assert slab.run("repair")["blocks"] == 11
    assert slab.place(3)[1] == slot_of(free) * BLOCK
    assert slab.served() == [i for i in range(12) if i != 2]


def test_a_torn_tail_is_no_problem_and_is_cut_by_repair(slab):
    with slab.journal.open("ab") as file:
        file.write(b"KVSLABF1" + bytes(60))
    assert slab.run("inspect")["torn_bytes"] == 68
    assert slab.run("repair")["journal_rebuilt"]
    assert slab.run("inspect")["torn_bytes"] == 0
    assert slab.served() == list(range(12))


def test_without_a_journal_nothing_can_be_kept_and_repair_says_so(slab):
    slab.journal.unlink()
    assert slab.complaints("inspect") == [
        "the journal is missing: nothing says which blocks these are"
    ]
    mended = slab.run("repair")
    assert mended["blocks"] == 0
    assert mended["journal_rebuilt"]
    assert slab.served() == []


def test_a_shortened_segment_loses_only_what_was_behind_its_end(slab):
    path, _ = slab.place(0)
    os.truncate(path, 3 * BLOCK + 1)
    slab.run("repair")
    found = slab.run("verify")
    assert found["verification"]["sealed"] == found["blocks"] == 7
    assert len(slab.served()) == 7


def test_a_segment_that_cannot_be_read_is_said_and_its_blocks_are_dropped(slab, monkeypatch):
    class Deaf(FileOps):
        def pread_into(self, fd, buffer, offset):
            if Path(f"/proc/self/fd/{fd}").readlink().name == segment_name(0):
                raise OSError(5, "Input/output error")
            return super().pread_into(fd, buffer, offset)

    monkeypatch.setattr("kvoffload_async.cli.store.command.FileOps", Deaf)
    assert all("unreadable: " in line for line in slab.complaints("verify"))
    assert len(slab.complaints("gc", "--corrupt")) == 8
    assert slab.run("repair")["blocks"] == 4
    monkeypatch.undo()
    assert len(slab.served()) == 4


# -- a lost manifest --------------------------------------------------------------------------


def broken_text(path):
    path.write_bytes(path.read_bytes().replace(b"{", b"[", 1))


def broken_checksum(path):
    path.write_bytes(path.read_bytes().replace(b'"rank": 0', b'"rank": 7'))


def broken_layout(path):
    path.write_bytes(path.read_bytes().replace(b'"layout": "', b'"layout": "z'))


@pytest.mark.parametrize("damage", [broken_text, broken_checksum, broken_layout])
def test_a_damaged_manifest_is_rebuilt_from_what_the_journal_confirms(slab, damage):
    before = Manifest.decode(slab.manifest.read_bytes())
    damage(slab.manifest)
    assert "the manifest is unreadable" in slab.complaints("inspect")[0]
    assert "see repair" in slab.complaints("gc")[0]
    mended = slab.run("repair")
    assert mended["manifest_rebuilt"]
    assert mended["blocks"] == 12
    after = Manifest.decode(slab.manifest.read_bytes())
    assert after.layout == before.layout
    assert (after.block_bytes, after.slot_bytes, after.rank) == (BLOCK, BLOCK, 0)
    assert slab.served() == list(range(12))


def test_a_lost_manifest_cannot_be_guessed_but_given(slab):
    backup = slab.command.directory / "backup.json"
    slab.manifest.rename(backup)
    before = slab.files()
    (complaint,) = slab.complaints("repair")
    assert "the manifest is missing" in complaint
    assert "give --manifest" in complaint
    assert slab.files() == before
    assert slab.run("repair", "--manifest", backup)["manifest_rebuilt"]
    assert slab.served() == list(range(12))


def test_a_lost_manifest_is_taken_from_the_store_of_another_rank(slab):
    other = Slab(slab.command)
    other.store_blocks(rank=1)
    other.close()
    slab.manifest.unlink()
    result = slab.command.run("store", "repair", slab.root, "--json")
    assert result.exit_code == 0, result.output
    mended = {store["name"]: store for store in json.loads(result.stdout)["slab_stores"]}
    assert mended["m_r0"]["manifest_rebuilt"]
    assert not mended["m_r1"]["manifest_rebuilt"]
    assert slab.served() == list(range(12))


def test_a_lost_manifest_of_a_namespace_of_its_own_is_in_the_folders_name(slab):
    tier = slab.open(on_mismatch="new_namespace", run_config={"model_name": "m", "other": 1})
    slab.rows[:] = slab.truth
    assert slab.job(tier, range(5)).success
    tier.shutdown()
    (own,) = slab.root.glob("m_r0_*")
    (own / MANIFEST).unlink()
    result = slab.command.run("store", "repair", own, "--json")
    (mended,) = json.loads(result.stdout)["slab_stores"]
    assert mended["manifest_rebuilt"]
    assert mended["blocks"] == 5


def test_a_manifest_of_another_layout_is_not_believed(slab):
    other = Slab(slab.command, "other")
    other.store_blocks(run_config={"model_name": "m", "else": 2})
    other.close()
    slab.manifest.unlink()
    result = slab.command.run(
        *("store", "repair", slab.root, "--manifest", slab.command.directory / "other/m_r0"),
    )
    assert result.exit_code == 2
    result = slab.command.run(
        *("store", "repair", slab.root),
        *("--manifest", slab.command.directory / "other" / "m_r0" / MANIFEST),
    )
    assert result.exit_code == 1
    assert "nothing says what its blocks are" in result.stderr
    assert not slab.manifest.exists()


def test_a_manifest_of_a_newer_release_is_left_alone(slab):
    manifest = Manifest.decode(slab.manifest.read_bytes())
    newer = Manifest(BLOCK, BLOCK, 0, manifest.layout, manifest.fields, version=2)
    slab.manifest.write_bytes(newer.encode())
    before = slab.files()
    (complaint,) = slab.complaints("repair")
    assert "it has version 2" in complaint
    assert slab.files() == before


def test_a_file_that_is_no_manifest_is_refused(slab):
    path = slab.command.file("{}", "no.json")
    assert f"--manifest {path}: it is no manifest" in slab.command.refusal(
        "store", "repair", slab.root, "--manifest", path
    )


# -- gc -----------------------------------------------------------------------------------------


def test_gc_removes_what_killed_writers_left_and_strangers_only_when_asked_and_old(slab):
    (slab.folder / "journal.tmp").write_bytes(bytes(5000))
    stranger = slab.folder / "notes.txt"
    stranger.write_bytes(bytes(5000))
    assert slab.complaints("inspect") == ["1 files that a killed writer has left"]
    assert slab.complaints("gc", "--dry-run") == ["left by a killed writer: journal.tmp"]
    assert (slab.folder / "journal.tmp").exists()
    mended = slab.run("gc", "--strangers")
    assert (mended["temps"], mended["strangers"]) == (["journal.tmp"], [])
    assert mended["freed_bytes"] >= 5000
    assert slab.run("inspect")["strangers"] == ["notes.txt"]
    assert slab.run("gc", "--strangers", "--older-than", "0")["strangers"] == ["notes.txt"]
    assert not stranger.exists()
    assert slab.served() == list(range(12))


def test_gc_drops_corrupt_blocks_only_when_asked(slab):
    slab.flip(5)
    assert slab.run("gc")["dropped"] == []
    assert slab.complaints("gc", "--corrupt", "--dry-run")[0].startswith("corrupt: ")
    assert slab.run("inspect")["blocks"] == 12
    assert slab.run("gc", "--corrupt")["blocks"] == 11
    assert slab.served() == [i for i in range(12) if i != 5]


def test_gc_keeps_what_cannot_be_read_just_now(slab, monkeypatch):
    (path, _), (other, _) = slab.place(0), slab.place(11)
    assert path != other

    class Deaf(FileOps):
        def pread_into(self, fd, buffer, offset):
            if Path(f"/proc/self/fd/{fd}").readlink().name == other.name:
                raise OSError(5, "Input/output error")
            return super().pread_into(fd, buffer, offset)

    slab.flip(0)
    monkeypatch.setattr("kvoffload_async.cli.store.command.FileOps", Deaf)
    assert slab.run("gc", "--corrupt", exit_code=1)["blocks"] == 11
    monkeypatch.undo()
    assert slab.served() == list(range(1, 12))


def test_a_dry_run_may_look_at_a_store_in_use(slab):
    tier = slab.open()
    assert slab.run("gc", "--corrupt", "--dry-run")["blocks"] == 12
    tier.shutdown()


# -- whatever happens ---------------------------------------------------------------------------


def test_a_repair_that_cannot_write_leaves_what_it_found(slab, monkeypatch):
    class Full(FileOps):
        def fdatasync(self, fd):
            raise OSError(28, "No space left on device")

    slab.flip(3)
    before = slab.files()
    monkeypatch.setattr("kvoffload_async.cli.store.command.FileOps", Full)
    assert slab.complaints("repair") == ["cannot be written: No space left on device"]
    assert {k: v for k, v in slab.files().items() if k != "journal.tmp"} == before
    monkeypatch.undo()
    assert slab.served() == [i for i in range(12) if i != 3]


@settings(
    max_examples=settings().max_examples // 10,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # a directory an example
)
@given(data=st.data())
def test_repair_keeps_exactly_what_verifies_whatever_is_damaged(command, data):
    slab = Slab(command, f"root{next(_numbers)}")
    slab.store_blocks()
    names = [JOURNAL, segment_name(0), segment_name(1)]
    for _ in range(data.draw(st.integers(1, 4))):
        path = slab.folder / data.draw(st.sampled_from(names))
        flip(path, data.draw(st.integers(0, path.stat().st_size - 1)))
    contents = read_contents(FileOps(), slab.store)
    sound = {
        key
        for key, place in zip(keys_of(contents.live), places_of(contents.live), strict=True)
        if _is_sound(slab, key, place)
    }
    assert slab.run("repair")["blocks"] == len(sound)
    assert {key_of(number) for number in slab.served()} == sound
    assert slab.run("verify")["problems"] == []
    slab.close()


def _is_sound(slab, key, place):
    data = (slab.folder / segment_name(segment_of(place))).read_bytes()
    offset = slot_of(place) * BLOCK
    number = next(i for i in range(NUM_BLOCKS) if key_of(i) == key)
    return data[offset : offset + BLOCK] == slab.truth[number].tobytes()
