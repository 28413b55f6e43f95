"""Cleans up a slab store, and repairs it; both need it for themselves.

What is kept is written beside the old file and renamed over it, so that a repair that is killed
leaves what it found.
"""

from __future__ import annotations

import os
import stat as stat_module
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import anyio.to_thread
import numpy as np

from kvoffload_async.cli.store.slab.inspection import inspection_of
from kvoffload_async.cli.store.slab.manifests import recover_manifest
from kvoffload_async.cli.store.slab.stores import (
    Contents,
    SlabStore,
    locked,
    read_contents,
)
from kvoffload_async.cli.store.slab.verification import BadSlot, Judged, verify_slab
from kvoffload_async.cli.store.survey import Walker
from kvoffload_async.cli.store.wishes import Wishes
from kvoffload_async.tiers.files.ops import FileOps, disk_bytes, write_all
from kvoffload_async.tiers.slab.layout import JOURNAL, MANIFEST, TEMP_SUFFIX
from kvoffload_async.tiers.slab.manifest import Manifest
from kvoffload_async.tiers.slab.records import SUSPECT, Records, seed_of, snapshot


@dataclass(slots=True)
class Mended:
    """What was removed from one store, written anew, or would be.

    Attributes:
        name: The store's folder's name.
        dry_run: Whether nothing was changed.
        blocks: Blocks that are kept.
        temps: Files that a killed writer had left.
        strangers: Files that are no part of a store.
        dropped: Blocks that do not verify, or cannot be read.
        manifest_rebuilt: Whether the manifest was written anew.
        journal_rebuilt: Whether the journal was.
        freed_bytes: Disk bytes of the files; the places of dropped blocks stay, free.
        failures: What could not be done, and why.
    """

    name: str
    dry_run: bool
    blocks: int = 0
    temps: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)
    dropped: list[BadSlot] = field(default_factory=list)
    manifest_rebuilt: bool = False
    journal_rebuilt: bool = False
    freed_bytes: int = 0
    failures: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return asdict(self)

    @property
    def still_wrong(self) -> list[str]:
        """What a dry run has left as it is, though it is wrong, a line each."""
        if not self.dry_run:
            return []
        return [
            *(f"corrupt: {block}" for block in self.dropped),
            *(f"left by a killed writer: {name}" for name in self.temps),
        ]


async def collect_slab(walker: Walker, store: SlabStore, wishes: Wishes) -> Mended:
    """Clean up a store; once stopped, what is left to do is left out.

    Raises:
        InputError: It is in use, or cannot be written to.
        OSError: A file cannot be read.
    """
    mended = Mended(store.name, wishes.dry_run)
    if wishes.dry_run:
        await _collect(walker, store, wishes, mended)
    else:
        with locked(walker.ops, store):
            await _collect(walker, store, wishes, mended)
    return mended


async def repair_slab(walker: Walker, store: SlabStore, given: Manifest | None) -> Mended:
    """Keep all that verifies, and drop the rest; changes nothing where nothing is wrong.

    Args:
        walker: What the work shares.
        store: The store.
        given: The manifest of a store of the same layout, should its own one be lost.

    Raises:
        InputError: It is in use, or cannot be written to.
        OSError: A file cannot be read.
    """
    mended = Mended(store.name, dry_run=False)
    run = partial(anyio.to_thread.run_sync, limiter=walker.limiter)
    with locked(walker.ops, store):
        contents = await run(read_contents, walker.ops, store)
        if contents.manifest is None:
            manifest = await run(recover_manifest, walker.ops, store, given)
            if manifest is None:
                mended.failures.append(
                    f"{contents.manifest_problem}, and nothing says what its blocks are; give "
                    f"--manifest with the {MANIFEST} of a store of the same model and block size"
                )
                return mended
            contents = await run(read_contents, walker.ops, store, manifest)
            mended.manifest_rebuilt = True
        judged = await verify_slab(walker, store, contents)
        if not walker.should_stop():
            await run(_rebuild, walker.ops, store, contents, judged, mended)
    return mended


async def _collect(walker: Walker, store: SlabStore, wishes: Wishes, mended: Mended) -> None:
    run = partial(anyio.to_thread.run_sync, limiter=walker.limiter)
    contents = await run(read_contents, walker.ops, store)
    if contents.manifest_problem:
        mended.failures.append(f"{contents.manifest_problem}; see repair")
    mended.blocks = len(contents.live)
    if wishes.corrupt and contents.manifest is not None:
        judged = await verify_slab(walker, store, contents)
        if walker.should_stop():
            return
        await run(_drop_corrupt, walker.ops, store, contents, judged, mended)
    await run(_remove_files, walker.ops, store, contents, wishes, mended)


def _rebuild(
    ops: FileOps, store: SlabStore, contents: Contents, judged: Judged, mended: Mended
) -> None:
    """Write what was found to be lost or damaged anew, and look whether all is right then."""
    manifest, scanned = contents.manifest, contents.scanned
    if manifest is None:
        return
    mended.dropped = [*judged.found.corrupt, *judged.found.unreadable]
    kept = contents.live[judged.is_good]
    kept["flags"] &= np.uint16(0xFFFF ^ SUSPECT)  # they have verified
    is_damaged = (
        mended.dropped
        or scanned.lost_bytes
        or contents.journal_bytes != scanned.end_bytes
        or not contents.found.has_journal
    )
    try:
        if mended.manifest_rebuilt:
            _replace(ops, store, MANIFEST, [manifest.encode()])
        if is_damaged:
            _write_journal(ops, store, contents, kept)
            mended.journal_rebuilt = True
        for name in contents.found.temps:
            _remove(ops, store, name, mended.temps, mended)
        now = read_contents(ops, store)
    except OSError as error:
        mended.failures.append(f"cannot be written: {error.strerror or error}")
        return
    mended.blocks = len(now.live)
    mended.failures += inspection_of(store, now, None).problems
    if len(now.live) != len(kept):
        mended.failures.append(f"{len(now.live)} blocks are there instead of {len(kept)}")


def _drop_corrupt(
    ops: FileOps, store: SlabStore, contents: Contents, judged: Judged, mended: Mended
) -> None:
    mended.dropped = list(judged.found.corrupt)
    mended.failures += [f"unreadable: {block}" for block in judged.found.unreadable]
    if not mended.dropped:
        return
    kept = contents.live[judged.is_good | judged.is_unreadable]
    mended.blocks = len(kept)
    if not mended.dry_run:
        _write_journal(ops, store, contents, kept)
        mended.journal_rebuilt = True


def _remove_files(
    ops: FileOps, store: SlabStore, contents: Contents, wishes: Wishes, mended: Mended
) -> None:
    for name in contents.found.temps:
        _remove(ops, store, name, mended.temps, mended)
    if not wishes.strangers:
        return
    for name in contents.found.strangers:
        status = ops.stat(f"{store.folder}/{name}")
        is_old = time.time() - status.st_mtime >= wishes.older_than_s
        if is_old and not stat_module.S_ISDIR(status.st_mode):
            _remove(ops, store, name, mended.strangers, mended)


def _remove(ops: FileOps, store: SlabStore, name: str, removed: list[str], mended: Mended) -> None:
    path = f"{store.folder}/{name}"
    try:
        size_bytes = disk_bytes(ops.stat(path))
        if not mended.dry_run:
            ops.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        mended.failures.append(f"{name}: cannot be removed: {error.strerror or error}")
        return
    removed.append(name)
    mended.freed_bytes += size_bytes


def _write_journal(ops: FileOps, store: SlabStore, contents: Contents, kept: Records) -> None:
    """Write a journal that says where these blocks are, and nothing else."""
    if contents.manifest is None:
        return
    seed = seed_of(contents.manifest.layout)
    _replace(ops, store, JOURNAL, snapshot(contents.scanned.generation + 1, kept, seed))


def _replace(ops: FileOps, store: SlabStore, name: str, parts: Iterable[bytes]) -> None:
    """Write a file beside the old one, and rename it over that once it is on the device."""
    temp = f"{store.folder}/{name}{TEMP_SUFFIX}"
    fd = ops.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        offset = 0
        for part in parts:
            offset += write_all(ops, fd, part, offset)
        ops.fdatasync(fd)
    finally:
        ops.close(fd)
    ops.rename(temp, f"{store.folder}/{name}")
