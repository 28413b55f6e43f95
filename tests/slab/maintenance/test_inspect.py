"""What `kvoffload store` shows of slab stores."""

import json

import pytest
from slab.maintenance.slabs import BLOCK, Slab


def test_inspect_counts_what_is_there_and_changes_nothing(slab):
    before = slab.files()
    found = slab.run("inspect")
    assert slab.files() == before
    assert found["model"] == "m"
    assert found["rank"] == 0
    assert found["block_bytes"] == BLOCK
    assert found["in_use_by"] is None
    assert (found["blocks"], found["with_digest"], found["suspect"]) == (12, 12, 0)
    assert (found["segments"], found["slots"], found["free_slots"]) == (2, 16, 4)
    assert found["journal_bytes"] == slab.journal.stat().st_size
    assert found["damaged_bytes"] == found["torn_bytes"] == 0
    assert found["disk_bytes"] >= 16 * BLOCK
    assert found["temps"] == found["unknown_files"] == found["problems"] == []


def test_a_stores_own_folder_will_do(slab):
    assert slab.run("inspect", directory=slab.folder)["blocks"] == 12


def test_blocks_without_a_checksum_are_told_apart(command):
    slab = Slab(command)
    slab.store_blocks(verify="off")
    found = slab.run("verify")
    assert found["with_digest"] == found["verification"]["verified"] == 0
    assert found["blocks"] == found["verification"]["without_digest"] == 12
    slab.close()


def test_a_directory_with_both_kinds_of_store_shows_both(slab):
    trace = slab.command.trace([[1, 2, 3]])
    slab.command.figures(trace, "--primary-blocks", 8, "--tier", f"fs:root_dir={slab.root}")
    for verb in ("inspect", "verify", "gc"):
        result = slab.command.run("store", verb, slab.root, "--json")
        assert result.exit_code == 0, result.output
        report = json.loads(result.stdout)
        assert len(report["namespaces"]) == len(report["slab_stores"]) == 1
        assert slab.command.run("store", verb, slab.root).exit_code == 0


@pytest.mark.parametrize("verb", ["inspect", "verify", "gc"])
def test_for_people_there_is_a_table(slab, verb):
    result = slab.command.run("store", verb, slab.root)
    assert result.exit_code == 0, result.output
    assert "m_r0" in result.stdout
    assert "12" in result.stdout
