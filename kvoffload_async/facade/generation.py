"""Key generations, which invalidate stored blocks after a change of weights.

The generation is part of each key, so blocks are found under the generation only under which they
were stored. After a change of weights, a new generation invalidates the blocks of all tiers,
persistent or not, without access to them. Old blocks are evicted like any others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

from kvoffload_async.config import parse_generation
from kvoffload_async.errors import StateError
from kvoffload_async.types import (
    OffloadKey,
    block_text,
    make_offload_key,
)

_TAG_BYTES: Final = 8
_TAG: Final = slice(-5 - _TAG_BYTES, -5)  # before the last byte of the hash and the group


class Generation:
    """Creates and recognises the keys of one generation. Immutable.

    Attributes:
        label: The generation's label; None: keys have no generation, and every key is current.
        tag: Inserted before the last byte of each hash; empty without a label.
    """

    __slots__ = ("label", "tag")

    def __init__(self, label: int | str | None = None) -> None:
        """Raise ConfigError for an invalid label. An integer stands for the text of its digits."""
        self.label = None if label is None else parse_generation(label, "generation")
        text = b"" if self.label is None else self.label.encode()
        self.tag = hashlib.blake2b(text, digest_size=_TAG_BYTES).digest() if text else b""

    def key(self, block_hash: bytes, group_idx: int = 0) -> OffloadKey:
        """Return the key of a block, like `make_offload_key`, with the tag inserted in the hash.

        The hash's first and last bytes are unchanged, because key tables partition by them.
        """
        tagged = block_hash[:-1] + self.tag + block_hash[-1:] if self.tag else block_hash
        return make_offload_key(tagged, group_idx)

    def has(self, key: OffloadKey) -> bool:
        """Return whether a key belongs to this generation."""
        return not self.tag or key[_TAG] == self.tag

    def current(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Return the keys that belong to this generation."""
        tag = self.tag
        return [key for key in keys if key[_TAG] == tag] if tag else keys

    def require(self, keys: Sequence[OffloadKey]) -> None:
        """Raise StateError for the first key of another generation."""
        for key in keys if self.tag else ():
            if not self.has(key):
                raise StateError(
                    f"{block_text(key)} is not of generation {self.label!r}: it was invalidated, "
                    "or its key was not made by the manager's `generation.key`"
                )
