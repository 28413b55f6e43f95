"""Errors of every kind at every call: a job ends, no good block goes, and the tier goes on."""

import errno
from pathlib import Path
from typing import ClassVar

import pytest
from faulty_files import FaultyFileOps
from fs.directories import BLOCK, KIB, FsDirectory
from fs.spaces import rescan
from powercuts import problems
from slab.stores import SlabStore
from sweeps import shares

from kvoffload_async.abc.maintenance import Problem
from kvoffload_async.core.health import BreakerSettings, BreakerState, TierHealth
from kvoffload_async.errors import TierFullError
from kvoffload_async.testing.harness import ManagerHarness, key_of
from kvoffload_async.tiers.fs.maintenance.store import FsMaintenance
from kvoffload_async.tiers.slab.maintenance.store import SlabMaintenance

pytestmark = pytest.mark.slow

K = [key_of(number) for number in range(16)]
OLD, NEW = K[:4], K[8:12]
FULL = {errno.EDQUOT, errno.ENOSPC}
CODES = ["EROFS", "EDQUOT", "EIO", "ESTALE", "EMFILE", "ENFILE", "EINTR", "EACCES"]

CALLS = sorted(
    name
    for name, method in vars(FaultyFileOps).items()
    if callable(method) and not name.startswith("_") and hasattr(FaultyFileOps.__base__, name)
)
"""Every system call."""

CHANGING = {
    *("pwrite", "pwritev", "fallocate", "truncate", "fsync", "fdatasync", "set_xattr", "rename"),
    *("publish", "unlink", "mkdir", "make_folders", "rmdir", "utime", "lock", "unlock"),
}
"""Those without which blocks can be loaded."""


class Fs:
    options: ClassVar[dict] = {"fsync": True, "rescan_interval_s": 3600.0}
    maintenance = FsMaintenance

    def __init__(self, root: Path) -> None:
        self.directory = FsDirectory(root)

    def tier(self, ops=None):
        return self.directory.tier(ops, **self.options)

    def check_count(self) -> None:
        assert not self.directory.temps()


class BoundedFs(Fs):
    options: ClassVar[dict] = Fs.options | {"capacity_bytes": 1024 * KIB}

    def check_count(self) -> None:
        super().check_count()
        with self.directory.open(**self.options) as harness:
            rescan(harness)
            assert self.directory.counted_bytes() == self.directory.disk_bytes()


class Slab:
    maintenance = SlabMaintenance

    def __init__(self, root: Path) -> None:
        self.store = SlabStore(root)

    def tier(self, ops=None):
        return self.store.tier(ops, fsync=True)

    def check_count(self) -> None:
        assert self.store.disk_bytes() <= 1024 * KIB


STORES = [Fs, BoundedFs, Slab]
SHARES = 20


@shares(SHARES)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("kind", STORES)
def test_an_error_at_any_call_ends_its_job_and_removes_no_good_block(tmp_path, kind, code, share):
    number = getattr(errno, code)
    first = 4 * CODES.index(code) + STORES.index(kind) + share
    for call in CALLS[first % SHARES :: SHARES]:
        try:
            fail_and_heal(kind(tmp_path / call), call, number)
        except BaseException as error:
            error.add_note(f"{code} at every {call}")
            raise


def fail_and_heal(store, call: str, code: int) -> None:
    """Store and load while a call fails, and again when it does not any more."""
    ops = FaultyFileOps()
    health = TierHealth(BreakerSettings(fault_threshold=1))
    with ManagerHarness(store.tier(ops), 64, BLOCK) as harness:
        assert served(harness, harness.submit_store(OLD, range(4))) == set(OLD)
        ops.fail(code, on=call)
        saves, loads = harness.submit_store(NEW, range(8, 12)), harness.submit_load(OLD, range(4))
        harness.wait()
        for job in (saves, loads):
            health.job_ended(job, harness.result_of(job), 1.0)
        right_bytes(harness, loads, range(4))
        failed_as_it_should(harness.result_of(saves), health, call, code)
        if call in CHANGING:
            assert code in FULL or harness.result_of(loads).success, "loads go on"
            assert health.loads.state is BreakerState.CLOSED
        ops.heal()
        kept = set() if code in FULL else set(OLD)  # where it is full, blocks are evicted
        new = set() if code in FULL and isinstance(store, Slab) else set(NEW)  # it waits a minute
        again = harness.submit_load(OLD, range(4))
        harness.wait()
        assert right_bytes(harness, again, range(4)) >= kept
        assert served(harness, harness.submit_store(NEW, range(8, 12))) >= new
    with ManagerHarness(store.tier(), 64, BLOCK) as harness:
        loads = harness.submit_load([*OLD, *NEW], range(8))
        harness.wait()
        assert right_bytes(harness, loads, range(8)) >= kept | new
    store.check_count()
    root = store.directory.root if isinstance(store, Fs) else store.store.root
    assert not [f for f in problems(store.maintenance, root) if isinstance(f, Problem)]


def served(harness, job) -> set:
    harness.wait()
    result = harness.result_of(job)
    return set(job.keys) if result.success else set(result.successful_keys)


def right_bytes(harness, job, slots) -> set:
    """Check what a load has served; return the keys."""
    result = harness.result_of(job)
    keys = set(job.keys) if result.success else set(result.successful_keys)
    for key, slot in zip(job.keys, slots, strict=True):
        assert key not in keys or harness.holds(key, slot), "wrong bytes were served"
    return keys


def failed_as_it_should(result, health, call: str, code: int) -> None:
    """A full disk is no fault of the tier; everything else is one of its stores."""
    if result.success:
        assert health.stores.state is BreakerState.CLOSED
    elif code in FULL and call in CHANGING - {"lock", "unlock"}:
        assert isinstance(result.error, TierFullError)
        assert health.stores.state is BreakerState.CLOSED
    elif not isinstance(result.error, TierFullError):
        assert health.stores.state is BreakerState.OPEN
