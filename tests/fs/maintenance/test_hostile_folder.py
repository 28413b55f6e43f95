"""Looking after a directory in which somebody else has put things: nothing outside is touched."""

import json
import os

import pytest
from files.traps import Outside, folder_link, link, pipe, spring

VERBS = ["inspect", "verify", "gc"]


@pytest.fixture
def outside(tmp_path) -> Outside:
    return Outside(tmp_path / "outside")


def run(store, verb, *arguments):
    """Run a verb to its end; return its report, whatever it has found."""
    result = store.command.run("store", verb, store.root, "--json", *arguments)
    assert result.exit_code in {0, 1}, result.output
    (namespace,) = json.loads(result.stdout)["namespaces"]
    return namespace


@pytest.mark.parametrize("trap", [folder_link, pipe])
@pytest.mark.parametrize("directory", ["block", "usage", "writers", "entry", "config"])
def test_what_is_no_file_hangs_nothing_and_nothing_behind_it_is_touched(
    store, outside, trap, directory
):
    path = {
        "block": store.blocks[0],
        "usage": store.folder / ".usage",
        "writers": store.folder / ".writers",
        "entry": store.folder / ".writers" / "1-0123456789ab",
        "config": store.root / store.folder.name.removesuffix("_r0") / "config.json",
    }[directory]
    num_blocks = len(store.blocks)
    spring(path, trap, outside)
    for verb in VERBS:
        found = run(store, verb)
        if verb in {"inspect", "verify"}:
            assert found["blocks"] == num_blocks - (directory == "block")
            assert found["has_manifest"] == (directory != "config")
    assert outside.is_untouched()


@pytest.mark.parametrize("arguments", [[], ["--unknown-files", "--older-than", 0]])
def test_gc_removes_no_old_file_behind_a_link(store, outside, arguments):
    spring(store.folder / ".writers", folder_link, outside)
    (store.folder / "fff").symlink_to(outside.path / "folder")
    (store.blocks[0].parent / "00_g0").symlink_to(outside.path)
    assert run(store, "gc", *arguments)["writers"] == []
    assert outside.is_untouched()


def test_gc_removes_no_entry_that_is_none(store):
    dead, foreign = store.writer(), store.writer()
    for writer in (dead, foreign):
        writer.die()
    entries = store.folder / ".writers"
    (entries / foreign.writer_id).write_text("my notes")
    store.aged(entries / foreign.writer_id, 7200)
    store.aged(entries / dead.writer_id, 7200)
    found = run(store, "gc")
    assert found["writers"] == [str(entries / dead.writer_id)]
    assert any("not a writer's entry" in failure for failure in found["failures"])
    assert [path.name for path in entries.iterdir()] == [foreign.writer_id]


@pytest.mark.parametrize("trap", [link, pipe])
def test_a_temporary_file_of_a_dead_writer_that_is_no_file_is_an_unknown_one(store, outside, trap):
    dead = store.writer()
    dead.die()
    path = store.temp(dead.writer_id)
    spring(path, trap, outside)
    assert run(store, "gc")["temps_of_dead"] == []
    assert os.path.lexists(path)
    assert outside.is_untouched()


def test_a_namespace_that_is_a_link_is_not_looked_after(store, outside):
    folder = store.folder
    folder.rename(outside.path / "away")
    folder.symlink_to(outside.path / "away")
    assert "no fs store" in store.command.refusal("store", "gc", store.root)


def test_the_directory_may_be_a_link(store, outside, tmp_path):
    (tmp_path / "link").symlink_to(store.root)
    result = store.command.run("store", "verify", tmp_path / "link", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["namespaces"][0]["blocks"] == len(store.blocks)


def test_pipes_beside_a_namespace_hang_nothing(store, outside):
    pipe(store.root / "model_0123456789ab_r0", outside)
    link(store.root / "model_0123456789ac_r0", outside)
    pipe(store.root / "config.json", outside)
    run(store, "inspect")
