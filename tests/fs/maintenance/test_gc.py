"""`kvoffload store gc`: what it removes, and what it leaves alone."""

import asyncio
import json
import os
import shutil

import pytest
from fs.maintenance.stores import HOUR_S
from fs.spaces import rescan

from kvoffload_async.abc.maintenance import GcOptions, MaintenanceControl
from kvoffload_async.facade.maintenance import find_stores
from kvoffload_async.replay.source import ChatWorkload
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.fs.writers import WriterRegistry

K = [key_of(number) for number in range(8)]


def test_gc_of_a_tidy_store_does_nothing(store):
    before = store.blocks
    collected = store.run("gc", "--corrupt", "--unknown-files", "--older-than", 0)
    assert collected["freed_bytes"] == 0
    assert store.blocks == before
    assert list((store.folder / ".writers").iterdir()) == []


def test_gc_removes_what_dead_writers_left_and_nothing_of_the_living(store):
    living, dead = store.writer(), store.writer()
    dead.die()
    kept, gone = store.temp(living.writer_id, age_s=9 * HOUR_S), store.temp(dead.writer_id)
    collected = store.run("gc", "--older-than", 0)
    assert collected["temps_of_dead"] == [str(gone)]
    assert collected["writers"] == [str(store.folder / ".writers" / dead.writer_id)]
    assert kept.exists()
    assert not gone.exists()
    assert [p.name for p in (store.folder / ".writers").iterdir()] == [living.writer_id]
    living.unregister()


def test_gc_removes_temporary_files_of_unknown_writers_once_they_are_old(store):
    old, new = store.temp("1-old", age_s=2 * HOUR_S), store.temp("1-new", age_s=0.5 * HOUR_S)
    assert store.run("gc")["temps_foreign"] == [str(old)]
    assert not old.exists()
    assert new.exists()
    assert store.run("gc", "--older-than", 60)["temps_foreign"] == [str(new)]


def test_gc_removes_unknown_files_only_when_asked_and_old(store):
    old = store.unknown_file()
    new = store.unknown_file("new.txt", age_s=0)
    link = store.blocks[0].parent / f"{'cd' * 16}.bin"
    link.symlink_to(store.blocks[0])
    pipe = store.folder / "pipe"
    os.mkfifo(pipe)
    assert store.run("inspect")["unknown_files"] == 4
    assert store.run("gc")["unknown_files"] == []
    assert store.run("gc", "--unknown-files")["unknown_files"] == [str(old)]
    assert new.exists()
    removed = store.run("gc", "--unknown-files", "--older-than", 0)["unknown_files"]
    assert sorted(removed) == sorted(map(str, (new, link, pipe)))
    assert store.blocks[0].exists()


def in_vllms_layout(store):
    """Leave no block, and one empty folder as vLLM makes them."""
    for path in store.folder.glob("[0-9a-f][0-9a-f]"):
        shutil.rmtree(path)
    empty = store.folder / "fff" / "ff_g0"
    empty.mkdir(parents=True)
    return empty


def test_gc_removes_empty_folders_of_blocks_in_vllms_layout_and_no_others(store):
    empty = in_vllms_layout(store)
    own = store.folder / "own"
    own.mkdir()
    beside = store.folder / "ffe" / "notes"
    beside.mkdir(parents=True)
    would_go = store.run("gc", "--dry-run")
    assert empty.exists()
    collected = store.run("gc")
    assert would_go["folders"] == collected["folders"] == [str(empty), str(empty.parent)]
    assert not empty.parent.exists()
    assert own.exists()
    assert beside.exists()


def test_gc_leaves_a_folder_that_is_in_use_again(store, monkeypatch):
    empty = in_vllms_layout(store)
    rmdir = FileOps.rmdir

    def first_write(self, path):
        if path == str(empty):
            (empty / "new.bin").write_bytes(b"")
        rmdir(self, path)

    monkeypatch.setattr(FileOps, "rmdir", first_write)
    assert store.run("gc")["folders"] == []
    assert empty.exists()


def test_gc_tells_what_it_cannot_remove(store, monkeypatch):
    dead = store.writer()
    dead.die()
    temp, vanishing = store.temp(dead.writer_id), store.unknown_file()
    unlink = FileOps.unlink

    def refuse(self, path):
        if path == str(temp):
            raise PermissionError(13, "Permission denied", path)
        if path == str(vanishing):
            raise FileNotFoundError(path)
        unlink(self, path)

    monkeypatch.setattr(FileOps, "unlink", refuse)
    collected = store.run("gc", "--unknown-files", exit_code=1)
    assert collected["failures"] == [f"{temp}: cannot be removed: Permission denied"]
    assert collected["temps_of_dead"] == collected["unknown_files"] == []
    assert collected["writers"] == []  # its entry says whose the file is


def test_a_dry_run_says_what_is_wrong_and_leaves_it(store):
    dead = store.writer()
    dead.die()
    temp = store.temp(dead.writer_id)
    (line,) = store.complaints("gc", "--dry-run")
    assert f"left by a dead writer: {temp}" in line
    assert temp.exists()
    assert store.run("gc", "--dry-run", exit_code=1)["temps_of_dead"] == [str(temp)]


def test_gc_of_a_namespace_without_writers(store):
    """As vLLM leaves it."""
    (store.folder / ".writers").rmdir()
    old = store.temp("1-old", age_s=2 * HOUR_S)
    assert store.run("gc")["temps_foreign"] == [str(old)]
    assert not (store.folder / ".writers").exists()


def test_gc_needs_to_write(store, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(WriterRegistry, "register", refuse)
    message = store.command.refusal("store", "gc", store.root)
    assert "cannot be written: Permission denied" in message


def test_gc_leaves_a_tier_at_work_in_peace(bounded):
    """Its blocks are stored and loaded as ever, and its count stays right."""
    command = bounded.command
    collected = []
    requests = ChatWorkload._requests

    def with_gc(source):
        for number, blocks in enumerate(requests(source)):
            if number % 20 == 10:
                collected.append(command.run("store", "gc", bounded.root, "--corrupt"))
            yield blocks

    class Workload(ChatWorkload):
        _requests = with_gc

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvoffload_async.cli.app.ChatWorkload", Workload)
        report = command.figures(
            *("--limit", 80, "--primary-blocks", 100, "--block-bytes", 4096),
            *("--tier", f"fs:root_dir={bounded.root},capacity_bytes=1MiB"),
        )
    assert report["corrupt_blocks"] == report["job_failures"] == 0
    assert [result.exit_code for result in collected] == [0] * 4
    assert bounded.run("verify")["problems"] == []


def test_gc_removes_a_namespace_without_blocks_whole(bounded):
    for path in bounded.blocks:
        path.unlink()
    folder = bounded.folder
    assert bounded.run("gc", "--dry-run")["folders"] == [str(folder)]
    result = bounded.command.run("store", "gc", bounded.root, "--json")
    assert json.loads(result.stdout)["namespaces"][0]["folders"] == [str(folder)]
    assert list(bounded.root.iterdir()) == []


@pytest.mark.parametrize("left", ["notes/file", "ab/notes.txt", ".writers/1-unknown"])
def test_gc_keeps_a_namespace_with_anything_else_in_it(store, left):
    for path in store.blocks:
        path.unlink()
    path = store.folder / left
    path.parent.mkdir(exist_ok=True)
    path.touch()
    store.run("gc")
    assert path.exists()
    assert (store.folder / "00").exists()


def test_a_tier_that_opens_a_namespace_while_gc_removes_it_goes_on(directory, monkeypatch):
    with directory.open(capacity_bytes=1 << 20):
        pass
    rmdir = FileOps.rmdir
    opened = []

    def and_open(self, path):
        rmdir(self, path)
        if path.endswith("/.writers"):
            opened.append(directory.open(capacity_bytes=1 << 20))

    async def collect():
        (namespace,) = await find_stores(directory.root)
        return [finding async for finding in namespace.gc(GcOptions(), MaintenanceControl())]

    with monkeypatch.context() as patch:
        patch.setattr(FileOps, "rmdir", and_open)
        asyncio.run(collect())
    (harness,) = opened
    with harness:
        assert harness.store(K) == {}
        assert harness.load(K) == {}
        rescan(harness)
        assert directory.counted_bytes() == directory.disk_bytes()
