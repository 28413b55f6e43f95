"""A slab store whose manifest is damaged or lost: where `repair` takes it from."""

import json
import os

import pytest
from slab.maintenance.slabs import BLOCK, Slab

from kvoffload_async.tiers.slab.layout import MANIFEST
from kvoffload_async.tiers.slab.manifest import Manifest


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
    assert "run repair" in slab.complaints("gc")[0]
    changed = slab.run("repair")
    assert changed["manifest_rebuilt"]
    assert changed["blocks"] == 12
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
    changed = {store["name"]: store for store in json.loads(result.stdout)["slab_stores"]}
    assert changed["m_r0"]["manifest_rebuilt"]
    assert not changed["m_r1"]["manifest_rebuilt"]
    assert slab.served() == list(range(12))


def test_a_lost_manifest_of_a_namespace_of_its_own_is_in_the_folders_name(slab):
    tier = slab.open(on_mismatch="new_namespace", run_config={"model_name": "m", "other": 1})
    slab.rows[:] = slab.truth
    assert slab.job(tier, range(5)).success
    tier.shutdown()
    (own,) = slab.root.glob("m_r0_*")
    (own / MANIFEST).unlink()
    result = slab.command.run("store", "repair", own, "--json")
    (changed,) = json.loads(result.stdout)["slab_stores"]
    assert changed["manifest_rebuilt"]
    assert changed["blocks"] == 5


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
    assert "it cannot be reconstructed" in result.stderr
    assert not slab.manifest.exists()


def test_a_file_that_is_no_manifest_is_refused(slab):
    path = slab.command.file("{}", "no.json")
    assert f"--manifest {path}: it is not the manifest" in slab.command.refusal(
        "store", "repair", slab.root, "--manifest", path
    )


def test_it_is_refused_before_any_other_store_is_repaired(slab):
    trace = slab.command.trace([[1, 2, 3]])
    slab.command.figures(trace, "--primary-blocks", 8, "--tier", f"fs:root_dir={slab.root}")
    corrupt = next(slab.root.rglob("*.bin"))
    os.truncate(corrupt, 10)
    path = slab.command.file("{}", "no.json")
    slab.command.refusal("store", "repair", slab.root, "--manifest", path)
    assert corrupt.exists()
