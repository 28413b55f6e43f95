"""`kvoffload store gc` on slab stores: what it removes, and what it leaves alone."""

from slab.maintenance.slabs import deaf_to


def test_gc_removes_what_killed_writers_left_and_unknown_files_only_when_asked_and_old(slab):
    (slab.folder / "journal.tmp").write_bytes(bytes(5000))
    unknown = slab.folder / "notes.txt"
    unknown.write_bytes(bytes(5000))
    assert slab.complaints("inspect") == ["1 files left by a killed writer"]
    assert slab.complaints("gc", "--dry-run") == ["left by a killed writer: journal.tmp"]
    assert (slab.folder / "journal.tmp").exists()
    changed = slab.run("gc", "--unknown-files")
    assert (changed["temps"], changed["unknown_files"]) == (["journal.tmp"], [])
    assert changed["freed_bytes"] >= 5000
    assert slab.run("inspect")["unknown_files"] == ["notes.txt"]
    assert slab.run("gc", "--unknown-files", "--older-than", "0")["unknown_files"] == ["notes.txt"]
    assert not unknown.exists()
    assert slab.served() == list(range(12))


def test_gc_drops_corrupt_blocks_only_when_asked(slab):
    slab.flip(5)
    assert slab.run("gc")["corrupt"] == []
    assert slab.complaints("gc", "--corrupt", "--dry-run")[0].startswith("corrupt: ")
    assert slab.run("inspect")["blocks"] == 12
    assert slab.run("gc", "--corrupt")["blocks"] == 11
    assert slab.served() == [i for i in range(12) if i != 5]


def test_gc_keeps_what_cannot_be_read_just_now(slab, monkeypatch):
    (path, _), (other, _) = slab.address(0), slab.address(11)
    assert path != other

    slab.flip(0)
    monkeypatch.setattr("kvoffload_async.tiers.files.maintenance.FileOps", deaf_to(other.name))
    assert slab.run("gc", "--corrupt", exit_code=1)["blocks"] == 11
    monkeypatch.undo()
    assert slab.served() == list(range(1, 12))
