"""A store after a power cut: no wrong byte, and with `fsync` nothing lost."""

from functools import partial
from pathlib import Path

import pytest
from power_cut import MetadataOrder, RecordingFileOps
from powercuts import PER_STEP, check_each, problems, sampled, states
from slab.stores import BLOCK, FIXED, KIB, SlabStore, sound
from sweeps import sizes

from kvoffload_async.errors import ConfigError
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.slab.layout import BAD_JOURNAL
from kvoffload_async.tiers.slab.maintenance.store import SlabMaintenance

pytestmark = [pytest.mark.slow, sizes("per_step", 2, PER_STEP)]

K = [key_of(number) for number in range(48)]
MODES = pytest.mark.parametrize("verify", [True, "encrypted"], ids=["verified", "encrypted"])
OPTIONS = {"capacity_bytes": FIXED + 14 * BLOCK, "segment_bytes": 24 * KIB, "io_threads": 2}


def recorded(root: Path, work, **options) -> RecordingFileOps:
    ops = RecordingFileOps(str(root))
    for part in work:
        with SlabStore(root).open(ops, **OPTIONS, **options) as harness:
            part(harness, ops)
    return ops


def stores(harness, ops) -> None:
    for first in range(0, 4, 2):
        assert harness.store(K[first : first + 2]) == {}
        ops.mark(K[first : first + 2])


def stores_more(harness, ops) -> None:
    assert harness.store(K[4:6]) == {}
    ops.mark(K[4:6])


def stores_and_evicts(harness, ops) -> None:
    for first in range(0, 40, 4):
        harness.store(K[first : first + 4])
        harness.load(K[max(0, first - 6) : first])


def check(root: Path, acknowledged=(), **options) -> None:
    """Open what is there: nothing is served wrong, and nothing that was acknowledged is missing."""
    slab_store = SlabStore(root)
    with slab_store.open(**OPTIONS, **options) as harness:
        failures = harness.load(K)
        served = {key for slot, key in enumerate(K) if slot not in failures}
        assert all(harness.holds(key, K.index(key)) for key in served), "wrong bytes were served"
        lost = {key for keys in acknowledged for key in keys} - served
        assert not lost, f"{len(lost)} acknowledged blocks are lost"
        assert harness.store(K[40:44]) == {}
        sound(harness.tier)
    assert not list(slab_store.folder.glob("*.tmp"))
    assert slab_store.disk_bytes() <= OPTIONS["capacity_bytes"]
    found = [problem.text for problem in problems(SlabMaintenance, root, options.get("verify"))]
    assert all(text.startswith(BAD_JOURNAL) for text in found), found


def check_or_refused(root: Path, acknowledged=(), **options) -> None:
    try:
        check(root, acknowledged, **options)
    except ConfigError as error:
        if "remove that folder" not in str(error) or "\n" in str(error):
            raise


@MODES
@pytest.mark.parametrize("order", MetadataOrder)
def test_no_state_after_a_power_cut_serves_a_wrong_byte(tmp_path, order, verify, per_step):
    ops = recorded(tmp_path / "work", [stores], verify=verify)
    found = states(ops.recording, order, per_step)
    assert check_each(found, tmp_path, lambda root, _: check_or_refused(root, verify=verify)) > 20


@MODES
@pytest.mark.parametrize("order", MetadataOrder)
def test_no_state_after_a_power_cut_loses_what_was_acknowledged_with_fdatasync(
    tmp_path, order, verify, per_step
):
    ops = recorded(tmp_path / "work", [stores, stores_more], fsync=True, verify=verify)
    found = states(ops.recording, order, per_step)
    assert check_each(found, tmp_path, partial(check, verify=verify)) > 20


@MODES
@pytest.mark.parametrize("fsync", [False, True])
@pytest.mark.parametrize("order", MetadataOrder)
def test_no_state_of_a_longer_run_serves_a_wrong_byte(tmp_path, order, fsync, verify, per_step):
    work = [stores_and_evicts, stores_and_evicts]
    ops = recorded(tmp_path / "work", work, fsync=fsync, verify=verify)
    found = sampled(ops.recording, order, 2 * per_step)
    check_each(found, tmp_path, lambda root, _: check_or_refused(root, verify=verify))
