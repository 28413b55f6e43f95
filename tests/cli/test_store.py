"""How `kvoffload store` is called, interrupted, and answers people."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from kvoffload_async.cli import store as store_command
from kvoffload_async.cli.output import shown
from kvoffload_async.tiers.fs.maintenance import inspection as verification


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
        find = store_command.find_stores

        async def and_interrupt(directory):
            stores = await find(directory)
            signal.raise_signal(signal.SIGINT)
            return stores * 2

        monkeypatch.setattr(store_command, "find_stores", and_interrupt)
        result = store.command.run("store", verb, store.root)
        assert result.exit_code == 130
        assert temp.exists()

    def test_the_table_names_the_namespace(self, store, verb):
        result = store.command.run("store", verb, store.root)
        assert result.exit_code == 0
        assert store.folder.name in result.stdout
        assert result.stderr == ""


def test_names_are_shown_so_that_every_terminal_takes_them():
    assert shown(os.fsdecode(b"caf\xc3\xa9\xff\x1b[2J")) == "café\ufffd\ufffd[2J"


def test_verbose_tells_of_each_store_as_it_is_looked_at(store):
    quiet = store.command.run("store", "verify", store.root)
    assert quiet.stderr == ""
    os.truncate(store.blocks[0], 1000)
    lines = store.command.run("store", "verify", store.root, "-v").stderr.splitlines()
    assert "a store of the fs tier" in lines[0]
    assert ".bin: 1000 bytes instead of 4096" in lines[1]
    assert "done after" in lines[2]


class TestManyBadBlocks:
    """What is wrong with many blocks is told in few lines, unless somebody wants to see all."""

    @pytest.fixture
    def damaged(self, store):
        for path in store.blocks:
            os.truncate(path, 1000)
        return store

    def test_verify_names_the_first_ten_and_counts_all(self, damaged):
        num_blocks = len(damaged.blocks)
        *named, rest = damaged.complaints("verify")
        assert len(named) == 10
        assert all(".bin: 1000 bytes instead of 4096" in line for line in named)
        assert f"{damaged.folder.name}: and {num_blocks - 10:,} more; see --verbose" in rest
        assert f"{num_blocks:,}" in damaged.command.run("store", "verify", damaged.root).stdout

    def test_all_of_them_are_named_on_demand(self, damaged):
        lines = damaged.complaints("verify", "--verbose")
        assert {line.split(": ")[4] for line in lines} == {str(path) for path in damaged.blocks}

    def test_a_report_counts_them_all_and_lists_ten_or_all(self, damaged):
        num_blocks = len(damaged.blocks)
        for arguments, num_listed in (([], 10), (["--verbose"], num_blocks)):
            found = damaged.run("verify", *arguments, exit_code=1)["verification"]
            assert (found["corrupt_blocks"], found["checked"]) == (num_blocks, num_blocks)
            assert len({bad["what"] for bad in found["corrupt"]}) == num_listed

    def test_ten_bad_blocks_are_all_that_there_is(self, store):
        for path in store.blocks[:10]:
            os.truncate(path, 1000)
        assert len(store.complaints("verify")) == 10

    def test_a_dry_run_of_gc_is_as_short(self, damaged):
        lines = damaged.complaints("gc", "--corrupt", "--dry-run")
        assert len(lines) == 11
        assert len(damaged.complaints("gc", "--corrupt", "--dry-run", "--verbose")) == len(
            damaged.blocks
        )

    def test_another_stores_problems_are_not_left_out(self, damaged):
        other = shutil.copytree(damaged.folder, f"{str(damaged.folder)[:-1]}1")
        result = damaged.command.run("store", "verify", damaged.root)
        for name in (damaged.folder.name, Path(other).name):
            assert sum(f"error: {name}: " in line for line in result.stderr.splitlines()) == 11
