"""The longest present head of chains whose blocks may be packed, with O(log n) questions a chain.

An object is called after its first block, and one that is there tells which blocks behind it are
in it. So a "no" says of a block that no object *begins* with it. Where the object before it ends,
or where every pack begins (`chains.is_chunk_boundary`), that means that the block is absent.

As in `remote.prefixes`, where a block is present, so are taken to be those before it: what breaks
the rule costs a failed load, and no wrong byte.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Generator, Sequence
from math import ceil, log2
from typing import Final

from kvoffload_async.tiers.object.packs import MOST_BLOCKS, Chains, is_chunk_boundary
from kvoffload_async.types import OffloadKey

_FEWEST: Final = 8
"""What a chain of 64 blocks costs at most."""
_MOST_STEPS: Final = 3
"""How many objects before a chain are looked into for one that goes on in it."""

Ask = Callable[[Sequence[OffloadKey]], Awaitable[Collection[OffloadKey]]]
"""Returns those of the keys after which an object is called, and notes what these objects have."""


def most_questions(num_keys: int) -> int:
    """Return how many questions the search for the head of a chain costs at most.

    Few are needed where the chain was stored by few jobs. A short chain may be behind many.
    """
    return max(_FEWEST, 2 + ceil(log2(num_keys))) if num_keys else 0


class HeadSearch:
    """One chain; asks for one key in each round.

    Attributes:
        found: How many keys at the head of the chain are taken to be present, so far.
        wanted: Index, in `keys`, of the key to ask for now; None: the search has ended.
        keys: What precedes the chain, and the chain.
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
        """Begin.

        Args:
            before: Keys right before the chain, as far as they are known.
            chain: Keys, head to tail.
            chains: What is known of objects, also from answers to come.
            mean_blocks: See `is_chunk_boundary`.
            most: How many keys `before` has at most: where it has fewer, the prompt begins there.
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
        """Take in whether there is an object that is called after the wanted key."""
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
        middle = end - 1  # the last one first: most chains are there whole, or end at once
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
        """Go from object to object before the chain; return how far into it the last one goes."""
        for _ in range(_MOST_STEPS):
            length = (yield index) if index < first else 0
            if not length:
                break
            index += length
        return max(index, first)

    def _known_place(self, first: int) -> int:
        """Return where the object begins that the chain's first block is known to be in."""
        name = self._chains.first_of(self.keys[first])
        return self.keys.index(name) if name in self.keys[:first] else first

    def _entrance(self, first: int) -> int:
        """Return the last place before the chain where the object begins that goes into it."""
        for index in range(first - 1, -1, -1):
            if self._chains.first_of(self.keys[index]) is not None:
                return index + 1  # it is known what that object has
            if is_chunk_boundary(self.keys[index], self._mean_blocks):
                return index
        return 0 if self._begins_prompt else first

    def _look_as_wide_as_packed(self, first: int, end: int) -> None:
        """Leave out what leads here, but not where somebody packs more: it is within an object."""
        for key in self.keys[max(0, first - MOST_BLOCKS) : end]:
            while self._mean_blocks < MOST_BLOCKS and is_chunk_boundary(key, self._mean_blocks):
                if self._chains.name_of(key) == key:
                    break
                self._mean_blocks *= 2

    def _tail(self, first: int, low: int, high: int) -> Generator[int, int, None]:
        """Go from object to object, behind the last lead; halve where they are of one block."""
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
    """Carry out searches side by side; return how many keys of each are taken to be present.

    Args:
        searches: One a chain.
        ask: Asked for one key a chain in each round; equal keys are asked once.
    """
    while True:
        open_ = [(search, search.wanted) for search in searches if search.wanted is not None]
        if not open_:
            return [search.found for search in searches]
        present = await ask(list(dict.fromkeys(search.keys[index] for search, index in open_)))
        for search, index in open_:
            search.learn(index, is_present=search.keys[index] in present)
