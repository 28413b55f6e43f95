"""Finding out what a store is whose manifest is damaged or gone.

What the blocks' layout is called is the seed of every checksum in the journal. So whatever still
names a layout is tried, and right is under what name the journal verifies.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from kvoffload_async.errors import ConfigError
from kvoffload_async.tiers.files.features import (
    Features,
    MalformedFormatError,
    NewerFormatError,
    check_format,
)
from kvoffload_async.tiers.files.integrity import IntegrityKey
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.slab.budget import slot_bytes_of
from kvoffload_async.tiers.slab.layout import MANIFEST, TEMP_SUFFIX, StoreLayout, segment_name
from kvoffload_async.tiers.slab.maintenance.stores import SlabStore, read_journal_bytes
from kvoffload_async.tiers.slab.manifest import (
    FORMAT,
    KNOWN,
    SEGMENT_HEADERS,
    VERSION,
    Manifest,
    UnreadableManifestError,
)
from kvoffload_async.tiers.slab.reading import MAX_MANIFEST_BYTES, list_folder, read_file
from kvoffload_async.tiers.slab.records import KEYED, scan
from kvoffload_async.tiers.slab.segment_header import HEADER_BYTES, SegmentHeader

_LAYOUT: Final = re.compile(r"([0-9a-f]{12}):([0-9]{1,9}):([1-9][0-9]{0,14})")
_IN_MANIFEST: Final = re.compile(rb'"layout": "([^"]*)"')
_VERSION_IN_MANIFEST: Final = re.compile(rb'^  "version": ([0-9]{1,9})', re.MULTILINE)
_RANK: Final = re.compile(
    r".*_r([0-9]{1,9})(?:_([0-9a-f]{12})_([0-9]+)(?:_k[0-9a-f]{16})?)?", re.DOTALL
)


def decode_given(content: bytes) -> Manifest:
    """Return the manifest that the caller gives.

    Raises:
        ConfigError: It is none.
    """
    try:
        return Manifest.decode(content)
    except (UnreadableManifestError, NewerFormatError) as error:
        raise ConfigError(str(error)) from error


def newer_format(ops: FileOps, store: SlabStore) -> str | None:
    """Return why this release must not change a store: it is of a newer one; None if it may.

    A damaged manifest is believed as well, as far as it says so.

    Raises:
        OSError: The manifest cannot be read.
    """
    try:
        content = bytes(read_file(ops, f"{store.folder}/{MANIFEST}", MAX_MANIFEST_BYTES))
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
                f"the manifest is unreadable: {error}; it says that it needs a release that knows "
                f"format {version}"
            )
    return None


def recover_manifest(
    ops: FileOps, store: SlabStore, given: Manifest | None, key: IntegrityKey | None
) -> Manifest | None:
    """Return what a store without a readable manifest is, or None if nothing says it.

    Args:
        ops: The system calls.
        store: The store.
        given: The manifest of a store of the same layout, of any rank.
        key: What its checksums were made with, if the journal says that they were with a key.
    """
    journal = read_journal_bytes(ops, store)
    store_uuid = _uuid_in_segments(ops, store)
    for found in _candidates(ops, store, given):
        candidate = _with_headers(found, store_uuid) if store_uuid else found.of_new_store()
        records = scan(journal, candidate.journal_seed).records
        if len(records):
            is_keyed = bool((records["flags"] & KEYED).any())
            key_id = key.id.hex() if key is not None and is_keyed else None
            return candidate.with_key(key_id)
    return None


def _with_headers(manifest: Manifest, store_uuid: str) -> Manifest:
    """Return the manifest of a store whose segments have headers, and say which store it is."""
    features = manifest.features | Features(incompatible=frozenset({SEGMENT_HEADERS}))
    return replace(manifest, version=VERSION, features=features, store_uuid=store_uuid)


def _uuid_in_segments(ops: FileOps, store: SlabStore) -> str | None:
    """Return the store's UUID as most of its segments have it; None if none has one."""
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
    """Return what lies beside a store, where that may be read."""
    try:
        return ops.entries(store.folder.rpartition("/")[0] or "/")
    except OSError:
        return []


def _remains(ops: FileOps, path: str) -> Iterator[Manifest]:
    """Yield what a damaged manifest may have said."""
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
        features = Features()
    fields = body.get("run_config")
    fields = fields if isinstance(fields, dict) else {}
    texts = [body.get("layout"), *(text.decode("ascii", "replace") for text in _in(content))]
    if body.get("format", FORMAT) == FORMAT and "model_name" in fields:
        rank, block_bytes = body.get("rank"), body.get("block_bytes")
        if type(rank) is int and type(block_bytes) is int and block_bytes > 0 <= rank:
            texts.append(StoreLayout("", fields, rank, block_bytes).manifest.layout)
    for text in texts:
        if isinstance(text, str) and _LAYOUT.fullmatch(text):
            yield replace(_named(text, fields), features=features)


def _in(content: bytes) -> list[bytes]:
    return _IN_MANIFEST.findall(content)


def _of_ranks(manifest: Manifest, ranks: list[int]) -> Iterator[Manifest]:
    digest, _, block_bytes = manifest.layout.split(":")
    for rank in ranks:
        yield _named(f"{digest}:{rank}:{block_bytes}", manifest.fields)


def _named(layout: str, fields: Mapping[str, Any]) -> Manifest:
    _, rank, block_bytes = layout.split(":")
    slot_bytes = slot_bytes_of(int(block_bytes))
    return Manifest(int(block_bytes), slot_bytes, int(rank), layout, fields, features=Features())
