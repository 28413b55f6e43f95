"""What other users do with a directory, each in a child that has become that user. A script."""

import os
import tempfile
from pathlib import Path

from crashes import load, serve
from fs.directories import FsDirectory
from slab.stores import SlabStore

from kvoffload_async.errors import OffloadError
from kvoffload_async.testing.harness import key_of

OPEN = {"fs": FsDirectory, "slab": SlabStore}


def work(tier: str, root: str, user: int, group: int, *, numbers: list, wanted: list, **options):
    """Become a user, and do what `use` does."""
    os.setgroups([group])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    os.umask(0o077)  # as some services have it
    return use(tier, root, numbers, wanted, **options)


def use(tier: str, root: str, numbers: list, wanted: list, **options) -> dict:
    """Store some blocks and load others; return which failed, and how."""
    try:
        with OPEN[tier](Path(root)).open(**options) as harness:
            stored = harness.store([key_of(number) for number in numbers])
            missing = load(harness, [key_of(number) for number in wanted])
    except OffloadError as error:
        return {"refused": str(error)}
    return {
        "not_stored": {numbers[i]: type(error).__name__ for i, error in stored.items()},
        "not_loaded": {wanted[i]: type(error).__name__ for i, error in missing.items()},
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:  # what is imported late another user cannot read
        for tier in OPEN:
            use(tier, f"{folder}/{tier}", [1], [1, 2], verify="required" if tier == "fs" else True)
    serve(work=work)
