"""Finding, locking and reading slab stores.

Reading is safe while a tier is open: the journal is read before the segments are listed, so that
missing segments were removed in between. Thread: any; calls block.
"""

from __future__ import annotations

import os
import stat as stat_module
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kvoffload_async.errors import InputError
from kvoffload_async.tiers.files.digests import IntegrityKey
from kvoffload_async.tiers.files.features import NewerFormatError
from kvoffload_async.tiers.files.identity import boot_id
from kvoffload_async.tiers.files.locks import InUseError, holder_of, lock_for_process
from kvoffload_async.tiers.files.ops import FileOps, NotRegularFileError
from kvoffload_async.tiers.slab.layout import JOURNAL, LOCK, MANIFEST, segment_number
from kvoffload_async.tiers.slab.manifest import Manifest, UnreadableManifestError
from kvoffload_async.tiers.slab.records import (
    KEYED,
    NEEDS_VERIFY,
    RecordRows,
    Records,
    Scan,
    keys_of,
    scan,
)
from kvoffload_async.tiers.slab.recovery import (
    Folder,
    by_use,
    list_folder,
    live_in,
    note_uses,
    read_if_there,
    read_manifest,
    read_session,
    refuse_strange_segments,
)

_KEY_MISSING = "its checksums are made with an integrity key; give --integrity-key-file"


@dataclass(frozen=True, slots=True)
class SlabStore:
    """A folder with the files of a slab store, intact or not."""

    folder: str

    @property
    def name(self) -> str:
        """Name of the folder."""
        return os.path.basename(self.folder)  # noqa: PTH119 - paths are text here, as in the tier


def find_slab_stores(ops: FileOps, directory: str) -> list[SlabStore]:
    """Return the stores at or directly inside a directory (absolute path), sorted by name.

    Raises:
        InputError: The directory cannot be read.
    """
    try:
        ops.enter(directory, make=False)
        inside = ops.entries(directory)
        folders = sorted(path for path, status in inside if stat_module.S_ISDIR(status.st_mode))
        found = [path for path in (directory, *folders) if _is_store(ops, path)]
    except OSError as error:
        raise InputError(f"{directory}: cannot be read: {error.strerror or error}") from error
    return [SlabStore(path) for path in found]


def _is_store(ops: FileOps, folder: str) -> bool:
    try:
        entries = ops.entries(folder)
    except (PermissionError, FileNotFoundError, NotADirectoryError):
        return False
    names = {
        path.rpartition("/")[2] for path, status in entries if stat_module.S_ISREG(status.st_mode)
    }
    return not names.isdisjoint({MANIFEST, JOURNAL}) or any(
        segment_number(name) is not None for name in names
    )


def user_of(ops: FileOps, store: SlabStore) -> str | None:
    """Return the pid of the process that has a store open, "unknown" if not recorded, or None."""
    try:
        return holder_of(ops, f"{store.folder}/{LOCK}")  # its own lock is released at once
    except (FileNotFoundError, NotRegularFileError):
        return None


@contextmanager
def locked(ops: FileOps, store: SlabStore) -> Iterator[None]:
    """Lock a store, so that no tier can open it.

    Raises:
        InputError: A tier has it open, or it cannot be written to.
    """
    try:
        fd = lock_for_process(ops, f"{store.folder}/{LOCK}")
    except InUseError as error:
        raise InputError(
            f"{store.folder}: already opened by process {error}; close it there first: "
            "gc needs exclusive access (inspect and verify do not)"
        ) from None
    except OSError as error:
        raise InputError(f"{store.folder}: cannot be written: {error.strerror or error}") from error
    try:
        yield
    finally:
        ops.close(fd)


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of a store's files.

    Attributes:
        manifest: The manifest; None if unreadable.
        manifest_problem: Why the manifest is unreadable, and the remedy.
        found: The files.
        scanned: The valid part of the journal.
        journal_bytes: Length of the journal.
        is_trusted: Whether the journal is believed to match the slots' contents.
        live: Records of existing blocks, oldest first; those recorded before damage, or in an
            untrusted journal, are marked for verification.
    """

    manifest: Manifest | None
    manifest_problem: str | None
    found: Folder
    scanned: Scan
    journal_bytes: int
    is_trusted: bool
    live: Records

    @property
    def slots(self) -> dict[int, int]:
        """Segment -> number of slots."""
        if self.manifest is None:
            return {}
        slots_in = self.manifest.slots_in
        return {number: slots_in(length) for number, length in self.found.segments.items()}


def read_known_manifest(
    ops: FileOps, store: SlabStore, *, for_writing: bool
) -> tuple[Manifest | None, str | None]:
    """Return the manifest; or None, and why this release cannot use the store.

    Raises:
        OSError: The manifest cannot be read.
    """
    try:
        if manifest := read_manifest(ops, store.folder, for_writing=for_writing):
            return manifest, None
        problem = "the manifest is missing"
    except NewerFormatError as error:
        return None, f"the store is of a newer release: {error}"
    except UnreadableManifestError as error:
        problem = f"the manifest is unreadable: {error}"
    except NotRegularFileError:
        problem = "the manifest is not a regular file"
    return None, f"{problem}; no tier can open the store: remove the folder {store.folder}"


def read_contents(ops: FileOps, store: SlabStore) -> Contents:
    """Read a store without changing it.

    Raises:
        OSError: A file cannot be read.
    """
    manifest, problem = read_known_manifest(ops, store, for_writing=False)
    journal = read_if_there(ops, f"{store.folder}/{JOURNAL}")
    scanned = scan(journal if manifest else bytearray(), manifest.journal_seed if manifest else 0)
    found = list_folder(ops, store.folder)
    live, is_trusted = scanned.records[:0], True
    if manifest is not None:
        refuse_strange_segments(ops, store.folder, found, manifest)
        session = read_session(ops, store.folder, manifest.journal_seed)
        is_trusted = session.is_trusted(boot_id(), scanned.sequence)
        rows = live_in(found, scanned, manifest)
        note_uses(scanned, rows, session)
        rows = by_use(scanned, rows)
        live = scanned.units[rows]
        live["flags"][(rows < scanned.damage_at) | (not is_trusted)] |= NEEDS_VERIFY
        live = _last_of_each_key(live, rows)
    return Contents(manifest, problem, found, scanned, len(journal), is_trusted, live)


def key_problem(contents: Contents, key: IntegrityKey | None) -> str | None:
    """Return why checksums cannot be verified with this key, or None if they can be."""
    if contents.manifest is None:
        return None
    key_id = contents.manifest.key_id
    has_keyed = key_id is not None or bool((contents.scanned.records["flags"] & KEYED).any())
    if key is None:
        return _KEY_MISSING if has_keyed else None
    if key_id is None:
        return "its checksums are made without an integrity key, but one is given"
    if key_id != key.id.hex():
        return f"it has another integrity key, with the id {key_id}"
    return None


def _last_of_each_key(live: Records, rows: RecordRows) -> Records:
    """Drop records of keys that are recorded again later; duplicates exist only after damage."""
    in_order = np.argsort(rows)
    last = dict(zip(keys_of(live[in_order]), in_order.tolist(), strict=True))
    return live[np.array(sorted(last.values()), dtype=np.int64)]
