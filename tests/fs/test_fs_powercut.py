"""A directory after a power cut: no wrong byte, and with `fsync` nothing lost."""

import os
import time
from functools import partial
from pathlib import Path

import pytest
from fs.directories import FsDirectory
from fs.spaces import rescan, room_for
from power_cut import MetadataOrder, RecordingFileOps
from powercuts import PER_STEP, check_each, problems, sampled, states
from sweeps import sizes

from kvoffload_async.abc.maintenance import Problem
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.fs.maintenance.store import FsMaintenance

pytestmark = [pytest.mark.slow, sizes("per_step", 2, PER_STEP)]

K = [key_of(number) for number in range(24)]
CAPACITY = room_for(5)


def recorded(root: Path, work, *, is_new: bool = False, **options) -> RecordingFileOps:
    if not is_new:
        FsDirectory(root).open(**options).close()  # makes the 256 folders, each of which is a step
    ops = RecordingFileOps(str(root))
    with FsDirectory(root).open(ops, **options) as harness:
        work(harness, ops)
    return ops


def stores(harness, ops) -> None:
    for first in range(0, 4, 2):
        assert harness.store(K[first : first + 2]) == {}
        ops.mark(K[first : first + 2])


def stores_and_evicts(harness, ops) -> None:
    for first in range(0, 24, 3):
        harness.store(K[first : first + 3])
        harness.load(K[max(0, first - 3) : first])


def age(root: Path) -> None:
    """Let two hours pass, so that a writer whose entry is not whole counts as dead."""
    then_s = time.time() - 7200
    for path in root.rglob("*"):
        if path.is_file():
            os.utime(path, (then_s, then_s))


def check(root: Path, acknowledged=(), **options) -> None:
    """Open what is there: nothing is served wrong, and nothing that was acknowledged is missing."""
    directory = FsDirectory(root)
    age(root)
    with directory.open(**options) as harness:
        failures = harness.load(K)
        served = {key for slot, key in enumerate(K) if slot not in failures}
        assert all(harness.holds(key, K.index(key)) for key in served), "wrong bytes were served"
        lost = {key for keys in acknowledged for key in keys} - served
        assert not lost, f"{len(lost)} acknowledged blocks are lost"
        assert harness.store(K[20:22]) == {}
        if "capacity_bytes" in options:
            rescan(harness)
            assert directory.counted_bytes() == directory.disk_bytes() <= options["capacity_bytes"]
    found = problems(FsMaintenance, root, options["verify"])
    assert not [f for f in found if isinstance(f, Problem)]
    assert not directory.temps()


@pytest.mark.parametrize(
    ("verify", "order"),
    [
        ("required", MetadataOrder.JOURNALLED),
        ("required", MetadataOrder.UNORDERED),
        # Without an order a file may lose its checksum and its bytes, and keep its name.
        ("when_present", MetadataOrder.JOURNALLED),
        ("encrypted", MetadataOrder.JOURNALLED),
        ("encrypted", MetadataOrder.UNORDERED),
    ],
)
def test_no_state_after_a_power_cut_serves_a_wrong_byte(tmp_path, order, verify, per_step):
    writes = "encrypted" if verify == "encrypted" else "required"
    ops = recorded(tmp_path / "work", stores, verify=writes)
    found = states(ops.recording, order, per_step)
    assert check_each(found, tmp_path, lambda root, _: check(root, verify=verify)) > 15


@pytest.mark.parametrize("verify", ["required", "encrypted"])
@pytest.mark.parametrize("order", MetadataOrder)
def test_no_state_after_a_power_cut_loses_what_was_acknowledged_with_fsync(
    tmp_path, order, verify, per_step
):
    options = {"verify": verify}  # the checksum counts, too
    ops = recorded(tmp_path / "work", stores, fsync=True, **options)
    found = states(ops.recording, order, per_step)
    assert check_each(found, tmp_path, partial(check, **options)) > 15


@pytest.mark.parametrize("order", MetadataOrder)
def test_a_power_cut_while_the_folders_of_a_namespace_are_made_loses_nothing_acknowledged(
    tmp_path, order, per_step
):
    options = {"verify": "required"}
    ops = recorded(tmp_path / "work", stores, is_new=True, fsync=True, **options)
    found = sampled(ops.recording, order, 2 * per_step)
    check_each(found, tmp_path, partial(check, **options))


@pytest.mark.parametrize("fsync", [False, True])
@pytest.mark.parametrize("verify", ["required", "encrypted"])
@pytest.mark.parametrize("order", MetadataOrder)
def test_after_a_power_cut_while_blocks_are_evicted_the_count_is_right(
    tmp_path, order, verify, fsync, per_step
):
    options = {"capacity_bytes": CAPACITY, "rescan_interval_s": 3600.0, "verify": verify}
    ops = recorded(tmp_path / "work", stores_and_evicts, fsync=fsync, **options)
    found = sampled(ops.recording, order, 2 * per_step)
    check_each(found, tmp_path, lambda root, _: check(root, **options))
