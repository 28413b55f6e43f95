"""Finding out what a store is whose manifest is damaged or gone.

What the blocks' layout is called is the seed of every checksum in the journal. So whatever still
names a layout is tried, and right is under what name the journal verifies.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from kvoffload_async.errors import ConfigError
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.slab.budget import slot_bytes_of
from kvoffload_async.tiers.slab.layout import MANIFEST, TEMP_SUFFIX, StoreLayout
from kvoffload_async.tiers.slab.maintenance.stores import SlabStore, read_journal_bytes
from kvoffload_async.tiers.slab.manifest import (
    FORMAT,
    VERSION,
    Manifest,
    UnreadableManifestError,
)
from kvoffload_async.tiers.slab.reading import MAX_MANIFEST_BYTES, read_file
from kvoffload_async.tiers.slab.records import scan, seed_of

_LAYOUT: Final = re.compile(r"([0-9a-f]{12}):([0-9]{1,9}):([1-9][0-9]{0,14})")
_IN_MANIFEST: Final = re.compile(rb'"layout": "([^"]*)"')
_RANK: Final = re.compile(r".*_r([0-9]{1,9})(?:_([0-9a-f]{12})_([0-9]+))?", re.DOTALL)


def decode_given(content: bytes) -> Manifest:
    """Return the manifest that the caller gives.

    Raises:
        ConfigError: It is none.
    """
    try:
        return Manifest.decode(content)
    except UnreadableManifestError as error:
        raise ConfigError(str(error)) from error


def recover_manifest(ops: FileOps, store: SlabStore, given: Manifest | None) -> Manifest | None:
    """Return what a store without a readable manifest is, or None if nothing says it.

    Args:
        ops: The system calls.
        store: The store.
        given: The manifest of a store of the same layout, of any rank.
    """
    journal = read_journal_bytes(ops, store)
    for candidate in _candidates(ops, store, given):
        if len(scan(journal, seed_of(candidate.layout)).records):
            return candidate
    return None


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
    for path in sorted(Path(store.folder).parent.glob(f"*/{MANIFEST}")):
        try:
            content = bytes(read_file(ops, str(path), MAX_MANIFEST_BYTES))
            yield from _of_ranks(Manifest.decode(content), ranks)
        except (OSError, UnreadableManifestError):
            continue


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
    if not isinstance(body, dict) or body.get("version", VERSION) != VERSION:
        return
    fields = body.get("run_config")
    fields = fields if isinstance(fields, dict) else {}
    texts = [body.get("layout"), *(text.decode("ascii", "replace") for text in _in(content))]
    if body.get("format", FORMAT) == FORMAT and "model_name" in fields:
        rank, block_bytes = body.get("rank"), body.get("block_bytes")
        if type(rank) is int and type(block_bytes) is int and block_bytes > 0 <= rank:
            texts.append(StoreLayout("", fields, rank, block_bytes).manifest.layout)
    for text in texts:
        if isinstance(text, str) and _LAYOUT.fullmatch(text):
            yield _named(text, fields)


def _in(content: bytes) -> list[bytes]:
    return _IN_MANIFEST.findall(content)


def _of_ranks(manifest: Manifest, ranks: list[int]) -> Iterator[Manifest]:
    digest, _, block_bytes = manifest.layout.split(":")
    for rank in ranks:
        yield _named(f"{digest}:{rank}:{block_bytes}", manifest.fields)


def _named(layout: str, fields: Mapping[str, Any]) -> Manifest:
    _, rank, block_bytes = layout.split(":")
    return Manifest(int(block_bytes), slot_bytes_of(int(block_bytes)), int(rank), layout, fields)
