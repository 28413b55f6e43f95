"""What a `slab` tier does with its files: how many calls, what it evicts, what survives."""

import asyncio
import errno
import os
import subprocess
import sys

import pytest
from slab.shelves import BLOCK, FIXED, KIB, Shelves, entered, flip, sound

from kvoffload_async.abc.events import BlocksEvicted
from kvoffload_async.errors import (
    BlockMissingError,
    ConfigError,
    CorruptBlockError,
    TierClosedError,
    TierFullError,
    TierUnavailableError,
)
from kvoffload_async.testing.fileops import FaultyFileOps, is_direct
from kvoffload_async.testing.harness import key_of, make_job
from kvoffload_async.tiers.slab.layout import JOURNAL, segment_name
from kvoffload_async.tiers.slab.records import RECORD_BYTES
from kvoffload_async.types import LookupResult, OffloadKey, ReqContext

K = [key_of(number) for number in range(80)]


def is_segment(call) -> bool:
    return "segment-" in call.path


def is_journal(call) -> bool:
    return f"/{JOURNAL}" in call.path


# -- few calls ------------------------------------------------------------------------------------


def test_a_job_is_one_write_of_its_blocks_and_one_append(shelves):
    ops = FaultyFileOps()
    with shelves.open(ops) as harness:
        harness.store(K[:1])
        before = len(ops.calls)
        assert harness.store(K[1:9]) == {}
        assert ops.counts(before) == {"pwritev": 1, "pwrite": 1}
        before = len(ops.calls)
        assert harness.load(K[:9], range(20, 29)) == {}
        assert ops.counts(before) == {"preadv": 1}


def test_rows_and_slots_in_any_order_are_joined_where_they_are_neighbours(shelves):
    ops = FaultyFileOps()
    with shelves.open(ops) as harness:
        harness.store(K[:8], [9, 8, 3, 4, 5, 30, 20, 21])
        before = len(ops.calls)
        slot_of = {7: 40, 0: 3, 3: 7, 2: 6, 1: 5}
        assert harness.load([K[i] for i in slot_of], slot_of.values()) == {}
        assert ops.counts(before) == {"preadv": 2}
        assert all(harness.holds(K[i], slot) for i, slot in slot_of.items())


def test_present_blocks_cost_no_call(shelves):
    ops = FaultyFileOps()
    with shelves.open(ops) as harness:
        harness.store(K[:5])
        before = len(ops.calls)
        assert harness.store(K[:5]) == {}
        assert not ops.calls[before:]


def test_a_large_job_is_cut_into_pieces_for_several_threads(shelves):
    ops = FaultyFileOps()
    with shelves.open(ops, piece_bytes=2 * BLOCK, segment_bytes=512 * KIB) as harness:
        harness.store(K[:20])
        assert ops.counts()["pwritev"] == 10
        hang = ops.hang(on="preadv", times=1)

        async def load():
            task = asyncio.create_task(
                harness.tier.load(make_job(900, K[:20], range(20, 40), is_promotion=True))
            )
            await entered(hang)
            while ops.counts()["preadv"] < 10:  # noqa: ASYNC110 - counted by other threads
                await asyncio.sleep(0)  # the others do the rest
            hang.release()
            return await task

        assert harness.run(load()) == {}
        assert all(harness.holds(K[i], 20 + i) for i in range(20))


def test_more_buffers_than_one_call_takes_are_several_calls(tmp_path):
    shelves = Shelves(tmp_path, block_bytes=512)
    ops = FaultyFileOps()
    options = {"capacity_bytes": 8192 * KIB, "segment_bytes": 8192 * KIB, "piece_bytes": 8192 * KIB}
    with shelves.open(ops, num_slots=700, **options) as harness:
        keys = [key_of(number) for number in range(700)]
        assert harness.store(keys) == {}
        assert ops.counts()["pwritev"] == 2
        assert harness.load(keys) == {}
        assert all(harness.holds(key, slot) for slot, key in enumerate(keys))


def test_calls_that_move_less_than_asked_are_continued(shelves):
    ops = FaultyFileOps()
    ops.shorten(1000, on="pwritev")
    ops.shorten(1500, on="preadv")
    ops.shorten(100, on="pwrite")
    with shelves.open(ops) as harness:
        assert harness.store(K[:6], [4, 5, 9, 1, 2, 3]) == {}
        assert harness.load(K[:6], range(20, 26)) == {}
        assert all(harness.holds(K[i], 20 + i) for i in range(6))
    with shelves.open() as harness:
        assert harness.announced() == set(K[:6])


# -- the capacity, and who goes -------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_the_least_recent_block_goes_and_its_owner_learns_it(shelves, policy):
    with shelves.open(policy=policy, capacity_bytes=FIXED + 16 * BLOCK) as harness:
        tier = harness.tier
        number = 0
        while not any(isinstance(e, BlocksEvicted) for e in harness.events):
            assert harness.store([K[number]]) == {}
            number += 1
        total = number - 1
        assert harness.contains(K) == set(K[1:number])
        assert harness.announced() & {K[0]} == set()
        harness.load([K[1]])
        tier.touch([K[2]])
        assert harness.store(K[40:42]) == {}
        assert harness.contains(K[:5]) == {K[1], K[2]}
        assert len(tier._store.catalog) == total
        sound(tier)


def test_the_capacity_is_never_exceeded_and_nearly_used(shelves):
    capacity = 2048 * KIB
    with shelves.open(capacity_bytes=capacity, segment_bytes=200 * KIB) as harness:
        largest = 0
        for first in range(0, 1200, 24):
            keys = [key_of(1000 + first + i) for i in range(24)]
            assert harness.store(keys) == {}
            largest = max(largest, shelves.disk_bytes())
            assert shelves.disk_bytes() <= capacity
        assert len(harness.tier._store.catalog) * BLOCK > 0.85 * capacity
        sound(harness.tier)
    assert shelves.disk_bytes() <= capacity
    with shelves.open(capacity_bytes=capacity, segment_bytes=200 * KIB) as harness:
        assert harness.load(keys) == {}
        assert shelves.disk_bytes() <= capacity


class MeasuringFileOps(FaultyFileOps):
    """Measures the disk whenever a new journal lies beside the old one."""

    def __init__(self, shelves: Shelves) -> None:
        super().__init__()
        self._shelves = shelves
        self.sizes: list[int] = []

    def rename(self, source: str, target: str) -> None:
        self.sizes.append(self._shelves.disk_bytes())
        super().rename(source, target)


def test_the_capacity_has_room_for_the_old_journal_and_the_new(shelves):
    capacity = 6 << 20
    ops = MeasuringFileOps(shelves)
    options = {"capacity_bytes": capacity, "segment_bytes": 2 << 20}
    with shelves.open(ops, num_slots=100, **options) as harness:
        keys = [key_of(number) for number in range(4000)]
        harness.fill(keys[:100], range(100))
        for first in range(0, 4000, 100):
            job = make_job(first, keys[first : first + 100], range(100), is_promotion=False)
            assert harness.run(harness.tier.store(job)) == {}
        sound(harness.tier)
    assert len(ops.sizes) > 4
    assert 0.97 * capacity < max(ops.sizes) <= capacity


def test_a_job_larger_than_the_store_keeps_its_head(shelves):
    with shelves.open(capacity_bytes=FIXED + 16 * BLOCK) as harness:
        failures = harness.store(K[:60])
        kept = 60 - len(failures)
        assert sorted(failures) == list(range(kept, 60))
        assert all(isinstance(error, TierFullError) for error in failures.values())
        assert harness.contains(K) == set(K[:kept])
        assert harness.load(K[:kept]) == {}
        sound(harness.tier)


def test_a_block_that_is_being_loaded_or_is_part_of_the_job_is_not_evicted(shelves):
    ops = FaultyFileOps()
    with shelves.open(ops, capacity_bytes=FIXED + 16 * BLOCK) as harness:
        failures = harness.store(K[:60])
        count = 60 - len(failures)
        oldest = K[count - 1]  # tails go first
        hang = ops.hang(on="preadv", times=1)

        async def both():
            load = asyncio.create_task(
                harness.tier.load(make_job(900, [oldest], [60], is_promotion=True))
            )
            await entered(hang)
            keys = [K[1], *K[60 : 60 + count]]
            stored = await harness.tier.store(
                make_job(901, keys, range(len(keys)), is_promotion=False)
            )
            hang.release()
            return await load, stored

        harness.fill([K[1], *K[60 : 60 + count]], range(count + 1))
        loaded, stored = harness.run(both())
        assert loaded == {}
        assert harness.holds(oldest, 60)
        assert len(stored) == 2, "two blocks could not go"
        assert harness.contains([oldest, K[1]]) == {oldest, K[1]}
        sound(harness.tier)


def test_a_smaller_capacity_gives_segments_back_and_a_larger_one_adds_some(shelves):
    with shelves.open(capacity_bytes=1024 * KIB) as harness:
        for first in range(0, 80, 40):
            harness.store(K[first : first + 40])
        before = harness.contains(K)
    with shelves.open(capacity_bytes=300 * KIB) as harness:
        assert shelves.disk_bytes() <= 300 * KIB
        left = harness.announced()
        assert set() < left < before
        assert harness.load(sorted(left)) == {}
        sound(harness.tier)
        assert harness.store(K[:50:2]) == {}
        assert shelves.disk_bytes() <= 300 * KIB
    with shelves.open(capacity_bytes=2048 * KIB) as harness:
        assert harness.store(K[:60]) == {}
        assert harness.contains(K[:60]) == set(K[:60])
        sound(harness.tier)


def test_segments_of_another_size_are_used_as_they_are(shelves):
    with shelves.open(segment_bytes=64 * KIB) as harness:
        harness.store(K[:20])
    with shelves.open(segment_bytes=256 * KIB) as harness:
        assert harness.load(K[:20]) == {}
        assert harness.store(K[20:80]) == {}
        assert harness.load(K[20:80]) == {}
        assert set(harness.tier._store.catalog.segments.values()) == {16, 64}


# -- restart --------------------------------------------------------------------------------------


def test_what_was_used_last_is_evicted_last_also_after_a_restart(shelves):
    options = {"capacity_bytes": FIXED + 16 * BLOCK}
    with shelves.open(**options) as harness:
        count = 60 - len(harness.store(K[:60]))
        harness.load(K[2:5])
        order = list(harness.tier._store.catalog._policy.resident())
        assert set(order[-3:]) == set(K[2:5])
    assert set(list(shelves.places())[-3:]) == set(K[2:5])
    with shelves.open(**options) as harness:
        assert harness.store(K[60 : 60 + count - 3]) == {}
        assert harness.contains(K[:60]) == set(K[2:5])


def test_an_untouched_store_is_closed_without_a_write(shelves):
    with shelves.open() as harness:
        harness.store(K[:5])
    ops = FaultyFileOps()
    with shelves.open(ops) as harness:
        assert harness.announced() == set(K[:5])
    assert ops.counts()["pwrite"] == 1, "the lock's holder"
    assert not ops.counts()["rename"]
    assert not ops.open_fds


def test_a_torn_tail_is_cut_off(shelves):
    with shelves.open() as harness:
        harness.store(K[:5])
    whole = shelves.journal.read_bytes()
    shelves.journal.write_bytes(whole + whole[: 2 * RECORD_BYTES + 50])
    ops = FaultyFileOps()
    with shelves.open(ops) as harness:
        assert harness.announced() == set(K[:5])
        assert shelves.journal.read_bytes() == whole


def test_the_journal_is_written_anew_before_it_is_too_long(shelves):
    ops = FaultyFileOps()
    with shelves.open(ops, capacity_bytes=FIXED + 16 * BLOCK) as harness:
        for number in range(200):
            assert harness.store([key_of(5000 + number)]) == {}
            budget = harness.tier._room._budget
            assert shelves.journal.stat().st_size <= (budget.tail_units + 40) * RECORD_BYTES
        sound(harness.tier)
        kept = harness.contains([key_of(5000 + number) for number in range(200)])
        assert set(shelves.places()) == kept
    assert ops.counts()["rename"] > 4


def test_a_key_that_is_too_long_for_a_record_fails_alone(shelves):
    long = OffloadKey(bytes(97))
    with shelves.open() as harness:
        harness.fill([long, K[0]], [0, 1])
        failures = harness.store([long, K[0]])
        assert list(failures) == [0]
        assert isinstance(failures[0], TierUnavailableError)
        assert "97 bytes" in str(failures[0])
        assert harness.load([K[0]]) == {}


# -- who else is there, and other layouts ---------------------------------------------------------


def test_a_second_tier_on_the_store_is_refused_and_the_first_goes_on(shelves):
    with shelves.open() as harness:
        harness.store(K[:3])
        with pytest.raises(ConfigError, match=rf"in use by process {os.getpid()}; end that"):
            shelves.open()
        assert harness.store(K[3:6]) == {}
        assert harness.load(K[:6]) == {}
    with shelves.open() as harness:
        assert harness.announced() == set(K[:6])


def test_a_second_process_on_the_store_is_refused(shelves):
    script = (
        "import sys\n"
        "from slab.shelves import Shelves\n"
        "from pathlib import Path\n"
        "try:\n"
        "    Shelves(Path(sys.argv[1])).open()\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    with shelves.open() as harness:
        harness.store(K[:3])
        said = subprocess.run(
            [sys.executable, "-c", script, str(shelves.root)],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            timeout=60,
            check=True,
        )
        assert f"in use by process {os.getpid()}" in said.stdout
        assert harness.load(K[:3]) == {}


@pytest.mark.parametrize(
    ("fields", "block", "difference"),
    [
        ({"model_name": "m/x", "dtype": "fp8"}, BLOCK, "another dtype"),
        ({"model_name": "m_x"}, BLOCK, "another model_name"),
        (None, 2 * BLOCK, "blocks of 4096 bytes instead of 8192"),
    ],
)
def test_a_store_of_another_layout_is_refused_or_left_alone_beside_a_new_one(
    shelves, fields, block, difference
):
    with shelves.open() as harness:
        harness.store(K[:3])
    other = Shelves(shelves.root, block_bytes=block)
    with pytest.raises(ConfigError) as raised:
        other.open(fields=fields)
    message = str(raised.value)
    assert "root_dir" in message
    assert str(shelves.folder) in message
    assert difference in message
    assert 'on_mismatch="new_namespace"' in message
    for _ in range(2):
        with other.open(fields=fields, on_mismatch="new_namespace") as harness:
            assert not harness.announced() & set(K[:3])
            assert harness.store(K[5:8]) == {}
    with shelves.open(on_mismatch="new_namespace") as harness:
        assert harness.announced() == set(K[:3])
    assert len(list(shelves.root.iterdir())) == 2


@pytest.mark.parametrize(
    "model", ["../../x", "..", "/etc/passwd", "a\0b", "\udce4" * 300, "x" * 900]
)
def test_a_hostile_name_stays_below_the_directory(tmp_path, model):
    shelves = Shelves(tmp_path / "a" / "root")
    for on_mismatch in ("fail", "new_namespace"):
        with shelves.open(fields={"model_name": model}, on_mismatch=on_mismatch) as harness:
            assert harness.store(K[:2]) == {}
    assert {p.name for p in tmp_path.iterdir()} == {"a"}
    assert {p.name for p in (tmp_path / "a").iterdir()} == {"root"}
    assert all(p.is_dir() for p in shelves.root.iterdir())


# -- bypassing the page cache, waiting for the device ---------------------------------------------


@pytest.mark.parametrize("block", [BLOCK, 5000])
def test_direct_io_moves_the_same_bytes(tmp_path, block):
    shelves = Shelves(tmp_path, block_bytes=block)
    ops = FaultyFileOps()
    with shelves.open(ops, direct_io=True) as harness:
        assert harness.store(K[:7], [9, 8, 3, 4, 5, 30, 20]) == {}
        assert harness.load(K[:7], range(40, 47)) == {}
        assert all(harness.holds(K[i], 40 + i) for i in range(7))
        moves = [call for call in ops.calls if call.name in {"pwritev", "preadv"}]
        assert (
            all(is_direct(call) for call in moves)
            or not harness.tier._store.shelf.segments._direct.flag
        )
    with shelves.open() as harness:
        assert harness.load(K[:7]) == {}


@pytest.mark.parametrize("on", ["open", "pwritev", "preadv"])
def test_direct_io_that_does_not_work_is_given_up_with_one_warning(shelves, caplog, on):
    ops = FaultyFileOps()
    ops.fail(errno.EINVAL, on=on, when=is_direct)
    with shelves.open(ops, direct_io=True) as harness:
        assert harness.store(K[:20]) == {}
        assert harness.load(K[:20]) == {}
    assert [r for r in caplog.messages if "direct I/O does not work" in r] == [
        r for r in caplog.messages if "direct I/O" in r
    ][:1]
    assert not ops.open_fds


def test_with_fdatasync_blocks_are_on_the_device_before_they_are_journalled(shelves):
    ops = FaultyFileOps()
    with shelves.open(ops, fdatasync=True) as harness:
        before = len(ops.calls)
        assert harness.store(K[:20]) == {}
        names = [(c.name, is_segment(c)) for c in ops.calls[before:] if c.name != "open"]
        assert names.index(("fdatasync", True)) > names.index(("pwritev", True))
        assert names.index(("pwrite", False)) > names.index(("fdatasync", True))
        assert names[-1] == ("fdatasync", False)


# -- verifying ------------------------------------------------------------------------------------


def test_a_damaged_block_is_gone_for_good_and_can_be_stored_again(shelves):
    with shelves.open() as harness:
        harness.store(K[:4])
        shelves.damage(K[2])
        failures = harness.load(K[:4])
        assert list(failures) == [2]
        assert isinstance(failures[2], CorruptBlockError)
        assert set(shelves.places()) == {K[0], K[1], K[3]}, "its removal is journalled"
        assert isinstance(harness.load([K[2]])[0], BlockMissingError)
        assert harness.store([K[2]]) == {}
        assert harness.load(K[:4], range(30, 34)) == {}
        sound(harness.tier)


def test_a_removal_that_cannot_be_journalled_now_is_journalled_later(shelves, caplog):
    ops = FaultyFileOps()
    with shelves.open(ops) as harness:
        harness.store(K[:3])
        shelves.damage(K[1])
        ops.fail(errno.EIO, on="pwrite", when=is_journal)
        assert isinstance(harness.load(K[1:2])[0], CorruptBlockError)
        assert "removal is not journalled yet" in caplog.text
        assert set(shelves.places()) == set(K[:3])
        ops.heal()
        assert harness.store(K[5:6]) == {}
        assert set(shelves.places()) == {K[0], K[2], K[5]}
        sound(harness.tier)


def test_a_damaged_journal_that_cannot_be_written_anew_is_worked_with(shelves, caplog):
    with shelves.open() as harness:
        for number in range(6):
            harness.store([K[number]])
        content = shelves.journal.read_bytes()
    shelves.journal.write_bytes(content)
    flip(shelves.journal, len(content) - 3 * RECORD_BYTES)
    ops = FaultyFileOps()
    ops.fail(errno.ENOSPC, on="open", when=lambda call: call.path.endswith("journal.tmp"))
    with shelves.open(ops) as harness:
        assert "cannot be written anew yet" in caplog.text
        assert harness.announced() == {K[i] for i in (0, 1, 2, 3, 5)}
        assert harness.store(K[10:14]) == {}
        sound(harness.tier)
    with shelves.open() as harness:
        assert harness.announced() == {K[i] for i in (0, 1, 2, 3, 5, 10, 11, 12, 13)}


def test_the_owner_learns_that_a_block_is_damaged(shelves):
    with shelves.manage() as harness:
        harness.submit_store(K[:2], [0, 1])
        harness.wait()
        shelves.damage(K[1])
        job = harness.submit_load(K[:2], [5, 6])
        harness.wait()
        assert harness.result_of(job).successful_keys == {K[0]}
        context = ReqContext("r")
        assert harness.manager.lookup(K[0], context) is LookupResult.HIT
        assert harness.manager.lookup(K[1], context) is LookupResult.MISS


def test_the_right_bytes_in_anothers_slot_do_not_verify(shelves):
    with shelves.open() as harness:
        harness.store(K[:2])
        path = shelves.folder / segment_name(0)
        content = path.read_bytes()
        with path.open("r+b") as file:
            file.write(content[BLOCK : 2 * BLOCK] + content[:BLOCK])
        assert {type(e) for e in harness.load(K[:2]).values()} == {CorruptBlockError}


def test_two_loads_of_a_damaged_block_both_fail_and_its_slot_is_used_again(shelves):
    ops = FaultyFileOps()
    with shelves.open(ops) as harness:
        harness.store(K[:2])
        shelves.damage(K[0])
        hang = ops.hang(on="preadv", times=1)

        async def both():
            jobs = [make_job(900 + i, [K[0]], [20 + i], is_promotion=True) for i in range(2)]
            first = asyncio.create_task(harness.tier.load(jobs[0]))
            await entered(hang)
            second = await harness.tier.load(jobs[1])
            catalog = harness.tier._store.catalog
            assert catalog._doomed == catalog._pins.keys(), "its slot waits for the other load"
            assert catalog.num_evictable == 1
            hang.release()
            return await first, second

        for failures in harness.run(both()):
            assert isinstance(failures[0], CorruptBlockError)
        sound(harness.tier)


def test_a_segment_that_was_cut_short_costs_the_blocks_behind_the_cut(shelves):
    with shelves.open() as harness:
        harness.store(K[:16])
        os.truncate(shelves.folder / segment_name(0), 5 * BLOCK + 100)
        failures = harness.load(K[:16])
        assert sorted(failures) == list(range(5, 16))
        assert {type(e) for e in failures.values()} == {CorruptBlockError}
        sound(harness.tier)


@pytest.mark.parametrize("direct_io", [False, True])
def test_a_large_block_that_ends_early_or_cannot_be_read_fails_alone(tmp_path, direct_io):
    shelves = Shelves(tmp_path, block_bytes=3 * BLOCK)
    ops = FaultyFileOps()
    options = {"direct_io": direct_io, "piece_bytes": BLOCK, "segment_bytes": 256 * KIB}
    with shelves.open(ops, **options) as harness:
        harness.store(K[:4])
        ops.fail(errno.EIO, on="preadv", times=1)
        (error,) = harness.load(K[:1]).values()
        assert isinstance(error, TierUnavailableError)
        os.truncate(shelves.folder / segment_name(0), 10 * BLOCK)
        failures = harness.load(K[:4])
        assert list(failures) == [3]
        assert isinstance(failures[3], CorruptBlockError)
        assert "ends early" in str(failures[3])
        sound(harness.tier)


def test_without_verification_no_checksum_is_computed_and_none_served_later(shelves):
    with shelves.open(verify=False) as harness:
        harness.store(K[:4])
        shelves.damage(K[1])
        assert harness.load(K[:4]) == {}, "nobody looks"
    with shelves.open(verify=False) as harness:
        assert harness.announced() == set(K[:4])
    with shelves.open() as harness:
        assert not harness.announced(), "they have no checksum"
        assert harness.store(K[:2]) == {}
        assert set(shelves.places()) == set(K[:2])
    with shelves.open(verify=False) as harness:
        assert harness.announced() == set(K[:2])
        assert harness.load(K[:2]) == {}


# -- errors ---------------------------------------------------------------------------------------


def test_a_block_that_cannot_be_read_fails_alone_and_stays(shelves):
    ops = FaultyFileOps()
    with shelves.open(ops) as harness:
        harness.store(K[:4])
        ops.fail(errno.EIO, on="preadv", times=3)  # the joined call, and the first two alone
        failures = harness.load(K[:4])
        assert sorted(failures) == [0, 1]
        assert {type(e) for e in failures.values()} == {TierUnavailableError}
        assert harness.load(K[:4]) == {}
        sound(harness.tier)


def test_a_block_that_cannot_be_written_fails_alone(shelves):
    ops = FaultyFileOps()
    with shelves.open(ops) as harness:
        ops.fail(errno.EIO, on="pwritev", times=2)
        failures = harness.store(K[:4])
        assert list(failures) == [0]
        assert harness.contains(K[:4]) == set(K[1:4])
        assert harness.load(K[1:4]) == {}
        sound(harness.tier)


def test_a_job_that_cannot_be_journalled_fails_and_leaves_nothing(shelves):
    ops = FaultyFileOps()
    with shelves.open(ops) as harness:
        harness.store(K[:2])
        ops.fail(errno.EIO, on="pwrite", when=is_journal)
        failures = harness.store(K[2:6])
        assert {type(e) for e in failures.values()} == {TierUnavailableError}
        assert len(failures) == 4
        assert harness.contains(K[:6]) == set(K[:2])
        ops.heal()
        assert harness.store(K[2:6]) == {}
        sound(harness.tier)
    with shelves.open() as harness:
        assert harness.announced() == set(K[:6])


def test_nothing_is_overwritten_before_the_removal_is_journalled(shelves):
    ops = FaultyFileOps()
    with shelves.open(ops, capacity_bytes=FIXED + 16 * BLOCK) as harness:
        count = 60 - len(harness.store(K[:60]))
        ops.fail(errno.EIO, on="pwrite", when=is_journal)
        before = len(ops.calls)
        failures = harness.store(K[60:62])
        assert len(failures) == 2
        assert not ops.counts(before)["pwritev"]
        ops.heal()
        before = len(ops.calls)
        assert harness.store(K[62:63]) == {}
        names = [call.name for call in ops.calls[before:]]
        assert names == ["pwrite", "pwritev", "pwrite"]
        assert len(harness.contains(K)) == count - 1
        sound(harness.tier)


def test_a_failed_append_that_cannot_be_cut_off_is_taken_back_by_the_next(shelves):
    """The frame may be whole on disk, and its slots are written to again: with `verify` off
    nothing else would tell."""
    ops = FaultyFileOps()
    with shelves.open(ops, verify=False, fdatasync=True) as harness:
        harness.store(K[:2])
        ops.fail(errno.EIO, on="fdatasync", when=is_journal)
        ops.fail(errno.EIO, on="truncate")
        assert len(harness.store(K[2:4])) == 2
        assert set(shelves.places()) == set(K[:4]), "what a crash would leave now"
        ops.heal()
        before = len(ops.calls)
        hang = ops.hang(on="pwritev", times=1)

        async def store():
            task = asyncio.create_task(
                harness.tier.store(make_job(900, K[4:6], [0, 1], is_promotion=False))
            )
            await entered(hang)
            assert set(shelves.places()) == set(K[:2]), "before the slots are written to"
            hang.release()
            return await task

        assert harness.run(store()) == {}
        assert ops.counts(before)["pwrite"] == 2


def test_a_cancelled_store_leaves_the_store_sound(shelves):
    ops = FaultyFileOps()
    with shelves.open(ops, piece_bytes=BLOCK, io_threads=2) as harness:
        hang = ops.hang(on="pwritev", times=1)

        async def cancel():
            task = asyncio.create_task(
                harness.tier.store(make_job(900, K[:6], range(6), is_promotion=False))
            )
            await entered(hang)
            task.cancel()
            await asyncio.sleep(0)
            hang.release()
            with pytest.raises(asyncio.CancelledError):
                await task

        harness.run(cancel())
        sound(harness.tier)
        present = harness.contains(K[:6])
        assert present in (set(), set(K[:6]))
        assert harness.announced() == present


def test_the_same_key_in_two_stores_is_written_once(shelves):
    ops = FaultyFileOps()
    with shelves.open(ops) as harness:
        hang = ops.hang(on="pwritev", times=1)

        async def both():
            jobs = [make_job(900 + i, K[i : i + 3], range(3), is_promotion=False) for i in range(2)]
            first = asyncio.create_task(harness.tier.store(jobs[0]))
            await entered(hang)
            second = asyncio.create_task(harness.tier.store(jobs[1]))
            await asyncio.sleep(0)
            hang.release()
            return await first, await second

        assert harness.run(both()) == ({}, {})
        assert ops.counts()["pwritev"] == 2
        assert harness.contains(K[:5]) == set(K[:4])
        sound(harness.tier)


def test_work_before_open_or_after_close_is_refused(shelves):
    tier = shelves.tier()
    job = make_job(1, K[:1], [0], is_promotion=False)
    for operation in (tier.store, tier.load):
        with pytest.raises(TierClosedError):
            asyncio.run(operation(job))
    tier.touch(K[:1])


@pytest.mark.parametrize("call", ["make_folders", "open", "lock", "pwrite", "rename", "walk"])
def test_a_directory_that_cannot_be_used_is_refused_and_nothing_is_left_open(shelves, call):
    ops = FaultyFileOps()
    ops.fail(errno.EACCES, on=call)
    with pytest.raises(ConfigError, match=r"root_dir: .* cannot be used .* may write"):
        shelves.open(ops)
    assert not ops.open_fds
    with shelves.open() as harness:
        assert harness.store(K[:1]) == {}


def test_closing_goes_on_when_the_journal_cannot_be_written(shelves, caplog):
    ops = FaultyFileOps()
    with shelves.open(ops) as harness:
        harness.store(K[:3])
        ops.fail(errno.ENOSPC, on="pwrite open")
    assert not ops.open_fds
    assert "could not be written at the end" in caplog.text
    with shelves.open() as harness:
        assert harness.announced() == set(K[:3])


# -- a manifest, a journal, segments that are gone or damaged -------------------------------------


def test_an_unreadable_manifest_is_refused_with_the_remedy(shelves):
    with shelves.open() as harness:
        harness.store(K[:2])
    flip(shelves.manifest, 12)
    with pytest.raises(ConfigError) as raised:
        shelves.open()
    assert f"`kvoffload store repair {shelves.folder}`" in str(raised.value)
    shelves.manifest.unlink()
    with pytest.raises(ConfigError, match="has lost its manifest; run `kvoffload store repair"):
        shelves.open()


def test_without_its_journal_a_store_is_empty_and_works(shelves):
    with shelves.open() as harness:
        harness.store(K[:20])
    shelves.journal.unlink()
    with shelves.open() as harness:
        assert not harness.announced()
        assert harness.store(K[10:30]) == {}
        sound(harness.tier)
        assert shelves.disk_bytes() <= 1024 * KIB


def test_without_a_segment_its_blocks_are_missing_and_its_number_is_not_used_again(shelves):
    with shelves.open() as harness:
        harness.store(K[:40])
        held = {key for key, place in shelves.places().items() if place >> 32 == 2}
    assert held
    (shelves.folder / segment_name(2)).unlink()
    with shelves.open() as harness:
        assert harness.announced() == set(K[:40]) - held
        assert harness.store(sorted(held)) == {}
        assert harness.load(sorted(held)) == {}
        assert not (shelves.folder / segment_name(2)).exists()
        sound(harness.tier)


def test_what_a_killed_writer_left_is_removed(shelves):
    with shelves.open() as harness:
        harness.store(K[:2])
    (shelves.folder / "journal.tmp").write_bytes(b"x" * 10_000)
    (shelves.folder / "manifest.json.tmp").write_bytes(b"x")
    (shelves.folder / segment_name(7)).write_bytes(b"")
    (shelves.folder / segment_name(8)).write_bytes(b"x" * 100)
    (shelves.folder / "stranger").mkdir()
    with shelves.open() as harness:
        assert harness.announced() == set(K[:2])
        names = {path.name for path in shelves.folder.iterdir()}
        assert names == {"journal", "lock", "manifest.json", segment_name(0), "stranger"}
        sound(harness.tier)


def test_a_journal_damaged_in_the_middle_costs_a_frame_and_trust(shelves, caplog):
    """One of the lost records may have been a removal: what is older is verified in any case."""
    with shelves.open(verify=False) as harness:
        harness.store(K[:2])
    with shelves.open() as harness:
        for number in range(10, 14):
            harness.store([K[number]])
        snapshot = (shelves.journal.stat().st_size // RECORD_BYTES) - 8
        content = shelves.journal.read_bytes()
    shelves.journal.write_bytes(content)
    flip(shelves.journal, (snapshot + 5) * RECORD_BYTES + 40)
    shelves.damage(K[10])
    with shelves.open(verify=False) as harness:
        assert "journal are damaged; blocks stored before are verified" in caplog.text
        assert harness.announced() == {K[10], K[11], K[13]}
        failures = harness.load([K[10], K[11], K[13]])
        assert list(failures) == [0]
        assert isinstance(failures[0], CorruptBlockError)
        assert harness.store(K[:4]) == {}
    caplog.clear()
    shelves.damage(K[11])
    with shelves.open(verify=False) as harness:
        assert not caplog.messages, "the journal was written anew"
        assert isinstance(harness.load([K[11]])[0], CorruptBlockError), "it is still suspect"
