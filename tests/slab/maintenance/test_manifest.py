"""A slab store whose manifest is damaged or lost: refused, with the advice to remove the folder."""

import shutil
from pathlib import Path

import pytest

from kvoffload_async.errors import ConfigError


def broken_text(path):
    path.write_bytes(path.read_bytes().replace(b"{", b"[", 1))


def broken_checksum(path):
    path.write_bytes(path.read_bytes().replace(b'"rank": 0', b'"rank": 7'))


def broken_layout(path):
    path.write_bytes(path.read_bytes().replace(b'"layout": "', b'"layout": "z'))


every_damage = pytest.mark.parametrize(
    "damage", [broken_text, broken_checksum, broken_layout, Path.unlink]
)


@every_damage
@pytest.mark.parametrize(
    "call",
    [["inspect"], ["verify"], ["gc", "--corrupt", "--unknown-files", "--older-than", 0]],
    ids=lambda call: call[0],
)
def test_it_is_refused_with_the_remedy_and_left_as_it_is(slab, damage, call):
    damage(slab.manifest)
    (slab.folder / "journal.tmp").write_bytes(b"x")
    before = slab.files()
    for arguments in (call, [*call, "--dry-run"]) if call[0] == "gc" else (call,):
        (complaint,) = slab.complaints(*arguments)
        assert complaint.startswith(
            "the manifest is missing; " if damage is Path.unlink else "the manifest is unreadable: "
        )
        assert complaint.endswith(
            f"no tier can open the store: if nothing else is in it, remove the folder {slab.folder}"
        )
    assert slab.files() == before


@every_damage
def test_after_the_removal_of_the_folder_a_tier_begins_a_new_store(slab, damage):
    damage(slab.manifest)
    with pytest.raises(ConfigError, match="; remove that folder, or give another directory"):
        slab.open()
    shutil.rmtree(slab.folder)
    slab.store_blocks()
    assert slab.served() == list(range(12))


def test_a_directory_with_another_programs_manifest_is_not_to_be_removed_with_the_stores_in_it(
    slab,
):
    (slab.root / "manifest.json").write_text('{"name": "an application"}')
    before = slab.files()
    result = slab.command.run("store", "gc", slab.root)
    assert result.exit_code == 1
    assert "if nothing else is in it, remove the folder" in result.stderr
    assert slab.files() == before
    assert slab.served() == list(range(12))
