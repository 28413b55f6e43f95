"""A directory of the fs tier with what a replay has left in it, and what may happen to it."""

import json
import os
import time

from kvoffload_async.replay.source import ChatWorkload
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.fs.layout import counted_bytes
from kvoffload_async.tiers.fs.usage import read_usage
from kvoffload_async.tiers.fs.writers import WriterRegistry

HOUR_S = 3600


class Store:
    """A directory of the fs tier with what a replay has left in it."""

    def __init__(self, command, *options):
        self.command = command
        self.root = command.directory / "store"
        self.options = "".join(f",{option}" for option in options)
        self.trace = command.trace(list(ChatWorkload(limit=5)))
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

    def unknown_file(self, name="notes.txt", *, age_s=2.0 * HOUR_S):
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
        if "--verbose" in arguments:  # the log is among them
            lines = [line for line in lines if line.startswith("kvoffload: error: ")]
        assert all(line.startswith("kvoffload: error: ") for line in lines)
        return lines


def has_digest(path):
    try:
        return bool(os.getxattr(path, "user.kvoffload.xxh3"))
    except OSError:
        return False


def truncate(path):
    os.truncate(path, 1000)


def usage_of(store):
    usage = read_usage(FileOps(), str(store.folder))
    assert usage is not None
    return usage


def disk_bytes(folder):
    paths = [folder, *folder.rglob("*")]
    return sum(counted_bytes(path.lstat()) for path in paths)
