"""`kvoffload store` on a slab store that a tier has open, or wants to."""

import fcntl
import os
import threading

from slab.maintenance.slabs import NUM_BLOCKS

from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.slab.layout import LOCK
from kvoffload_async.tiers.slab.maintenance import inspection as verification_module
from kvoffload_async.types import JobMetadata, ReqContext, as_block_ids


def test_a_store_in_use_can_be_inspected_and_verified(slab):
    tier = slab.open()
    slab.rows[:] = slab.truth
    assert slab.job(tier, range(6)).success
    before = slab.files()
    found = slab.run("verify")
    assert slab.files() == before
    assert found["in_use_by"] == str(os.getpid())
    assert found["verification"]["verified"] == 12
    assert slab.job(tier, range(12), is_load=True).success
    tier.shutdown()


def test_gc_refuses_a_store_in_use_and_names_the_process(slab):
    tier = slab.open()
    before = slab.files()
    message = slab.command.refusal("store", "gc", slab.root)
    assert f"already opened by process {os.getpid()}; close it there first" in message
    assert slab.files() == before
    tier.shutdown()


def test_a_tier_cannot_open_what_gc_rewrites(slab, monkeypatch):
    seen = []

    class Curious(FileOps):
        def fdatasync(self, fd):
            with (slab.folder / LOCK).open("r+b") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    seen.append(lock.read().decode().strip())
            super().fdatasync(fd)

    monkeypatch.setattr("kvoffload_async.tiers.files.maintenance.FileOps", Curious)
    slab.flip(3)
    slab.run("gc", "--corrupt")
    assert set(seen) == {str(os.getpid())}


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
    assert found["gone"] > 0
    assert found["gone"] + found["checked"] == 12
    assert found["corrupt"] == []
    tiers[0].shutdown()


def test_a_dry_run_may_look_at_a_store_in_use(slab):
    tier = slab.open()
    assert slab.run("gc", "--corrupt", "--dry-run")["blocks"] == 12
    tier.shutdown()
