"""A directory with a slab store in it, and the tier that fills it."""

import json
from pathlib import Path

import numpy as np
from slab.stores import flip

from kvoffload_async.facade.secondary import SlabTierManager
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.slab.addresses import segment_of, slot_of
from kvoffload_async.tiers.slab.layout import JOURNAL, LOCK, MANIFEST, segment_name
from kvoffload_async.tiers.slab.maintenance.inspection import read_contents
from kvoffload_async.tiers.slab.records import addresses_of, keys_of
from kvoffload_async.types import JobMetadata, LookupResult, ReqContext, as_block_ids

BLOCK = 4096
NUM_BLOCKS = 12


class Slab:
    """A directory with a slab store in it, and the tier that fills it."""

    def __init__(self, command, name="root"):
        self.command = command
        self.root = command.directory / name
        self.buffer = PrimaryBuffer(NUM_BLOCKS, BLOCK)
        self.rows = np.asarray(self.buffer.view)
        self.truth = np.random.default_rng(7).integers(
            256, size=(NUM_BLOCKS, BLOCK), dtype=np.uint8
        )

    def close(self):
        del self.rows
        self.buffer.release()

    @property
    def folder(self):
        return self.root / "m_r0"

    @property
    def journal(self):
        return self.folder / JOURNAL

    @property
    def manifest(self):
        return self.folder / MANIFEST

    def contents(self):
        return read_contents(FileOps(), str(self.folder))

    def open(self, **options):
        options = {"capacity_bytes": "1MiB", "segment_bytes": "32KiB", "model": "m"} | options
        return SlabTierManager(None, self.buffer.view, root_dir=str(self.root), **options)

    def job(self, tier, keys, *, is_load=False):
        request = ReqContext("r")
        rows = as_block_ids(keys)
        job = JobMetadata(1, tuple(map(key_of, keys)), rows, is_load, request)
        (tier.submit_load if is_load else tier.submit_store)(job)
        assert tier.drain_jobs(30.0)
        (result,) = tier.get_finished_jobs()
        return result

    def store_blocks(self, keys=range(NUM_BLOCKS), **options):
        tier = self.open(**options)
        self.rows[:] = self.truth
        assert self.job(tier, keys).success
        tier.shutdown()

    def served(self, **options):
        """Open the store; return the numbers of the blocks that it serves, each with its bytes."""
        tier = self.open(**options)
        self.rows[:] = 0
        known = [
            i
            for i in range(NUM_BLOCKS)
            if tier.lookup(key_of(i), ReqContext("r")) is LookupResult.HIT
        ]
        result = self.job(tier, known, is_load=True)
        right = result.successful_keys or ()
        loaded = [i for i in known if result.success or key_of(i) in right]
        tier.shutdown()
        assert all(np.array_equal(self.rows[i], self.truth[i]) for i in loaded)
        return loaded

    def address(self, number):
        contents = self.contents()
        addresses = dict(zip(keys_of(contents.live), addresses_of(contents.live), strict=True))
        address = addresses[key_of(number)]
        offset = contents.manifest.offset_of(slot_of(address))
        return self.folder / segment_name(segment_of(address)), offset

    def offset_of(self, slot):
        return self.contents().manifest.offset_of(slot)

    def flip(self, number, at=100):
        path, offset = self.address(number)
        flip(path, offset + at)

    def run(self, verb, *arguments, exit_code=0, directory=None):
        result = self.command.run("store", verb, directory or self.root, "--json", *arguments)
        assert exit_code is None or result.exit_code == exit_code, result.output
        report = json.loads(result.stdout)
        assert report["namespaces"] == []
        (store,) = report["slab_stores"]
        assert store["name"] == "m_r0"
        return store

    def complaints(self, verb, *arguments):
        result = self.command.run("store", verb, self.root, *arguments)
        assert result.exit_code == 1, result.output
        lines = result.stderr.splitlines()
        assert all(line.startswith("kvoffload: error: m_r0: ") for line in lines)
        return [line.removeprefix("kvoffload: error: m_r0: ") for line in lines]

    def files(self):
        return {p.name: p.read_bytes() for p in self.folder.iterdir() if p.name != LOCK}


def deaf_to(name):
    """Return system calls that cannot read a file of this name."""

    class Deaf(FileOps):
        def pread_into(self, fd, buffer, offset):
            if Path(f"/proc/self/fd/{fd}").readlink().name == name:
                raise OSError(5, "Input/output error")
            return super().pread_into(fd, buffer, offset)

    return Deaf
