"""`kvoffload store inspect`: what it counts, whatever it meets on its walk."""

import json
import os
from pathlib import Path

from fs.maintenance.stores import Store, disk_bytes

from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.fs.writers import WriterRegistry


def test_inspect_counts_what_is_there(store):
    found = store.run("inspect")
    blocks = store.blocks
    assert found["blocks"] == len(blocks) > 30
    assert found["block_bytes"] == 4096
    assert found["block_length_bytes"] == 4096 * len(blocks)
    assert found["block_disk_bytes"] == sum(p.stat().st_blocks * 512 for p in blocks)
    assert found["disk_bytes"] == disk_bytes(store.folder)
    assert (found["model"], found["has_manifest"]) == ("replay", True)
    assert found["counted_bytes"] is None
    times = [path.stat().st_mtime for path in blocks]
    assert (found["oldest_s"], found["newest_s"]) == (min(times), max(times))
    assert found["problems"] == []


def test_inspect_changes_nothing(bounded):
    before = {p: p.lstat().st_mtime_ns for p in bounded.root.rglob("*")}
    bounded.run("inspect")
    bounded.run("verify")
    bounded.run("gc", "--corrupt", "--unknown-files", "--older-than", 0, "--dry-run")
    assert {p: p.lstat().st_mtime_ns for p in bounded.root.rglob("*")} == before


def test_inspect_tells_the_namespaces_apart(store):
    other = Store(store.command, "model=org/other")
    result = store.command.run("store", "inspect", store.root, "--json")
    names = [n["name"] for n in json.loads(result.stdout)["namespaces"]]
    assert len(names) == 2
    assert names == sorted(names)
    assert any(name.startswith("org_other_") for name in names)
    table = other.command.run("store", "inspect", store.root).stdout
    assert "org/other" in table
    assert "replay" in table


def test_inspect_sorts_temporary_files_by_their_writers(store):
    living, dead = store.writer(), store.writer()
    dead.die()
    for writer_id in (living.writer_id, dead.writer_id, "1-unknown"):
        store.temp(writer_id)
    found = store.run("inspect", exit_code=1)
    assert (found["living_writers"], found["dead_writers"]) == (1, 1)
    counts = (found["temps_of_living"], found["temps_of_dead"], found["temps_foreign"])
    assert counts == (1, 1, 1)
    assert found["problems"] == ["1 temporary files of dead writers"]
    living.unregister()


def test_a_folder_that_cannot_be_read_is_a_problem(store, monkeypatch):
    store.unknown_file()
    walk = FileOps.walk

    def refuse(self, root):
        if root != str(store.blocks[0].parent):
            return walk(self, root)
        raise PermissionError(13, "Permission denied", root)

    monkeypatch.setattr(FileOps, "walk", refuse)
    (line,) = store.complaints("inspect")
    assert "Permission denied" in line
    (line,) = store.complaints("gc")
    assert "Permission denied" in line


def test_a_namespace_that_cannot_be_listed_is_a_problem(store, monkeypatch):
    stat = FileOps.stat
    folder = str(store.folder)

    def refuse(self, path):
        if path == folder:
            raise PermissionError(13, "Permission denied", path)
        return stat(self, path)

    monkeypatch.setattr(FileOps, "stat", refuse)
    assert "Permission denied" in store.run("inspect", exit_code=1)["problems"][0]


def test_a_namespace_that_vanishes_is_empty(store, monkeypatch):
    stat = FileOps.stat
    folder = str(store.folder)

    def gone(self, path):
        if path == folder:
            raise FileNotFoundError(path)
        return stat(self, path)

    monkeypatch.setattr(FileOps, "stat", gone)
    assert store.run("inspect")["blocks"] == 0


def test_writers_that_cannot_be_listed_are_unknown(store, monkeypatch):
    living = store.writer()
    store.temp(living.writer_id)

    def refuse(self, now_s):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(WriterRegistry, "classify", refuse)
        found = store.run("inspect")
    assert (found["living_writers"], found["temps_foreign"]) == (0, 1)
    living.unregister()


def test_a_file_that_vanishes_during_the_walk_is_left_out(store, monkeypatch):
    (store.folder / "short-lived").touch()
    scandir = os.scandir

    class Entries:
        """What `os.scandir` gives, with one file gone by the time it is looked at."""

        def __init__(self, path):
            self.entries = scandir(path)

        def __enter__(self):
            return self

        def __exit__(self, *_error):
            self.entries.close()

        def __iter__(self):
            for entry in self.entries:
                if entry.name == "short-lived":
                    Path(entry.path).unlink()
                yield entry

    monkeypatch.setattr(os, "scandir", Entries)
    assert store.run("inspect")["unknown_files"] == 0


def test_a_broken_manifest_is_said_and_does_not_matter(store):
    (manifest,) = store.root.glob("*/config.json")
    for text in ("{", "[1]", "[" * 100_000):
        manifest.write_text(text)
        found = store.run("verify")
        assert (found["has_manifest"], found["model"], found["block_bytes"]) == (False, None, None)
        assert found["verification"]["checked"] == found["blocks"] > 0
