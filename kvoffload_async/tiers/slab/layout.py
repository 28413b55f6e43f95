"""A store's folder, file names and identity, and the space that its slots need.

Sizes are in bytes as allocated by the filesystem. A slot needs its own bytes, extent metadata, its
records in the current and the next journal, and four bytes in the session file.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvoffload_async.tiers.files.ops import safe_name
from kvoffload_async.tiers.slab.addresses import MAX_SLOTS
from kvoffload_async.tiers.slab.manifest import (
    BASE_FEATURES,
    ENCRYPTED_FEATURES,
    HEADER_BYTES,
    KEYED_FEATURES,
    PAGE_BYTES,
    Manifest,
    slot_bytes_of,
)
from kvoffload_async.tiers.slab.records import RECORD_BYTES, checkpoint_units

_FIXED_BYTES = 16 * PAGE_BYTES
"""Space for two folders, the lock, the session, the manifest and its temporary file, and for
rounding and extents of the journals."""

_SEGMENT_BYTES = PAGE_BYTES + 64
"""Metadata of a segment: its first extent block and its directory entry."""

_USE_BYTES = 4
"""Bytes per slot in the session file."""

_EXTENT_BYTES = 60
"""Metadata of a slot: two extents of 12 bytes, in half-full leaves, rounded up."""

_MIN_LOG_UNITS = 32
"""Minimum log size, so that short journals are not compacted all the time."""

_AHEAD_SHARE = 16
"""At most one slot in this many is kept free, for adjacent allocation."""

_MOST_AHEAD = 256
"""Maximum number of slots kept free; more would not make eviction noticeably cheaper."""

_MOST_AHEAD_BYTES = 32 << 20
"""Maximum number of bytes kept free; adjacent slots do not speed up large blocks."""

_LEAST_AHEAD = 16
"""Minimum number of slots kept free; with fewer, few free slots are adjacent."""


_LEAST_STRIPE = 16
"""A store with fewer slots per stripe than this has one segment."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Computes the disk space of one store.

    Attributes:
        capacity_bytes: Maximum space to allocate on disk.
        slot_bytes: Bytes of a slot.
        segment_slots: Slots of a full segment.
        most_slots: Maximum number of slots; due to rounding it may be exceeded by one.
        stripes: Number of segments created together, to be written in parallel.
    """

    capacity_bytes: int
    slot_bytes: int
    segment_slots: int
    most_slots: int
    stripes: int = 1

    @classmethod
    def of(
        cls,
        capacity_bytes: int,
        block_bytes: int,
        segment_bytes: int,
        stripes: int = 1,
        *,
        is_encrypted: bool = False,
    ) -> Budget:
        """Return the budget for a capacity; `most_slots` is 0 if not even one block fits."""
        slot_bytes = slot_bytes_of(block_bytes, is_encrypted=is_encrypted)
        segment_slots = min(max(1, segment_bytes // slot_bytes), MAX_SLOTS)
        plain = cls(capacity_bytes, slot_bytes, segment_slots, 0).filled()
        if stripes == 1 or plain.most_slots < stripes * _LEAST_STRIPE:
            return plain
        most = plain.largest(plain.most_slots, lambda slots: plain.cost_of(slots, stripes))
        segment_slots = min(segment_slots, -(-most // stripes))
        return cls(capacity_bytes, slot_bytes, segment_slots, 0, stripes).filled()

    def cost(self, segments: Collection[int]) -> int:
        """Return the maximum disk space of a store, given the number of slots of each segment."""
        return self.cost_of(sum(segments), len(segments))

    def cost_of(self, slots: int, num_segments: int) -> int:
        """Return the maximum disk space of this many slots in this many segments."""
        return (
            _FIXED_BYTES
            + slots * (self.slot_bytes + _EXTENT_BYTES + _USE_BYTES)
            + num_segments * (_SEGMENT_BYTES + HEADER_BYTES)
            + 2 * journal_units(slots) * RECORD_BYTES
        )

    def next_segment(self, segments: Collection[int], max_slots: int | None = None) -> int:
        """Return the number of slots for another segment; 0 if none fits."""
        most = self.segment_slots
        return self.fitting(segments, most if max_slots is None else min(most, max_slots))

    def fitting(self, segments: Collection[int], most: int) -> int:
        """Return how many slots, at most `most`, fit into another segment."""
        present, num_segments = sum(segments), len(segments) + 1
        return self.largest(most, lambda slots: self.cost_of(present + slots, num_segments))

    def filled(self) -> Budget:
        """Return the budget with the largest `most_slots` that fits."""
        most = self.largest(
            self.capacity_bytes // self.slot_bytes,
            lambda slots: self.cost_of(slots, -(-slots // self.segment_slots)),
        )
        return replace(self, most_slots=most)

    def largest(self, most: int, cost: Callable[[int], int]) -> int:
        """Return the largest number of slots, at most `most`, whose cost is within the capacity."""
        return bisect_right(range(1, most + 1), self.capacity_bytes, key=cost)

    @property
    def slots_ahead(self) -> int:
        """Number of slots to free in advance when blocks must be evicted."""
        most = min(_MOST_AHEAD, _MOST_AHEAD_BYTES // self.slot_bytes)
        ahead = min(most, self.most_slots // _AHEAD_SHARE)
        return ahead if ahead >= _LEAST_AHEAD else 0

    @property
    def least_bytes(self) -> int:
        """The smallest capacity for one block."""
        return Budget(0, self.slot_bytes, 1, 1).cost([1])


def journal_units(slots: int) -> int:
    """Return the number of units allocated for the journal of a store with `slots` slots.

    A checkpoint of all slots, and half as many units for the log.
    """
    return checkpoint_units(slots) + log_units(slots)


def log_units(slots: int) -> int:
    """Return how many of a journal's units are for the log, behind the checkpoint."""
    return max(_MIN_LOG_UNITS, slots // 2)


MANIFEST = "manifest.json"
LOCK = "lock"
JOURNAL = "journal"
NEXT_JOURNAL = "journal.new"
BAD_JOURNAL = "journal.bad"
SESSION = "session"
TEMP_SUFFIX = ".tmp"

_DIGEST_DIGITS = 12
_SEGMENT = re.compile(r"segment-(\d{6,10})\.slab")


def segment_name(number: int) -> str:
    """Return the file name of a segment."""
    return f"segment-{number:06}.slab"


def segment_number(name: str) -> int | None:
    """Return the number of the segment with this file name, or None."""
    match = _SEGMENT.fullmatch(name)
    return int(match[1]) if match and segment_name(int(match[1])) == name else None


class StoreLayout:
    """Folder and manifest of the store for a run configuration and rank.

    Attributes:
        folder: Usual path of the store.
        own_folder: Path of the store if another layout has `folder`.
        manifest: The manifest that the store must match.
    """

    def __init__(
        self,
        root_dir: str,
        fields: Mapping[str, Any],
        rank: int,
        block_bytes: int,
        key_id: str | None = None,
        *,
        is_encrypted: bool = False,
    ) -> None:
        """Compute the paths and the manifest; `key_id` is the id of the integrity key, if any."""
        canonical = json.dumps(dict(fields), sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(canonical.encode()).hexdigest()[:_DIGEST_DIGITS]
        name = safe_name(str(fields["model_name"]))
        if "namespace" in fields:
            name += (
                f"_{hashlib.sha256(str(fields['namespace']).encode()).hexdigest()[:_DIGEST_DIGITS]}"
            )
        self.folder = f"{root_dir}/{name}_r{rank}"
        self.own_folder = f"{self.folder}_{digest}_{block_bytes}"
        if key_id is not None:
            self.own_folder += f"_k{key_id}"
        features = BASE_FEATURES if key_id is None else KEYED_FEATURES
        if is_encrypted:
            self.own_folder += "_encrypted"
            features = ENCRYPTED_FEATURES
        self.manifest = Manifest(
            block_bytes=block_bytes,
            slot_bytes=slot_bytes_of(block_bytes, is_encrypted=is_encrypted),
            rank=rank,
            layout=f"{digest}:{rank}:{block_bytes}",
            fields=dict(fields),
            features=features,
            key_id=key_id,
        )

    def may_replace(self, found: Manifest) -> bool:
        """Return whether a store has the same rank, model and namespace, and may be replaced."""
        return found.rank == self.manifest.rank and all(
            found.fields.get(key) == self.manifest.fields.get(key)
            for key in ("model_name", "namespace")
        )

    def difference(self, found: Manifest) -> str:
        """Describe how a store differs from this layout; empty if it does not."""
        if found.layout == self.manifest.layout:
            if found.is_encrypted is not self.manifest.is_encrypted:
                return "blocks that are " + ("" if found.is_encrypted else "not ") + "encrypted"
            return "" if found.key_id == self.manifest.key_id else _key_difference(found)
        if found.block_bytes != self.manifest.block_bytes:
            return f"blocks of {found.block_bytes} bytes instead of {self.manifest.block_bytes}"
        if found.rank != self.manifest.rank:
            return f"rank {found.rank} instead of {self.manifest.rank}"
        wanted = self.manifest.fields
        keys = sorted(
            key
            for key in wanted.keys() | found.fields.keys()
            if wanted.get(key) != found.fields.get(key)
        )
        return "another " + ", ".join(keys)


def _key_difference(found: Manifest) -> str:
    if found.key_id is None:
        return "checksums without an integrity key"
    return f"checksums by the integrity key with the id {found.key_id}"
