"""Search for the longest stored prefix of chains with packed blocks: O(log n) requests each.

An object is named after its first block, and its head lists all of its blocks. So a negative answer
for a block means only that no object *begins* with it. The block is absent if the previous object
ends there, or if every pack begins there (`chains.is_chunk_boundary`).

As in `remote.prefixes`, all blocks before a present one are assumed to be present; a wrong
assumption costs a failed load, never wrong bytes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Generator, Sequence
from math import ceil, log2
from typing import Final

from kvoffload_async.tiers.object.packs import MOST_BLOCKS, Chains, is_chunk_boundary
from kvoffload_async.types import OffloadKey

_FEWEST: Final = 8
"""Maximum number of requests for a chain of up to 64 blocks."""
_MOST_STEPS: Final = 3
"""Maximum number of preceding objects to read for one that extends into the chain."""

Ask = Callable[[Sequence[OffloadKey]], Awaitable[Collection[OffloadKey]]]
"""Returns the keys that name an existing object, and records the objects' contents."""


def most_questions(num_keys: int) -> int:
    """Return the maximum number of requests for a chain.

    Few are needed if few jobs stored the chain; a short chain may follow many objects.
    """
    return max(_FEWEST, 2 + ceil(log2(num_keys))) if num_keys else 0


class HeadSearch:
    """The search for one chain; asks for one key per round.

    Attributes:
        found: Number of keys at the head of the chain believed present so far.
        wanted: Index, in `keys`, of the key to ask for next; None: the search has ended.
        keys: The preceding keys and the chain.
    """

    def __init__(
        self,
        before: Sequence[OffloadKey],
        chain: Sequence[OffloadKey],
        chains: Chains,
        *,
        mean_blocks: int,
        most: int,
    ) -> None:
        """Start the search.

        Args:
            before: Known keys right before the chain.
            chain: Keys, head to tail.
            chains: Known contents of objects, updated by each answer.
            mean_blocks: See `is_chunk_boundary`.
            most: Maximum length of `before`; if it is shorter, it starts at the prompt's beginning.
        """
        self.keys = (*before, *chain)
        self.found = 0
        self._chains = chains
        self._mean_blocks = mean_blocks
        self._begins_prompt = len(before) < most
        self._left = most_questions(len(chain))
        self._search = self._questions(len(before))
        self.wanted: int | None = None
        if chain:
            self._proceed(None)

    def learn(self, index: int, *, is_present: bool) -> None:
        """Process the answer whether an object is named after the wanted key."""
        self._left -= 1
        self._proceed(self._chains.length_at(self.keys, index) if is_present else 0)

    def _proceed(self, length: int | None) -> None:
        try:
            self.wanted = self._search.send(length)  # type: ignore[arg-type] # None begins it
        except StopIteration:
            self.wanted = None
        if not self._left:
            self.wanted = None

    def _questions(self, first: int) -> Generator[int, int, None]:
        low = yield from self._walk(self._known_place(first), first)
        if low == first:
            low += yield first
        if low == first:
            low = yield from self._walk(self._entrance(first), first)
        self.found = low - first
        if not self.found:
            return
        self._look_as_wide_as_packed(first, low)
        high = len(self.keys)
        leads = [i for i in range(low, high) if is_chunk_boundary(self.keys[i], self._mean_blocks)]
        begin, end = 0, len(leads)
        middle = end - 1  # last first: most chains are present as a whole, or end at once
        while begin < end:
            index = leads[middle]
            if length := (yield index):
                low, begin = index + length, middle + 1
                self.found = low - first
            else:
                high, end = index, middle
            middle = (begin + end) // 2
        yield from self._tail(first, low, high)

    def _walk(self, index: int, first: int) -> Generator[int, int, int]:
        """Follow the objects before the chain; return how far the last one extends into it."""
        for _ in range(_MOST_STEPS):
            length = (yield index) if index < first else 0
            if not length:
                break
            index += length
        return max(index, first)

    def _known_place(self, first: int) -> int:
        """Return the start of the object known to contain the chain's first block."""
        name = self._chains.first_of(self.keys[first])
        return self.keys.index(name) if name in self.keys[:first] else first

    def _entrance(self, first: int) -> int:
        """Return the last place before the chain where an object that extends into it may begin."""
        for index in range(first - 1, -1, -1):
            if self._chains.first_of(self.keys[index]) is not None:
                return index + 1  # the object's contents are known
            if is_chunk_boundary(self.keys[index], self._mean_blocks):
                return index
        return 0 if self._begins_prompt else first

    def _look_as_wide_as_packed(self, first: int, end: int) -> None:
        """Widen the boundary interval if a known object crosses a boundary: larger packs."""
        for key in self.keys[max(0, first - MOST_BLOCKS) : end]:
            while self._mean_blocks < MOST_BLOCKS and is_chunk_boundary(key, self._mean_blocks):
                if self._chains.name_of(key) == key:
                    break
                self._mean_blocks *= 2

    def _tail(self, first: int, low: int, high: int) -> Generator[int, int, None]:
        """Follow objects behind the last boundary; bisect where they have one block each."""
        while low < high:
            length = yield low
            if not length:
                return
            low += length
            self.found = low - first
            top = high if length == 1 else low
            while low < top:
                middle = (low + top) // 2
                if length := (yield middle):
                    low = middle + length
                    self.found = low - first
                else:
                    top = middle
                if low == top < high:
                    return  # no object begins there


async def longest_prefixes(searches: Sequence[HeadSearch], ask: Ask) -> list[int]:
    """Run searches concurrently; return the number of keys believed present in each chain.

    Args:
        searches: One per chain.
        ask: Called with one key per chain in each round, without duplicates.
    """
    while True:
        open_ = [(search, search.wanted) for search in searches if search.wanted is not None]
        if not open_:
            return [search.found for search in searches]
        present = await ask(list(dict.fromkeys(search.keys[index] for search, index in open_)))
        for search, index in open_:
            search.learn(index, is_present=search.keys[index] in present)
