"""A store of each kind that is looked after, with blocks in it."""

import os
from pathlib import Path

import numpy as np
from slab.stores import flip

from kvoffload_async.facade.tier_factory import SecondaryTierFactory
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.slab.manifest import HEADER_BYTES
from kvoffload_async.types import JobMetadata, ReqContext, as_block_ids

BLOCK = 4096
NUM_BLOCKS = 12
OPTIONS = {
    "fs": {},
    "slab": {"capacity_bytes": "1MiB", "segment_bytes": "32KiB"},
}


def keep_blocks(kind, root, **options):
    """Have a tier store blocks below a directory."""
    buffer = PrimaryBuffer(NUM_BLOCKS, BLOCK)
    np.asarray(buffer.view)[:] = np.arange(NUM_BLOCKS, dtype=np.uint8)[:, None]
    config = {"type": kind, "root_dir": str(root), "model": "m", **OPTIONS[kind], **options}
    tier = SecondaryTierFactory.create_secondary_tier(config, buffer.view, None)
    keys = tuple(key_of(number) for number in range(NUM_BLOCKS))
    tier.submit_store(JobMetadata(1, keys, as_block_ids(range(NUM_BLOCKS)), False, ReqContext("r")))
    assert tier.drain_jobs(30.0)
    assert all(result.success for result in tier.get_finished_jobs())
    tier.shutdown()
    buffer.release()


def damage_a_block(kind, folder):
    if kind == "slab":
        flip(Path(folder) / "segment-000000.slab", HEADER_BYTES + 100)
    else:
        path = min(Path(folder).rglob("*.bin"))
        os.truncate(path, 1000)


def damage_every_block(folder):
    for path in Path(folder).rglob("*.bin"):
        path.write_bytes(b"\xff" * BLOCK)
    for path in Path(folder).glob("*.slab"):
        content = path.read_bytes()
        path.write_bytes(content[:HEADER_BYTES] + b"\xff" * (len(content) - HEADER_BYTES))


def contents(folder):
    """Return every file's bytes, without what says who has the store open."""
    paths = [p for p in Path(folder).rglob("*") if p.is_file() and p.name != "lock"]
    return {str(path): path.read_bytes() for path in paths}
