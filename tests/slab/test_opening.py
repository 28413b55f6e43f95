"""Opening a store: what survives, who else is there, and what is gone or damaged."""

import asyncio
import os
import subprocess
import sys
import threading
from contextlib import closing
from types import SimpleNamespace

import pytest
from faulty_files import FaultyFileOps
from slab.stores import BLOCK, FIXED, KIB, K, SlabStore, flip, sound

from kvoffload_async.errors import (
    ConfigError,
    CorruptBlockError,
    TierTimeoutError,
    TierUnavailableError,
)
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.runtime.bridge import Bridge
from kvoffload_async.runtime.loop import LoopThread
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.slab.layout import journal_units, segment_name
from kvoffload_async.tiers.slab.records import RECORD_BYTES
from kvoffload_async.types import OffloadKey

# -- restart --------------------------------------------------------------------------------------


def test_what_was_used_last_is_evicted_last_also_after_a_restart(slab_store):
    options = {"capacity_bytes": FIXED + 16 * BLOCK}
    with slab_store.open(**options) as harness:
        count = 60 - len(harness.store(K[:60]))
        harness.load(K[2:5])
        order = list(harness.tier._store.catalog._ranking.resident())
        assert set(order[-3:]) == set(K[2:5])
    assert set(list(slab_store.addresses())[-3:]) == set(K[2:5])
    with slab_store.open(**options) as harness:
        assert harness.store(K[60 : 60 + count - 3]) == {}
        assert harness.contains(K[:60]) == set(K[2:5])


def test_an_untouched_store_is_closed_without_a_write(slab_store):
    with slab_store.open() as harness:
        harness.store(K[:5])
    ops = FaultyFileOps()
    with slab_store.open(ops) as harness:
        assert harness.announced() == set(K[:5])
    written = [call.path.rpartition("/")[2] for call in ops.calls if call.name == "pwrite"]
    assert written == ["lock", *["session"] * 3]
    assert not ops.counts()["rename"]
    assert not ops.open_fds


def test_a_torn_tail_is_cut_off(slab_store):
    with slab_store.open() as harness:
        harness.store(K[:5])
    whole = slab_store.journal.read_bytes()
    slab_store.journal.write_bytes(whole + whole[: 2 * RECORD_BYTES + 50])
    ops = FaultyFileOps()
    with slab_store.open(ops) as harness:
        assert harness.announced() == set(K[:5])
        assert slab_store.journal.read_bytes() == whole


def test_the_journal_is_written_anew_before_it_is_too_long(slab_store):
    ops = FaultyFileOps()
    with slab_store.open(ops, capacity_bytes=FIXED + 16 * BLOCK) as harness:
        for number in range(200):
            assert harness.store([key_of(5000 + number)]) == {}
            slots = sum(harness.tier._store.catalog.segments.values())
            assert slab_store.journal.stat().st_size <= journal_units(slots) * RECORD_BYTES
        sound(harness.tier)
        kept = harness.contains([key_of(5000 + number) for number in range(200)])
        assert set(slab_store.addresses()) == kept
    assert ops.counts()["rename"] > 4


def test_a_key_that_is_too_long_for_a_record_fails_alone(slab_store):
    long = OffloadKey(bytes(97))
    with slab_store.open() as harness:
        harness.fill([long, K[0]], [0, 1])
        failures = harness.store([long, K[0]])
        assert list(failures) == [0]
        assert isinstance(failures[0], TierUnavailableError)
        assert "97 bytes" in str(failures[0])
        assert harness.load([K[0]]) == {}


# -- who else is there, and other layouts ---------------------------------------------------------


def test_a_second_tier_on_the_store_is_refused_and_the_first_goes_on(slab_store):
    with slab_store.open() as harness:
        harness.store(K[:3])
        with pytest.raises(ConfigError, match="already opened by this process; close it"):
            slab_store.open()
        assert harness.store(K[3:6]) == {}
        assert harness.load(K[:6]) == {}
    with slab_store.open() as harness:
        assert harness.announced() == set(K[:6])


def test_a_second_process_on_the_store_is_refused(slab_store):
    script = (
        "import sys\n"
        "from slab.stores import SlabStore\n"
        "from pathlib import Path\n"
        "try:\n"
        "    SlabStore(Path(sys.argv[1])).open()\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    with slab_store.open() as harness:
        harness.store(K[:3])
        said = subprocess.run(
            [sys.executable, "-c", script, str(slab_store.root)],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            timeout=60,
            check=True,
        )
        assert f"already opened by process {os.getpid()}" in said.stdout
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
    slab_store, fields, block, difference
):
    with slab_store.open() as harness:
        harness.store(K[:3])
    other = SlabStore(slab_store.root, block_bytes=block)
    with pytest.raises(ConfigError) as raised:
        other.open(fields=fields)
    message = str(raised.value)
    assert "root_dir" in message
    assert str(slab_store.folder) in message
    assert difference in message
    assert 'on_mismatch="new_namespace"' in message
    assert '"replace" to discard those of the same model and namespace' in message
    for _ in range(2):
        with other.open(fields=fields, on_mismatch="new_namespace") as harness:
            assert not harness.announced() & set(K[:3])
            assert harness.store(K[5:8]) == {}
    with slab_store.open(on_mismatch="new_namespace") as harness:
        assert harness.announced() == set(K[:3])
    assert len(list(slab_store.root.iterdir())) == 2


@pytest.mark.parametrize(
    ("fields", "block", "difference"),
    [
        ({"model_name": "m/x", "fingerprint": "f"}, BLOCK, "another fingerprint"),
        (None, 2 * BLOCK, "blocks of 4096 bytes instead of 8192"),
    ],
)
def test_a_store_of_another_layout_is_emptied_if_that_is_asked_for(
    slab_store, caplog, fields, block, difference
):
    with slab_store.open() as harness:
        assert harness.store(K[:20]) == {}
        harness.load(K[:3])
    held = list(slab_store.folder.glob("segment-*"))
    assert len(held) > 1
    (slab_store.folder / "notes").write_bytes(b"somebody's")
    other = SlabStore(slab_store.root, block_bytes=block)
    ops = FaultyFileOps()
    with other.open(ops, fields=fields, on_mismatch="replace") as harness:
        assert not harness.announced()
        assert not harness.contains(K)
        assert not list(slab_store.folder.glob("segment-*"))
        assert harness.store(K[2:8]) == {}
        assert harness.load(K[2:8]) == {}
        assert all(harness.holds(key, slot) for slot, key in enumerate(K[2:8]))
        sound(harness.tier)
    assert not ops.open_fds
    (message,) = caplog.messages
    assert str(slab_store.folder) in message
    assert f"({difference}): all 20 of them, {20 * BLOCK} bytes, are discarded" in message
    caplog.clear()
    with other.open(fields=fields, on_mismatch="replace") as harness:
        assert harness.announced() == set(K[2:8])
    assert not caplog.messages, "nothing is discarded where nothing differs"
    with pytest.raises(ConfigError, match="contains incompatible blocks"):
        slab_store.open()
    assert (slab_store.folder / "notes").read_bytes() == b"somebody's"


def test_a_store_of_another_model_whose_folder_has_the_same_name_is_not_replaced(slab_store):
    with slab_store.open() as harness:
        harness.store(K[:3])
    with pytest.raises(ConfigError, match="another model_name"):
        slab_store.open(fields={"model_name": "m_x"}, on_mismatch="replace")
    with slab_store.open() as harness:
        assert harness.announced() == set(K[:3])


def test_a_store_that_is_in_use_is_not_replaced(slab_store):
    with slab_store.open() as harness:
        harness.store(K[:3])
        with pytest.raises(ConfigError, match="already opened by this process"):
            slab_store.open_other(on_mismatch="replace")
        assert harness.load(K[:3]) == {}
        assert harness.store(K[3:6]) == {}
    with slab_store.open() as harness:
        assert harness.announced() == set(K[:6])


def test_a_store_that_cannot_be_emptied_is_refused_and_serves_nobody_else(slab_store):
    with slab_store.open() as harness:
        harness.store(K[:20])
    for on in ("unlink", "rename"):
        ops = FaultyFileOps()
        ops.fail(13, on=on)
        with pytest.raises(ConfigError, match="root_dir"):
            slab_store.open_other(ops, on_mismatch="replace")
        assert not ops.open_fds
        with slab_store.open() as harness:
            assert harness.announced() == (set(K[:20]) if on == "unlink" else set())
    with slab_store.open_other(on_mismatch="replace") as harness:
        assert not harness.announced()
        assert harness.store(K[:3]) == {}


def test_what_cannot_be_told_apart_is_not_replaced(slab_store):
    with slab_store.open() as harness:
        harness.store(K[:3])
    flip(slab_store.manifest, 12)
    with pytest.raises(ConfigError, match="is unreadable"):
        slab_store.open_other(on_mismatch="replace")
    slab_store.manifest.unlink()
    with pytest.raises(ConfigError, match="has lost its manifest"):
        slab_store.open_other(on_mismatch="replace")
    assert slab_store.journal.exists()


@pytest.mark.parametrize(
    "model", ["../../x", "..", "/etc/passwd", "a\0b", "\udce4" * 300, "x" * 900]
)
def test_a_hostile_name_stays_below_the_directory(tmp_path, model):
    slab_store = SlabStore(tmp_path / "a" / "root")
    for on_mismatch in ("fail", "new_namespace"):
        with slab_store.open(fields={"model_name": model}, on_mismatch=on_mismatch) as harness:
            assert harness.store(K[:2]) == {}
    assert {p.name for p in tmp_path.iterdir()} == {"a"}
    assert {p.name for p in (tmp_path / "a").iterdir()} == {"root"}
    assert all(p.is_dir() for p in slab_store.root.iterdir())


# -- a manifest, a journal, segments that are gone or damaged -------------------------------------


def test_an_unreadable_manifest_is_refused_with_the_remedy(slab_store):
    with slab_store.open() as harness:
        harness.store(K[:2])
    flip(slab_store.manifest, 12)
    with pytest.raises(ConfigError) as raised:
        slab_store.open()
    assert f"{str(slab_store.folder)!r} is unreadable: " in str(raised.value)
    assert "; remove that folder, or give another directory" in str(raised.value)
    slab_store.manifest.unlink()
    with pytest.raises(ConfigError, match="has lost its manifest; remove that folder"):
        slab_store.open()


def test_without_its_journal_a_store_is_empty_and_works(slab_store):
    with slab_store.open() as harness:
        harness.store(K[:20])
    slab_store.journal.unlink()
    with slab_store.open() as harness:
        assert not harness.announced()
        assert harness.store(K[10:30]) == {}
        sound(harness.tier)
        assert slab_store.disk_bytes() <= 1024 * KIB


def test_without_a_segment_its_blocks_are_missing_and_its_number_is_not_used_again(slab_store):
    with slab_store.open() as harness:
        harness.store(K[:40])
        held = {key for key, address in slab_store.addresses().items() if address >> 32 == 2}
    assert held
    (slab_store.folder / segment_name(2)).unlink()
    with slab_store.open() as harness:
        assert harness.announced() == set(K[:40]) - held
        assert harness.store(sorted(held)) == {}
        assert harness.load(sorted(held)) == {}
        assert not (slab_store.folder / segment_name(2)).exists()
        sound(harness.tier)


def test_what_a_killed_writer_left_is_removed(slab_store):
    with slab_store.open() as harness:
        harness.store(K[:2])
    (slab_store.folder / "journal.tmp").write_bytes(b"x" * 10_000)
    (slab_store.folder / "manifest.json.tmp").write_bytes(b"x")
    (slab_store.folder / segment_name(7)).write_bytes(b"")
    (slab_store.folder / segment_name(8)).write_bytes(b"x" * 100)
    (slab_store.folder / "stranger").mkdir()
    with slab_store.open() as harness:
        assert harness.announced() == set(K[:2])
        names = {path.name for path in slab_store.folder.iterdir()}
        assert names == {
            *("journal", "journal.new", "lock", "manifest.json", "session"),
            *(segment_name(0), "stranger"),
        }
        sound(harness.tier)


def test_a_journal_damaged_in_the_middle_costs_a_frame_and_trust(slab_store, caplog):
    """One of the lost records may have been a removal: what is older is verified in any case."""
    with slab_store.open(verify=False) as harness:
        harness.store(K[:2])
    with slab_store.open() as harness:
        for number in range(10, 14):
            harness.store([K[number]])
        checkpoint = (slab_store.journal.stat().st_size // RECORD_BYTES) - 8
        content = slab_store.journal.read_bytes()
    slab_store.journal.write_bytes(content)
    flip(slab_store.journal, (checkpoint + 5) * RECORD_BYTES + 40)
    slab_store.damage(K[10])
    with slab_store.open(verify=False) as harness:
        assert "blocks stored before are verified" in caplog.text
        assert harness.announced() == {K[10], K[11], K[13]}
        failures = harness.load([K[10], K[11], K[13]])
        assert list(failures) == [0]
        assert isinstance(failures[0], CorruptBlockError)
        assert harness.store(K[:4]) == {}
    caplog.clear()
    slab_store.damage(K[11])
    with slab_store.open(verify=False) as harness:
        assert not caplog.messages, "the journal was written anew"
        assert isinstance(harness.load([K[11]])[0], CorruptBlockError), "it is still suspect"


def test_the_time_for_an_opening_grows_with_the_blocks_that_there_may_be(slab_store):
    tier = slab_store.tier(capacity_bytes=1_000_000 * BLOCK)
    assert tier.opening_s(BLOCK) == pytest.approx(10.0)
    assert tier.opening_s(10 * BLOCK) == pytest.approx(1.0)


def test_a_store_for_which_no_threads_can_be_had_is_closed_again(slab_store, monkeypatch):
    monkeypatch.setenv("KVOFFLOAD_NATIVE", "sometimes")
    ops = FaultyFileOps()
    with pytest.raises(ConfigError, match="KVOFFLOAD_NATIVE: 'sometimes'"):
        slab_store.open(ops)
    assert not ops.open_fds
    monkeypatch.setenv("KVOFFLOAD_NATIVE", "0")
    with slab_store.open() as harness:
        assert harness.store(K[:2]) == {}


def join_threads(name):
    for thread in threading.enumerate():
        if thread.name.startswith(name):
            thread.join(30.0)


def late_opening(slab_store, release):
    """Open a store while a call hangs, until the deadline; `release` lets the call go on."""
    ops = FaultyFileOps()
    hang = ops.hang(on="fdatasync", times=1)
    view = memoryview(bytearray(4 * BLOCK)).cast("B", (4, BLOCK))
    with closing(Bridge(LoopThread())) as bridge:
        timer = threading.Timer(release, hang.release)
        timer.start()
        with pytest.raises(TierTimeoutError):
            SecondaryTierManager(
                None, view, "t", slab_store.tier(ops), runtime=bridge, open_timeout_s=0.1
            )
        timer.join()
        join_threads("kvoffload-io")
    return ops


@pytest.mark.parametrize("release_s", [0.2, 1.0])
def test_a_store_whose_opening_timed_out_can_be_opened_once_the_disk_responds(
    slab_store, release_s
):
    """Also by the same process, which tries again."""
    with slab_store.open() as harness:
        harness.store(K[:5])
    ops = late_opening(slab_store, release_s)
    assert not ops.open_fds
    with slab_store.open() as harness:
        assert harness.announced() == set(K[:5])


def test_a_store_whose_opening_is_cancelled_as_it_ends_can_be_opened_again(slab_store):
    class Io:
        async def run(self, _direction, call, **_options):
            call()
            raise asyncio.CancelledError

    ops = FaultyFileOps()
    view = memoryview(bytearray(4 * BLOCK)).cast("B", (4, BLOCK))
    env = SimpleNamespace(kv_view=view, io=Io())
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(slab_store.tier(ops).open(env))
    join_threads("kvoffload-close")
    assert not ops.open_fds
    with slab_store.open() as harness:
        assert not harness.announced()
