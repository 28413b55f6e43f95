"""One request of a replay, on its way through the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from kvoffload_async.cli.content import BlockNames
from kvoffload_async.types import OffloadKey, ReqContext, make_offload_key

_KEY_BYTES = 16


class Flight:
    """A request's blocks, by name and by key, each once.

    Attributes:
        ctx: What the manager knows it by.
        keys: Its blocks, head first.
        names: Their ids, parallel to `keys`.
        refs: How many blocks it names, repeated ones included.
        weights: References to each block, or None where no block comes twice.
        origins: Which tier was read for which block.
    """

    __slots__ = ("ctx", "keys", "names", "origins", "refs", "weights")

    def __init__(self, number: int, block_ids: Sequence[int]) -> None:
        unique = list(dict.fromkeys(block_ids))
        self.refs = len(block_ids)
        self.weights = Counter(block_ids) if len(unique) < len(block_ids) else None
        self.names: BlockNames = np.array(unique, dtype=np.uint64)
        self.keys = [make_offload_key(i.to_bytes(_KEY_BYTES, "big")) for i in unique]
        positions = dict(zip(self.keys, range(1, len(unique) + 1), strict=True))
        self.ctx = ReqContext(f"request-{number}", key_positions=positions)
        self.origins: dict[OffloadKey, str] = {}

    def weight(self, index: int) -> int:
        """Return how often the request names its block at `index`."""
        return 1 if self.weights is None else self.weights[int(self.names[index])]
