"""A store that does not verify, after a reboot: its journal may be older than its slots."""

from dataclasses import replace
from pathlib import Path

import pytest
from power_cut import MetadataOrder
from powercuts import PER_STEP, check_each, sampled, states
from slab.stores import SlabStore
from slab.test_slab_powercut import OPTIONS, K, recorded, stores, stores_and_evicts
from sweeps import sizes

from kvoffload_async.errors import ConfigError
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.slab.layout import SESSION
from kvoffload_async.tiers.slab.recovery import Session, read_manifest

pytestmark = [pytest.mark.slow, sizes("per_step", 2, PER_STEP)]


def reboot(root: Path) -> None:
    """Let what is there be of another boot, as far as it says of which it is."""
    folder = SlabStore(root).folder
    manifest, path = read_manifest(FileOps(), str(folder)), folder / SESSION
    if manifest is not None and path.exists():
        content = path.read_bytes()
        session = Session.decode(content, manifest.journal_seed)
        if session.boot_id:
            header, _ = replace(session, boot_id="another").encode(manifest.journal_seed)
            path.write_bytes(header + content[len(header) :])


def check(root: Path, _acknowledged) -> None:
    reboot(root)
    try:
        harness = SlabStore(root).open(**OPTIONS, verify=False)
    except ConfigError as error:
        if "remove that folder" not in str(error):
            raise
        return
    with harness:
        failures = harness.load(K)
        served = [slot for slot in range(len(K)) if slot not in failures]
        assert all(harness.holds(K[slot], slot) for slot in served), "wrong bytes were served"


@pytest.mark.parametrize("verify", [True, False], ids=["with checksums", "without"])
@pytest.mark.parametrize("order", MetadataOrder)
def test_no_state_after_a_reboot_serves_a_wrong_byte_without_verification(
    tmp_path, order, verify, per_step
):
    ops = recorded(tmp_path / "work", [stores], verify=verify)
    assert check_each(states(ops.recording, order, per_step), tmp_path, check) > 20


@pytest.mark.parametrize("verify", [True, False], ids=["with checksums", "without"])
@pytest.mark.parametrize("order", MetadataOrder)
def test_no_state_of_a_longer_run_does(tmp_path, order, verify, per_step):
    ops = recorded(tmp_path / "work", [stores_and_evicts] * 2, verify=verify)
    check_each(sampled(ops.recording, order, 2 * per_step), tmp_path, check)
