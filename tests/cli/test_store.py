"""`kvoffload store`: what it finds, what it removes, and what it leaves alone."""

import itertools
import json
import os
import signal
import time
from pathlib import Path

import pytest

from kvoffload_async.cli.store import command as command_module
from kvoffload_async.cli.store import verification
from kvoffload_async.cli.store.tables import shown
from kvoffload_async.cli.workload import ChatWorkload
from kvoffload_async.tiers.fs.ops import FileOps
from kvoffload_async.tiers.fs.usage import read_usage
from kvoffload_async.tiers.fs.writers import WriterRegistry

HOUR_S = 3600


class Store:
    """A directory of the fs tier with what a replay has left in it."""

    def __init__(self, command, *options):
        self.command = command
        self.root = command.directory / "store"
        self.options = "".join(f",{option}" for option in options)
        self.trace = command.trace(list(ChatWorkload(limit=60)))
        self.replay()

    def replay(self):
        return self.command.figures(
            *(self.trace, "--primary-blocks", 100, "--block-bytes", 4096),
            *("--tier", f"fs:root_dir={self.root}{self.options}"),
        )

    @property
    def folder(self):
        (folder,) = self.root.glob("*_r0")
        return folder

    @property
    def blocks(self):
        return sorted(self.folder.rglob("*.bin"))

    def temp(self, writer_id, *, age_s=0.0):
        """Leave a temporary file of a writer behind."""
        leaf = self.blocks[0].parent
        path = leaf / f"{'ab' * 16}.bin.{writer_id}.0.tmp"
        path.write_bytes(bytes(5000))
        return self.aged(path, age_s)

    def stranger(self, name="notes.txt", *, age_s=2.0 * HOUR_S):
        path = self.blocks[0].parent / name
        path.write_bytes(bytes(5000))
        return self.aged(path, age_s)

    def aged(self, path, age_s):
        then_s = time.time() - age_s
        os.utime(path, (then_s, then_s))
        return path

    def writer(self):
        writer = WriterRegistry(FileOps(), str(self.folder))
        writer.register()
        return writer

    def run(self, verb, *arguments, exit_code=0):
        """Return the one namespace's figures."""
        result = self.command.run("store", verb, self.root, "--json", *arguments)
        assert result.exit_code == exit_code, result.output
        report = json.loads(result.stdout)
        assert report["directory"] == str(self.root)
        (namespace,) = report["namespaces"]
        assert namespace["name"] == self.folder.name
        return namespace

    def complaints(self, verb, *arguments):
        """Run what finds something wrong; return the lines of standard error."""
        result = self.command.run("store", verb, self.root, *arguments)
        assert result.exit_code == 1, result.output
        assert result.stdout
        lines = result.stderr.splitlines()
        assert all(line.startswith("kvoffload: error: ") for line in lines)
        return lines


@pytest.fixture
def store(command):
    return Store(command)


@pytest.fixture
def bounded(command):
    """One with a capacity that it never reaches, and so with a shared count."""
    return Store(command, "capacity_bytes=64MiB")


def has_seal(path):
    try:
        return bool(os.getxattr(path, "user.kvoffload.xxh3"))
    except OSError:
        return False


def truncate(path):
    os.truncate(path, 1000)


def flip(path):
    if not has_seal(path):
        pytest.skip("no extended attributes here")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    with path.open("r+b") as file:
        file.write(data)


def swap(path):
    """Give it another block's bytes and seal."""
    other = next(p for p in path.parent.glob("*.bin") if p != path)
    seal = os.getxattr(other, "user.kvoffload.xxh3") if has_seal(other) else pytest.skip("no seals")
    path.write_bytes(other.read_bytes())
    os.setxattr(path, "user.kvoffload.xxh3", seal)


def usage_of(store):
    usage = read_usage(FileOps(), str(store.folder))
    assert usage is not None
    return usage


def disk_bytes(folder):
    paths = [folder, *folder.rglob("*")]
    return sum(path.lstat().st_blocks * 512 for path in paths)


# -- the whole story ----------------------------------------------------------------------------


def test_a_store_is_warm_and_what_is_damaged_is_a_miss_and_never_a_wrong_byte(store):
    assert store.replay()["hit_ratio"] > 0.999
    victims = store.blocks[::5]
    for number, path in enumerate(victims):
        (truncate, flip, Path.unlink)[number % 3](path)
    report = store.replay()
    assert report["corrupt_blocks"] == report["leaked_pins"] == 0
    assert report["hit_ratio"] < 0.99
    assert report["jobs_submitted"] == report["job_results"]


@pytest.mark.parametrize("damage", [truncate, flip, swap])
def test_what_is_damaged_is_named_by_verify_and_removed_by_gc(store, damage):
    before = store.blocks
    victims = before[::5]
    for path in victims:
        damage(path)
    lines = store.complaints("verify")
    assert len(lines) == len(victims)
    for path in victims:
        assert any(str(path) in line for line in lines)
    found = store.run("verify", exit_code=1)["verification"]
    assert sorted(bad["path"] for bad in found["corrupt"]) == [str(path) for path in victims]
    assert found["checked"] == len(before)
    assert store.blocks == before

    assert store.run("gc")["corrupt"] == []
    assert store.blocks == before
    would_go = store.run("gc", "--corrupt", "--dry-run", exit_code=1)
    assert sorted(would_go["corrupt"]) == [str(path) for path in victims]
    assert store.blocks == before
    removed = store.run("gc", "--corrupt")
    assert sorted(removed["corrupt"]) == [str(path) for path in victims]
    assert removed["freed_bytes"] > 0
    assert removed["failures"] == []
    assert store.blocks == sorted(set(before) - set(victims))

    assert store.run("verify")["verification"]["corrupt"] == []
    assert store.replay()["corrupt_blocks"] == 0
    assert store.replay()["hit_ratio"] > 0.999


# -- inspect ------------------------------------------------------------------------------------


def test_inspect_counts_what_is_there(store):
    found = store.run("inspect")
    blocks = store.blocks
    assert found["blocks"] == len(blocks) > 100
    assert found["block_bytes"] == 4096
    assert found["block_length_bytes"] == 4096 * len(blocks)
    assert found["block_disk_bytes"] == sum(p.stat().st_blocks * 512 for p in blocks)
    assert found["disk_bytes"] == disk_bytes(store.folder)
    assert (found["model"], found["has_manifest"]) == ("default", True)
    assert found["counted_bytes"] is None
    times = [path.stat().st_mtime for path in blocks]
    assert (found["oldest_s"], found["newest_s"]) == (min(times), max(times))
    assert found["problems"] == []


def test_inspect_changes_nothing(bounded):
    before = {p: p.lstat().st_mtime_ns for p in bounded.root.rglob("*")}
    bounded.run("inspect")
    bounded.run("verify")
    bounded.run("gc", "--corrupt", "--strangers", "--older-than", 0, "--dry-run")
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
    assert "default" in table


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


def test_a_count_that_is_right_is_no_problem(bounded):
    found = bounded.run("inspect")
    off_bytes = abs(found["counted_bytes"] - found["disk_bytes"])
    assert off_bytes <= found["count_tolerance_bytes"] < 0.1 * found["disk_bytes"]
    assert "bytes counted" in bounded.command.run("store", "inspect", bounded.root).stdout


def test_a_count_that_is_wrong_is_one_until_gc(bounded):
    for path in bounded.blocks[::2]:
        path.unlink()
    (line,) = bounded.complaints("inspect")
    assert "bytes are counted and" in line
    collected = bounded.run("gc")
    assert collected["counted_bytes"] == usage_of(bounded).settled_bytes
    assert usage_of(bounded).settled_bytes == disk_bytes(bounded.folder)
    assert bounded.run("inspect")["problems"] == []


def test_a_count_that_is_unreadable_is_made_anew_by_gc(bounded):
    (bounded.folder / ".usage").write_text("[1, {")
    (line,) = bounded.complaints("inspect")
    assert "the count of bytes is unreadable" in line
    bounded.run("gc")
    assert usage_of(bounded).settled_bytes == disk_bytes(bounded.folder)


def test_the_count_is_right_after_gc_has_removed_something(bounded):
    for path in bounded.blocks[::3]:
        truncate(path)
    dead = bounded.writer()
    bounded.temp(dead.writer_id)
    dead.die()
    bounded.stranger()
    bounded.run("gc", "--corrupt", "--strangers")
    usage = usage_of(bounded)
    assert usage.settled_bytes == disk_bytes(bounded.folder)
    assert usage.reserved_bytes == {}


def test_a_folder_that_cannot_be_read_is_a_problem(store, monkeypatch):
    store.stranger()
    walk = FileOps.walk

    def refuse(self, root):
        if root.endswith(".writers"):
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
        patch.setattr(WriterRegistry, "judged", refuse)
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
    assert store.run("inspect")["strangers"] == 0


def test_a_broken_manifest_is_said_and_does_not_matter(store):
    (manifest,) = store.root.glob("*/config.json")
    for text in ("{", "[1]", "[" * 100_000):
        manifest.write_text(text)
        found = store.run("verify")
        assert (found["has_manifest"], found["model"], found["block_bytes"]) == (False, None, None)
        assert found["verification"]["checked"] == found["blocks"] > 0


# -- verify -------------------------------------------------------------------------------------


def test_verify_counts_files_without_a_seal_and_is_content_with_them(store):
    sealed = [path for path in store.blocks if has_seal(path)]
    for path in sealed[:7]:
        os.removexattr(path, "user.kvoffload.xxh3")
    found = store.run("verify")["verification"]
    assert found["checked"] == len(store.blocks)
    assert found["sealed"] == max(0, len(sealed) - 7)
    assert found["sealed"] + found["unsealed"] == found["checked"]
    assert "unsealed" in store.command.run("store", "verify", store.root).stdout


def test_without_a_manifest_the_usual_length_judges_files_without_a_seal(store):
    (manifest,) = store.root.glob("*/config.json")
    manifest.unlink()
    for path in store.blocks:
        if has_seal(path):
            os.removexattr(path, "user.kvoffload.xxh3")
    truncate(store.blocks[3])
    found = store.run("verify", exit_code=1)["verification"]
    assert [bad["path"] for bad in found["corrupt"]] == [str(store.blocks[3])]
    assert found["corrupt"][0]["reason"] == "1000 bytes instead of 4096"


def test_a_namespace_of_other_ranks_and_engines_is_verified(store):
    """vLLM's manifest says nothing of the length that could be relied on."""
    (manifest,) = store.root.glob("*/config.json")
    manifest.write_text(json.dumps({"model_name": "m", "block_bytes": 5}))
    found = store.run("verify")
    assert (found["model"], found["block_bytes"]) == ("m", None)


def test_verify_names_what_cannot_be_read(store, monkeypatch):
    victim = str(store.blocks[2])
    reading, listed = FileOps.pread_into, FileOps.open
    descriptors = set()

    def open_(self, path, flags, mode=0o644):
        if path == str(store.blocks[4]):
            raise PermissionError(13, "Permission denied", path)
        fd = listed(self, path, flags, mode)
        (descriptors.add if path == victim else descriptors.discard)(fd)
        return fd

    def pread_into(self, fd, buffer, offset):
        if fd in descriptors:
            raise OSError(5, "Input/output error")
        return reading(self, fd, buffer, offset)

    monkeypatch.setattr(FileOps, "open", open_)
    monkeypatch.setattr(FileOps, "pread_into", pread_into)
    reasons = {
        bad["path"]: bad["reason"]
        for bad in store.run("verify", exit_code=1)["verification"]["unreadable"]
    }
    assert reasons == {victim: "Input/output error", str(store.blocks[4]): "Permission denied"}
    lines = store.complaints("gc", "--corrupt")
    assert len(lines) == 2


class TestChecker:
    """What happens between the walk and the reading."""

    @pytest.fixture
    def check(self, store, monkeypatch):
        """Verify, with something done to a block's file once it is open."""

        def run(meanwhile, *arguments):
            victim = store.blocks[0]
            get_xattr = FileOps.get_xattr
            num_blocks = len(store.blocks)

            def and_meanwhile(self, fd, name):
                value = get_xattr(self, fd, name)
                if victim.exists() and os.path.samestat(os.fstat(fd), victim.stat()):
                    meanwhile(victim)
                return value

            monkeypatch.setattr(FileOps, "get_xattr", and_meanwhile)
            found = store.run("verify", *arguments)["verification"]
            assert found["checked"] + found["gone"] == num_blocks
            return found

        return run

    def test_a_block_that_is_gone_when_it_is_opened_is_no_problem(self, store, monkeypatch):
        victim = str(store.blocks[0])
        open_ = FileOps.open

        def gone(self, path, flags, mode=0o644):
            if path == victim:
                raise FileNotFoundError(path)
            return open_(self, path, flags, mode)

        monkeypatch.setattr(FileOps, "open", gone)
        assert store.run("verify")["verification"]["gone"] == 1

    def test_a_block_that_is_removed_while_it_is_read_is_no_problem(self, check):
        def remove(path):
            truncate(path)
            path.unlink()

        assert check(remove)["gone"] == 1

    def test_a_block_that_is_replaced_while_it_is_read_is_no_problem(self, check):
        def replace(path):
            good = path.with_suffix(".new")
            good.write_bytes(path.read_bytes())
            truncate(path)
            good.rename(path)

        assert check(replace)["gone"] == 1

    def test_a_block_that_shrinks_while_it_is_read_is_corrupt(self, store, monkeypatch):
        fstat = FileOps.fstat
        victim = store.blocks[0].stat()

        def before_it_shrank(self, fd):
            status = fstat(self, fd)
            if os.path.samestat(status, victim):
                os.ftruncate(os.open(f"/proc/self/fd/{fd}", os.O_WRONLY), 100)
            return status

        monkeypatch.setattr(FileOps, "fstat", before_it_shrank)
        (bad,) = store.run("verify", exit_code=1)["verification"]["corrupt"]
        assert bad["reason"] == "ends after 100 bytes"

    @pytest.mark.parametrize("error", [FileNotFoundError("gone"), PermissionError(13, "refused")])
    def test_a_corrupt_block_that_cannot_be_removed(self, store, monkeypatch, error):
        truncate(store.blocks[0])
        victim = str(store.blocks[0])
        unlink = FileOps.unlink

        def refuse(self, path):
            if path == victim:
                raise error
            unlink(self, path)

        monkeypatch.setattr(FileOps, "unlink", refuse)
        failed = isinstance(error, PermissionError)
        collected = store.run("gc", "--corrupt", exit_code=int(failed))
        assert collected["corrupt"] == []
        assert len(collected["failures"]) == failed


# -- gc -----------------------------------------------------------------------------------------


def test_gc_of_a_tidy_store_does_nothing(store):
    before = store.blocks
    collected = store.run("gc", "--corrupt", "--strangers", "--older-than", 0)
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


def test_gc_removes_strangers_only_when_asked_and_old(store):
    old = store.stranger()
    new = store.stranger("new.txt", age_s=0)
    link = store.blocks[0].parent / f"{'cd' * 16}.bin"
    link.symlink_to(store.blocks[0])
    pipe = store.folder / "pipe"
    os.mkfifo(pipe)
    assert store.run("inspect")["strangers"] == 4
    assert store.run("gc")["strangers"] == []
    assert store.run("gc", "--strangers")["strangers"] == [str(old)]
    assert new.exists()
    removed = store.run("gc", "--strangers", "--older-than", 0)["strangers"]
    assert sorted(removed) == sorted(map(str, (new, link, pipe)))
    assert store.blocks[0].exists()


def test_gc_removes_empty_folders_of_blocks_and_no_others(store):
    empty = store.folder / "fff" / "ff_g0"
    empty.mkdir(parents=True)
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
    empty = store.folder / "fff" / "ff_g0"
    empty.mkdir(parents=True)
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
    temp, vanishing = store.temp(dead.writer_id), store.stranger()
    unlink = FileOps.unlink

    def refuse(self, path):
        if path == str(temp):
            raise PermissionError(13, "Permission denied", path)
        if path == str(vanishing):
            raise FileNotFoundError(path)
        unlink(self, path)

    monkeypatch.setattr(FileOps, "unlink", refuse)
    collected = store.run("gc", "--strangers", exit_code=1)
    assert collected["failures"] == [f"{temp}: Permission denied"]
    assert collected["temps_of_dead"] == collected["strangers"] == []
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


def test_a_count_that_cannot_be_set_right_is_a_failure(bounded, monkeypatch):
    def refuse(self, fd, data, offset):
        raise OSError(28, "No space left on device")

    registered = WriterRegistry.register

    def register(self):
        registered(self)
        monkeypatch.setattr(FileOps, "pwrite", refuse)

    monkeypatch.setattr(WriterRegistry, "register", register)
    failures = bounded.run("gc", exit_code=1)["failures"]
    assert failures == ["the count of bytes: No space left on device"]
    assert list((bounded.folder / ".writers").iterdir()) == []


def test_gc_leaves_a_tier_at_work_in_peace(bounded):
    """Its blocks are stored and loaded as ever, and its count stays right."""
    command = bounded.command
    collected = []
    requests = ChatWorkload._requests

    def with_gc(source):
        for number, blocks in enumerate(requests(source)):
            if number % 50 == 10:
                collected.append(command.run("store", "gc", bounded.root, "--corrupt"))
            yield blocks

    class Workload(ChatWorkload):
        _requests = with_gc

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvoffload_async.cli.app.ChatWorkload", Workload)
        report = command.figures(
            *("--limit", 200, "--primary-blocks", 100, "--block-bytes", 4096),
            *("--tier", f"fs:root_dir={bounded.root},capacity_bytes=1MiB"),
        )
    assert report["corrupt_blocks"] == report["job_failures"] == 0
    assert [result.exit_code for result in collected] == [0] * 4
    assert bounded.run("verify")["problems"] == []


# -- how it is called ---------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["inspect", "verify", "gc"])
class TestInput:
    def test_a_directory_that_is_not_there(self, command, verb):
        message = command.refusal("store", verb, command.directory / "nope")
        assert "nope: cannot be read: No such file or directory" in message

    def test_a_file(self, command, verb):
        message = command.refusal("store", verb, command.file("x"))
        assert "cannot be read: Not a directory" in message

    def test_a_directory_without_a_store(self, command, verb):
        (command.directory / "model_0123456789ab_r0").write_text("a file")
        (command.directory / "model_0123456789ab").mkdir()
        (command.directory / "link_0123456789ab_r0").symlink_to("/")
        assert "no fs store" in command.refusal("store", verb, command.directory)

    def test_a_relative_path_with_detours(self, store, verb, monkeypatch):
        monkeypatch.chdir(store.root.parent)
        assert store.command.run("store", verb, "./store//").exit_code == 0

    def test_ctrl_c(self, store, verb, monkeypatch):
        monkeypatch.setattr(verification, "BATCH_BYTES", 4096)
        dead = store.writer()
        dead.die()
        temp = store.temp(dead.writer_id)
        find = command_module.find_namespaces

        async def and_interrupt(directory):
            namespaces = await find(directory)
            signal.raise_signal(signal.SIGINT)
            return namespaces * 2

        monkeypatch.setattr(command_module, "find_namespaces", and_interrupt)
        result = store.command.run("store", verb, store.root)
        assert result.exit_code == 130
        assert temp.exists()

    def test_the_table_names_the_namespace(self, store, verb):
        result = store.command.run("store", verb, store.root)
        assert result.exit_code == 0
        assert store.folder.name in result.stdout
        assert result.stderr == ""


def test_ctrl_c_in_the_middle_of_gc_leaves_the_count_right(bounded, monkeypatch):
    monkeypatch.setattr(verification, "BATCH_BYTES", 4096)
    for path in bounded.blocks:
        truncate(path)
    num_blocks = len(bounded.blocks)
    check = verification.BlockChecker.check
    calls = itertools.count()

    def and_interrupt(self, blocks):
        if next(calls) == 9:
            os.kill(os.getpid(), signal.SIGINT)
        return check(self, blocks)

    monkeypatch.setattr(verification.BlockChecker, "check", and_interrupt)
    result = bounded.command.run("store", "gc", bounded.root, "--corrupt", "--json")
    assert result.exit_code == 130
    (collected,) = json.loads(result.stdout)["namespaces"]
    assert len(collected["corrupt"]) == num_blocks - len(bounded.blocks) < num_blocks
    assert usage_of(bounded).settled_bytes == disk_bytes(bounded.folder)


def test_names_are_shown_so_that_every_terminal_takes_them():
    assert shown(os.fsdecode(b"caf\xc3\xa9\xff\x1b[2J")) == "café\ufffd\ufffd[2J"
