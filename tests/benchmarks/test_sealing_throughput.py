"""What encryption costs in CPU time: `fs` blocks encrypted and verified, in turn, in one run.

Run with `--benchmark-enable -s` for the measured sizes; as a plain test it is one small round.
"""

import os
import statistics
import time

import numpy as np
import pytest
from fs.directories import FsDirectory

from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.files.sealing import EncryptionKey
from kvoffload_async.tiers.fs.blockfile import BlockFiles
from kvoffload_async.tiers.fs.digest_attribute import ATTRIBUTE
from kvoffload_async.tiers.fs.operations import StoreItem, Verify
from kvoffload_async.tiers.fs.settings import FsSettings
from kvoffload_async.tiers.fs.writers import WriterRegistry

KIB = 1024
MIB = 1024 * KIB
OPTIONS = {"verified": {}, "encrypted": {"encryption_keys": (EncryptionKey(bytes(32)),)}}


def block_files(folder, block_bytes: int, options) -> BlockFiles:
    directory = FsDirectory(folder)
    directory.folder.mkdir(parents=True)
    settings = FsSettings(root_dir=str(folder), run_config={}, verify=Verify.REQUIRED, **options)
    writers = WriterRegistry(FileOps(), str(directory.folder))
    writers.writer_id = "0" * 8
    return BlockFiles(FileOps(), directory.namespace, writers, settings, block_bytes)


@pytest.mark.bench
@pytest.mark.parametrize("block_kib", [64, 1024])
def test_encrypted_and_verified_blocks(block_kib, request, tmp_path):
    try:
        os.setxattr(tmp_path, ATTRIBUTE, b"")
    except OSError:
        pytest.skip("no extended attributes here")
    is_measured = request.config.getoption("--benchmark-enable")
    rounds, total_bytes = (15, 64 * MIB) if is_measured else (1, 2 * MIB)
    block_bytes = block_kib * KIB
    shape = (total_bytes // block_bytes, block_bytes)
    blocks = np.random.default_rng(0).integers(256, size=shape, dtype=np.uint8)
    rows = list(map(memoryview, blocks))
    target = np.zeros_like(blocks)
    keys = [key_of(number) for number in range(len(rows))]
    files = {
        name: block_files(tmp_path / name, block_bytes, options)
        for name, options in OPTIONS.items()
    }
    took_s = {(name, what): [] for name in files for what in ("stores", "loads")}
    for _ in range(rounds):
        for name, each in files.items():
            begun_s = time.thread_time()
            each.store([StoreItem(i, key, i) for i, key in enumerate(keys)], rows.__getitem__)
            stored_s = time.thread_time()
            failures = []
            each.load(zip(range(len(keys)), keys, map(memoryview, target), strict=True), failures)
            took_s[name, "loads"].append(time.thread_time() - stored_s)
            took_s[name, "stores"].append(stored_s - begun_s)
            assert not failures
            assert (target == blocks).all()
            each.remove(keys)
    for what in ("stores", "loads"):
        middle = {name: statistics.median(took_s[name, what]) for name in files}
        rates = {name: total_bytes / MIB / s for name, s in middle.items()}
        share = rates["encrypted"] / rates["verified"]
        shown = ", ".join(f"{name} {rate:,.0f} MiB/s" for name, rate in rates.items())
        print(f"\n{block_kib} KiB, {what}: {shown}: {share:.2f}")  # noqa: T201 - the figures
        assert share > 0
