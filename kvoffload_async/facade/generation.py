"""Cache generations: blocks of other weights have other keys, in every tier.

The generation is part of each key, so a change needs no tier to be reopened, emptied or even
reached, and it holds for tiers that outlive the process: what was kept under a generation is found
again under that one alone. Blocks of former generations are evicted like any that nobody uses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

from kvoffload_async.config import parse_generation
from kvoffload_async.errors import StateError
from kvoffload_async.types import OffloadKey, make_offload_key

_TAG_BYTES: Final = 8
_TAG: Final = slice(-5 - _TAG_BYTES, -5)  # before the last byte of the hash and the group


class Generation:
    """Makes the keys of one generation, and tells them from others. Immutable.

    Attributes:
        label: Its label; None: blocks have no generation, and any key is taken for current.
        tag: What every key of it has before the last byte of the hash; empty without a label.
    """

    __slots__ = ("label", "tag")

    def __init__(self, label: int | str | None = None) -> None:
        """Raise ConfigError for what is no label; an integer is the label of its digits."""
        self.label = None if label is None else parse_generation(label, "generation")
        text = b"" if self.label is None else self.label.encode()
        self.tag = hashlib.blake2b(text, digest_size=_TAG_BYTES).digest() if text else b""

    def key(self, block_hash: bytes, group_idx: int = 0) -> OffloadKey:
        """Return the key of a block, as `make_offload_key` does; the hash has the tag in it.

        It keeps both its ends, by which tables of keys divide them.
        """
        tagged = block_hash[:-1] + self.tag + block_hash[-1:] if self.tag else block_hash
        return make_offload_key(tagged, group_idx)

    def has(self, key: OffloadKey) -> bool:
        """Tell whether a key is of this generation."""
        return not self.tag or key[_TAG] == self.tag

    def current(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Return those of the keys that are of this generation."""
        tag = self.tag
        return [key for key in keys if key[_TAG] == tag] if tag else keys

    def require(self, keys: Sequence[OffloadKey]) -> None:
        """Raise StateError for the first key of another generation."""
        for key in keys if self.tag else ():
            if not self.has(key):
                raise StateError(
                    f"block {key.hex()} is not of generation {self.label!r}: it was invalidated, "
                    "or its key was not made by the manager's `generation.key`"
                )
