"""Where a store lies, its file names, what its blocks mean, and how many fit into a capacity.

Sizes are in bytes as the filesystem allocates them. A slot costs itself, its share of the segment's
extent tree, its records in two journals, the one in use and the next, and four bytes of the
session's file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvoffload_async.tiers.files.ops import safe_name
from kvoffload_async.tiers.slab.manifest import HEADER_BYTES, Manifest
from kvoffload_async.tiers.slab.places import MAX_SLOTS
from kvoffload_async.tiers.slab.records import RECORD_BYTES, checkpoint_units

PAGE_BYTES = 4096
"""What slots, and O_DIRECT, are aligned to."""

_FIXED_BYTES = 16 * PAGE_BYTES
"""Two folders, the lock, the session, the manifest and its successor, the journals' roundings and
extents."""

_SEGMENT_BYTES = PAGE_BYTES + 64
"""A segment's first extent block, and its name in the folder."""

_USE_BYTES = 4
"""What the session's file has of a slot."""

_EXTENT_BYTES = 60
"""Two extents of 12 bytes a slot, in leaves that splitting has left half empty, and some."""

_MIN_LOG_UNITS = 32
"""So that a journal that is short is not written anew all the time."""

_AHEAD_SHARE = 16
"""Which part of a store may stand empty, at most, so that jobs find neighbours."""

_MOST_AHEAD = 256
"""Enough that evicting costs a job next to nothing."""

_MOST_AHEAD_BYTES = 32 << 20
"""Where blocks are large, neighbours gain nothing."""

_LEAST_AHEAD = 16
"""Fewer make no neighbours for a job."""


_LEAST_STRIPE = 16
"""A store with fewer slots than this for each stripe has one segment."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The arithmetic of one store.

    Attributes:
        capacity_bytes: What may be allocated on disk.
        slot_bytes: Bytes of a slot.
        segment_slots: Slots of a full segment.
        most_slots: How many slots there can be; by rounding it may be one more.
        stripes: How many segments are made at once, so that as many can be written at once.
    """

    capacity_bytes: int
    slot_bytes: int
    segment_slots: int
    most_slots: int
    stripes: int = 1

    @classmethod
    def of(
        cls, capacity_bytes: int, block_bytes: int, segment_bytes: int, stripes: int = 1
    ) -> Budget:
        """Return the budget of a capacity; one without `most_slots` is too small for a block."""
        slot_bytes = slot_bytes_of(block_bytes)
        segment_slots = min(max(1, segment_bytes // slot_bytes), MAX_SLOTS)
        plain = _filled(cls(capacity_bytes, slot_bytes, segment_slots, 0))
        if stripes == 1 or plain.most_slots < stripes * _LEAST_STRIPE:
            return plain
        segment_slots = min(segment_slots, -(-plain.most_slots // stripes))
        return _filled(cls(capacity_bytes, slot_bytes, segment_slots, 0, stripes))

    def cost(self, segments: Collection[int]) -> int:
        """Return the most that segments of so many slots, and all beside them, can allocate."""
        return self.cost_of(sum(segments), len(segments))

    def cost_of(self, slots: int, num_segments: int) -> int:
        """Return what `cost` does, of that many slots in that many segments."""
        return (
            _FIXED_BYTES
            + slots * (self.slot_bytes + _EXTENT_BYTES + _USE_BYTES)
            + num_segments * (_SEGMENT_BYTES + HEADER_BYTES)
            + 2 * journal_units(slots) * RECORD_BYTES
        )

    def next_segment(self, segments: Collection[int], max_slots: int | None = None) -> int:
        """Return how many slots one more segment may have; 0 if none is left."""
        most = self.segment_slots
        return self.fitting(segments, most if max_slots is None else min(most, max_slots))

    def fitting(self, segments: Collection[int], most: int) -> int:
        """Return how many slots, of so many at most, have room in one more segment."""
        low, high = 0, most + 1
        while high - low > 1:
            slots = (low + high) // 2
            if self.cost([*segments, slots]) <= self.capacity_bytes:
                low = slots
            else:
                high = slots
        return low

    @property
    def slots_ahead(self) -> int:
        """How many slots are made free before they must be, once one must."""
        most = min(_MOST_AHEAD, _MOST_AHEAD_BYTES // self.slot_bytes)
        ahead = min(most, self.most_slots // _AHEAD_SHARE)
        return ahead if ahead >= _LEAST_AHEAD else 0

    @property
    def least_bytes(self) -> int:
        """The smallest capacity that holds a block."""
        return Budget(0, self.slot_bytes, 1, 1).cost([1])


def _filled(budget: Budget) -> Budget:
    """Return a budget with the most slots that it has room for."""
    low, high = 0, budget.capacity_bytes // budget.slot_bytes + 1
    while high - low > 1:
        slots = (low + high) // 2
        larger = replace(budget, most_slots=slots)
        num_segments = -(-slots // budget.segment_slots)
        if larger.cost_of(slots, num_segments) <= budget.capacity_bytes:
            low = slots
        else:
            high = slots
    return replace(budget, most_slots=low)


def journal_units(slots: int) -> int:
    """Return how many units are allocated for a journal of a store with so many slots.

    Those of a checkpoint of all of them, and half as many for the log behind it.
    """
    return checkpoint_units(slots) + log_units(slots)


def log_units(slots: int) -> int:
    """Return how many of these are for the log."""
    return max(_MIN_LOG_UNITS, slots // 2)


def slot_bytes_of(block_bytes: int) -> int:
    """Return the bytes of a slot: a block's, rounded up to whole pages."""
    return -(-block_bytes // PAGE_BYTES) * PAGE_BYTES


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
    """Return the name of a segment's file."""
    return f"segment-{number:06}.slab"


def segment_number(name: str) -> int | None:
    """Return the segment whose file has this name, or None."""
    match = _SEGMENT.fullmatch(name)
    return int(match[1]) if match and segment_name(int(match[1])) == name else None


class StoreLayout:
    """The folders that a run configuration and rank may have, and its identity.

    Attributes:
        folder: Where its store is.
        own_folder: Where it is if another layout has `folder`.
        manifest: What the store must be.
    """

    def __init__(
        self,
        root_dir: str,
        fields: Mapping[str, Any],
        rank: int,
        block_bytes: int,
        key_id: str | None = None,
    ) -> None:
        """Describe a store; `key_id` is that of the integrity key, where there is one."""
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
        self.manifest = Manifest(
            block_bytes=block_bytes,
            slot_bytes=slot_bytes_of(block_bytes),
            rank=rank,
            layout=f"{digest}:{rank}:{block_bytes}",
            fields=dict(fields),
        ).with_key(key_id)

    def may_replace(self, found: Manifest) -> bool:
        """Tell whether a store is of the same model and namespace, and not only of their name."""
        return found.rank == self.manifest.rank and all(
            found.fields.get(key) == self.manifest.fields.get(key)
            for key in ("model_name", "namespace")
        )

    def difference(self, found: Manifest) -> str:
        """Return in what a store differs from this layout, or an empty text if in nothing."""
        if found.layout == self.manifest.layout:
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
