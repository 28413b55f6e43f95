"""Looking after a directory in which somebody else has put things: nothing outside is touched."""

import pytest
from files.traps import TRAPS, Outside, folder_link, pipe, spring

from kvoffload_async.tiers.slab.layout import JOURNAL, LOCK, MANIFEST, segment_name

VERBS = ["inspect", "verify", "gc"]
NAMES = [LOCK, MANIFEST, JOURNAL, MANIFEST + ".tmp", JOURNAL + ".tmp", segment_name(0)]


@pytest.fixture
def outside(tmp_path) -> Outside:
    return Outside(tmp_path / "outside")


@pytest.mark.parametrize("trap", [folder_link, pipe])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_file_hangs_nothing_and_nothing_behind_it_is_touched(slab, outside, trap, name):
    spring(slab.folder / name, trap, outside)
    for verb in VERBS:
        result = slab.command.run("store", verb, slab.root, "--json")
        assert result.exit_code in {0, 1, 2}, result.output
        assert "Traceback" not in result.output
        if verb == "inspect" and name == MANIFEST:
            assert "the manifest is not a regular file" in result.stderr
    assert outside.is_untouched()


def test_gc_removes_unknown_files_and_nothing_behind_them(slab, outside):
    for number, trap in enumerate(TRAPS):
        trap(slab.folder / f"unknown-{number}", outside)
    arguments = ("--unknown-files", "--older-than", 0)
    slab.command.run("store", "gc", slab.root, "--json", *arguments)
    assert outside.is_untouched()


def test_a_store_that_is_a_link_is_not_looked_after(slab, outside):
    slab.folder.rename(outside.path / "away")
    slab.folder.symlink_to(outside.path / "away")
    assert "no slab store" in slab.command.refusal("store", "gc", slab.root)
