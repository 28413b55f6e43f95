"""Makes the samples of the formats that this checkout writes.

    PYTHONPATH=.:tests python -m formats.make fs-1-key slab-2-headers

Each is what a killed process leaves: the files are copied while the tier is open.
"""

import hashlib
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
from formats.samples import Opened, Sample, content

from kvoffload_async.tiers.files.identity import boot_id
from kvoffload_async.types import OffloadKey, make_offload_key

NUMBERS = range(24)
WITH_KEY = "-key"
ENCRYPTED = "-encrypted"
NO_BOOT = "00000000-0000-4000-8000-000000000000"


def key_of(number: int) -> OffloadKey:
    """Return a key; every fifth is of another group."""
    return make_offload_key(hashlib.sha256(b"sample %d" % number).digest(), int(number % 5 == 4))


def put(opened: Opened, numbers: range) -> None:
    keys = [key_of(number) for number in numbers]
    opened.store(keys, np.stack([content(number) for number in numbers]))


def fill_fs(root: Path, options: dict, copy: Path) -> None:
    with Opened(root, options) as opened:
        put(opened, NUMBERS[:8])
        shutil.copytree(root, copy)  # copies attributes as well
    for entry in copy.glob("*/.writers/*"):
        entry.write_text(entry.read_text().replace(boot_id(), NO_BOOT))
        folder = next(copy.glob("*_r0/**/*.bin")).parent
        (folder / f"{'ab' * 32}.bin.{entry.name}.7.tmp").write_bytes(bytes(512))


def fill_slab(root: Path, options: dict, copy: Path) -> None:
    with Opened(root, options) as opened:
        put(opened, NUMBERS[:8])
    with Opened(root, options) as opened:  # now it begins with a checkpoint
        put(opened, NUMBERS[8:16])
        opened.load([key_of(number) for number in NUMBERS[:4]])
        put(opened, NUMBERS[16:])
        shutil.copytree(root, copy)


INTEGRITY_KEY = "the key of the samples, and of nothing else"

SLAB = {
    "type": "slab",
    "model": "org/sample",
    "capacity_bytes": "128KiB",
    "segment_bytes": "32KiB",
    "io_threads": 2,
}

FS = {"type": "fs", "model": "org/sample", "capacity_bytes": "1MiB"}

MAKERS = {
    "fs-1": (fill_fs, FS | {"trust_vllm_directory": True}),
    "fs-1-count": (fill_fs, FS | {"trust_vllm_directory": True}),
    "fs-2": (fill_fs, FS),
    "fs-2-count": (fill_fs, FS),
    "slab-2-headers": (fill_slab, SLAB),
    "slab-3": (fill_slab, SLAB | {"capacity_bytes": "256KiB"}),
}


def make(name: str) -> None:
    fill, tier = MAKERS[name.removesuffix(WITH_KEY).removesuffix(ENCRYPTED)]
    sample = Sample(name, tier)
    if name.endswith(WITH_KEY):
        sample.integrity_key = INTEGRITY_KEY
    if name.endswith(ENCRYPTED):
        sample.encryption_key = INTEGRITY_KEY
    with tempfile.TemporaryDirectory() as folder:
        copy, looked_at = Path(folder, "copy"), Path(folder, "looked-at")
        options = sample.options(Path(folder))
        fill(Path(folder, "root"), options, copy)
        shutil.copytree(copy, looked_at)
        with Opened(looked_at, options) as opened:
            found = opened.load([key_of(number) for number in NUMBERS])
        for number in NUMBERS:
            if key_of(number) in found:
                assert found[key_of(number)] == bytes(content(number))
                sample.blocks[key_of(number).hex()] = number
        sample.write(copy)
    print(name, len(sample.blocks), "blocks")  # noqa: T201 - a script's output


if __name__ == "__main__":
    for given in sys.argv[1:]:
        make(given)
