"""The longest present head of chains whose blocks may be packed, with O(log n) questions a chain.

An object is called after its first block, and one that is there tells which blocks behind it are
in it. So a "no" says of a block that no object *begins* with it. Where the object before it ends,
or where every pack begins (`chains.is_lead`), that means that the block is absent.

As in `remote.prefixes`, where a block is present, so are taken to be those before it: what breaks
the rule costs a failed load, and no wrong byte.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Generator, Sequence
from math import ceil, log2

from kvoffload_async.tiers.object.chains import Chains, is_lead
from kvoffload_async.types import OffloadKey

Ask = Callable[[Sequence[OffloadKey]], Awaitable[Collection[OffloadKey]]]
"""Returns those of the keys after which an object is called, and notes what these objects have."""


def most_questions(num_keys: int) -> int:
    """Return how many questions the search for the head of a chain costs at most."""
    return 2 + ceil(log2(num_keys)) if num_keys else 0


class HeadSearch:
    """One chain; asks for one key in each round.

    Attributes:
        found: How many keys at the head of the chain are taken to be present, so far.
        wanted: Index, in `keys`, of the key to ask for now; None: the search has ended.
        keys: What precedes the chain, and the chain.
    """

    def __init__(
        self, before: Sequence[OffloadKey], chain: Sequence[OffloadKey], *, spacing: int, most: int
    ) -> None:
        """Begin.

        Args:
            before: Keys right before the chain, as far as they are known.
            chain: Keys, head to tail.
            spacing: See `is_lead`.
            most: How many keys `before` has at most: where it has fewer, the prompt begins there.
        """
        self.keys = (*before, *chain)
        self.found = 0
        self._spacing = spacing
        self._begins_prompt = len(before) < most
        self._left = most_questions(len(chain))
        self._search = self._questions(len(before))
        self.wanted: int | None = None
        self._proceed(None)

    def learn(self, length: int) -> None:
        """Take in how many of the keys, from `wanted` on, the object has; 0: there is none."""
        self._left -= 1
        self._proceed(length)

    def _proceed(self, length: int | None) -> None:
        try:
            self.wanted = self._search.send(length)  # type: ignore[arg-type] # None begins it
        except StopIteration:
            self.wanted = None
        if not self._left:
            self.wanted = None

    def _questions(self, first: int) -> Generator[int, int, None]:
        low = yield from self._entrance(first)
        if low == first:
            low += yield low
        self.found = low - first
        if not self.found:
            return
        high = len(self.keys)
        leads = [i for i in range(low, high) if is_lead(self.keys[i], self._spacing)]
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

    def _entrance(self, first: int) -> Generator[int, int, int]:
        """Go from the last place before the chain where an object begins; return where it ends."""
        leads = (i for i in range(first - 1, -1, -1) if is_lead(self.keys[i], self._spacing))
        index = next(leads, 0 if self._begins_prompt else first)
        while index < first:
            length = yield index
            if not length:
                return first
            index += length
        return index

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


async def longest_heads(searches: Sequence[HeadSearch], chains: Chains, ask: Ask) -> list[int]:
    """Carry out searches side by side; return how many keys of each are taken to be present.

    Args:
        searches: One a chain.
        chains: What `ask` notes the contents of objects in.
        ask: Asked for one key a chain in each round; equal keys are asked once.
    """
    while True:
        open_ = [(search, search.wanted) for search in searches if search.wanted is not None]
        if not open_:
            return [search.found for search in searches]
        present = await ask(list(dict.fromkeys(search.keys[index] for search, index in open_)))
        for search, index in open_:
            is_there = search.keys[index] in present
            search.learn(chains.length_at(search.keys, index) if is_there else 0)
