"""The longest present head of each of several chains, with O(log n) questions a chain.

Keys are chained hashes: where a block is present, so are, as a rule, those before it. What breaks
the rule (a head that was evicted or never stored) costs a failed load, and no wrong byte.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

from kvoffload_async.types import OffloadKey

Ask = Callable[[Sequence[OffloadKey]], Awaitable[Collection[OffloadKey]]]
"""Returns those of the keys that are present."""


@dataclass(slots=True)
class _Search:
    """Between `low` keys, which are present, and `high`, from which on none is known to be."""

    chain: Sequence[OffloadKey]
    low: int = 0
    high: int = 0
    asked: int = 0

    @property
    def is_done(self) -> bool:
        return self.low >= self.high

    @property
    def next_index(self) -> int:
        """The first key, the last one, then the middle of the rest: most chains are all or none."""
        if self.asked == 0:
            return self.low
        if self.asked == 1:
            return self.high - 1
        return (self.low + self.high) // 2

    def learn(self, index: int, *, is_present: bool) -> None:
        self.asked += 1
        if is_present:
            self.low = max(self.low, index + 1)
        else:
            self.high = min(self.high, index)


async def longest_present_heads(chains: Sequence[Sequence[OffloadKey]], ask: Ask) -> list[int]:
    """Return for each chain how many of its first keys are taken to be present.

    Args:
        chains: Keys of each, head to tail.
        ask: Asked for one key a chain in each round; equal keys are asked once. At most
            2 + ceil(log2(n - 1)) rounds for chains of n keys.
    """
    searches = [_Search(chain, high=len(chain)) for chain in chains]
    while True:
        wanted = [(search, search.next_index) for search in searches if not search.is_done]
        if not wanted:
            return [search.low for search in searches]
        keys = list(dict.fromkeys(search.chain[index] for search, index in wanted))
        present = await ask(keys)
        for search, index in wanted:
            search.learn(index, is_present=search.chain[index] in present)
