"""Finding and reading slab stores, and recovering lost manifests.

Reading is safe while a tier is open: the journal is read before the segments are listed, so that
missing segments were removed in between.

The layout seeds every checksum in the journal. If the manifest is damaged or missing, every layout
found elsewhere is tried, until one verifies the journal.

Thread: any; calls block, except for `newer_format`.
"""

from __future__ import annotations

import json
import os
import re
import stat as stat_module
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from kvoffload_async.errors import ConfigError, InputError
from kvoffload_async.tiers.files.digests import IntegrityKey
from kvoffload_async.tiers.files.features import (
    MalformedFormatError,
    NewerFormatError,
    check_format,
)
from kvoffload_async.tiers.files.identity import boot_id
from kvoffload_async.tiers.files.locks import InUseError, holder_of, lock_for_process
from kvoffload_async.tiers.files.maintenance import MaintenanceIo
from kvoffload_async.tiers.files.ops import FileOps, NotRegularFileError, read_file
from kvoffload_async.tiers.slab.layout import (
    JOURNAL,
    LOCK,
    MANIFEST,
    TEMP_SUFFIX,
    StoreLayout,
    segment_name,
    segment_number,
    slot_bytes_of,
)
from kvoffload_async.tiers.slab.manifest import (
    FORMAT,
    HEADER_BYTES,
    KNOWN,
    OF_EVERY_STORE,
    VERSION,
    Manifest,
    SegmentHeader,
    UnreadableManifestError,
)
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
    MAX_MANIFEST_BYTES,
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
            "gc and repair need exclusive access (inspect and verify do not)"
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
        manifest_problem: Why the manifest is unreadable.
        is_newer: Whether the store was written by a newer release.
        found: The files.
        scanned: The valid part of the journal.
        journal_bytes: Length of the journal.
        is_trusted: Whether the journal is believed to match the slots' contents.
        live: Records of existing blocks, oldest first; those recorded before damage, or in an
            untrusted journal, are marked for verification.
    """

    manifest: Manifest | None
    manifest_problem: str | None
    is_newer: bool
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


def read_contents(ops: FileOps, store: SlabStore, manifest: Manifest | None = None) -> Contents:
    """Read a store without changing it; `manifest` overrides the stored one.

    Raises:
        OSError: A file cannot be read.
    """
    problem, is_newer = None, False
    if manifest is None:
        try:
            manifest = read_manifest(ops, store.folder, for_writing=False)
            problem = None if manifest else "the manifest is missing"
        except NewerFormatError as error:
            problem, is_newer = f"the store is of a newer release: {error}", True
        except UnreadableManifestError as error:
            problem = f"the manifest is unreadable: {error}"
        except NotRegularFileError:
            problem = "the manifest is not a regular file"
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
    return Contents(manifest, problem, is_newer, found, scanned, len(journal), is_trusted, live)


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


_LAYOUT: Final = re.compile(r"([0-9a-f]{12}):([0-9]{1,9}):([1-9][0-9]{0,14})")
_IN_MANIFEST: Final = re.compile(rb'"layout": "([^"]*)"')
_VERSION_IN_MANIFEST: Final = re.compile(rb'^  "version": ([0-9]{1,9})', re.MULTILINE)
_RANK: Final = re.compile(
    r".*_r([0-9]{1,9})(?:_([0-9a-f]{12})_([0-9]+)(?:_k[0-9a-f]{16})?)?", re.DOTALL
)


def decode_given(content: bytes) -> Manifest:
    """Decode a manifest given by the caller.

    Raises:
        ConfigError: It is not a valid manifest.
    """
    try:
        return Manifest.decode(content)
    except (UnreadableManifestError, NewerFormatError) as error:
        raise ConfigError(str(error)) from error


async def newer_format(io: MaintenanceIo, store: SlabStore) -> str | None:
    """Return why this release must not change a store of a newer release; None if it may.

    Also trusts the version number of a damaged manifest.

    Raises:
        OSError: The manifest cannot be read.
    """
    try:
        content = await io.read_file(f"{store.folder}/{MANIFEST}", MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        return None
    try:
        Manifest.decode(content)
    except NewerFormatError as error:
        return f"the store is of a newer release: {error}"
    except UnreadableManifestError as error:
        version = max(map(int, _VERSION_IN_MANIFEST.findall(content)), default=0)
        if version > VERSION:
            return (
                f"the manifest is unreadable: {error}; it needs a release that "
                f"knows format {version}"
            )
    return None


def recover_manifest(
    ops: FileOps, store: SlabStore, given: Manifest | None, key: IntegrityKey | None
) -> Manifest | None:
    """Reconstruct the manifest of a store; None if no candidate verifies the journal.

    Args:
        ops: System calls.
        store: The store.
        given: The manifest of a store of the same layout, of any rank.
        key: The integrity key, if the checksums are keyed.
    """
    journal = read_if_there(ops, f"{store.folder}/{JOURNAL}")
    store_uuid = _uuid_in_segments(ops, store)
    if store_uuid is None:
        return None
    for found in _candidates(ops, store, given):
        candidate = replace(found, store_uuid=store_uuid)
        records = scan(journal, candidate.journal_seed).records
        if len(records):
            is_keyed = bool((records["flags"] & KEYED).any())
            key_id = key.id.hex() if key is not None and is_keyed else None
            return candidate.with_key(key_id)
    return None


def _uuid_in_segments(ops: FileOps, store: SlabStore) -> str | None:
    """Return the UUID in most segment headers; None if there are none."""
    uuids: Counter[str] = Counter()
    for number in list_folder(ops, store.folder).segments:
        path = f"{store.folder}/{segment_name(number)}"
        header = SegmentHeader.decode(bytes(read_file(ops, path, HEADER_BYTES)))
        if header is not None:
            uuids[header.store_uuid] += 1
    return max(uuids, key=lambda each: uuids[each], default=None)


def _candidates(ops: FileOps, store: SlabStore, given: Manifest | None) -> Iterator[Manifest]:
    match = _RANK.fullmatch(store.name)
    ranks = [int(match[1])] if match else []
    if match and match[2]:
        yield _named(f"{match[2]}:{match[1]}:{match[3]}", {"model_name": store.name})
    for name in (MANIFEST, MANIFEST + TEMP_SUFFIX):
        yield from _remains(ops, f"{store.folder}/{name}")
    if given is not None:
        yield given
        yield from _of_ranks(given, ranks)
    for path, _ in sorted(_beside(ops, store)):
        try:
            content = bytes(read_file(ops, f"{path}/{MANIFEST}", MAX_MANIFEST_BYTES))
            yield from _of_ranks(Manifest.decode(content, for_writing=False), ranks)
        except (OSError, UnreadableManifestError, NewerFormatError):
            continue


def _beside(ops: FileOps, store: SlabStore) -> list[tuple[str, os.stat_result]]:
    """List the entries beside a store; empty if they cannot be read."""
    try:
        return ops.entries(store.folder.rpartition("/")[0] or "/")
    except OSError:
        return []


def _remains(ops: FileOps, path: str) -> Iterator[Manifest]:
    """Yield candidate manifests from the fragments of a damaged one."""
    try:
        content = bytes(read_file(ops, path, MAX_MANIFEST_BYTES))
    except OSError:
        return
    try:
        body: Any = json.loads(content)
    except (ValueError, RecursionError):
        body = {}
    if not isinstance(body, dict):
        return
    try:
        _, features = check_format({"version": VERSION} | body, VERSION, KNOWN, for_writing=True)
    except NewerFormatError:
        return
    except MalformedFormatError:
        features = OF_EVERY_STORE
    fields = body.get("run_config")
    fields = fields if isinstance(fields, dict) else {}
    texts = [
        body.get("layout"),
        *(text.decode("ascii", "replace") for text in _IN_MANIFEST.findall(content)),
    ]
    if body.get("format", FORMAT) == FORMAT and "model_name" in fields:
        rank, block_bytes = body.get("rank"), body.get("block_bytes")
        if type(rank) is int and type(block_bytes) is int and block_bytes > 0 <= rank:
            texts.append(StoreLayout("", fields, rank, block_bytes).manifest.layout)
    for text in texts:
        if isinstance(text, str) and _LAYOUT.fullmatch(text):
            yield replace(_named(text, fields), features=features | OF_EVERY_STORE)


def _of_ranks(manifest: Manifest, ranks: list[int]) -> Iterator[Manifest]:
    digest, _, block_bytes = manifest.layout.split(":")
    for rank in ranks:
        yield _named(f"{digest}:{rank}:{block_bytes}", manifest.fields)


def _named(layout: str, fields: Mapping[str, Any]) -> Manifest:
    _, rank, block_bytes = layout.split(":")
    slot_bytes = slot_bytes_of(int(block_bytes))
    return Manifest(int(block_bytes), slot_bytes, int(rank), layout, fields)
