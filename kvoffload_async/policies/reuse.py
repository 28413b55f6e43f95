"""Model of the reuse of blocks: classes of blocks, and the probability that each is reused.

Blocks fall into a few classes, by the uses known of them and by the prompt that brought them. For
each class, tables by age say how many blocks reached that age since their last use, and how many
were used again at it. The estimates are those of a survival analysis: hits per arrival, by age.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil, sqrt
from typing import Final

import numpy as np

from kvoffload_async.tables.arrays import Objects, integers, small_integers
from kvoffload_async.tables.keymap import KeyMap
from kvoffload_async.tables.lists import FreeNumbers, NumberLists
from kvoffload_async.types import OffloadKey

NUM_CLASSES: Final = 12
LAST_OF_PROMPT: Final = 0
"""Class of a new block that ends its prompt: it is rarely full of shared text."""
_NEW_AFTER_KNOWN: Final = 6
"""First of three classes of new blocks whose prompt began with two known blocks."""
_NEW: Final = 9
"""First of three classes of other new blocks."""
_LONG_PROMPT: Final = (16, 64)
"""Prompt lengths in blocks that separate the three classes."""
_CLASS_BY_USES: Final = (0, 0, 1, 2, 3, 3, 4, 4, 4, 4, 4, 5)
"""Class of a known block by its number of uses, the current one included; the last: any more."""
_MAX_USES: Final = len(_CLASS_BY_USES) - 1

_NUM_BINS: Final = 26
_EDGES: Final = (0.0, *(sqrt(2) ** i for i in range(_NUM_BINS - 1)))
"""Least age of each bin, in requests."""
_WIDTHS: Final = np.diff([*_EDGES, sqrt(2) ** (_NUM_BINS - 1)])
_ENTRY_AGES: Final = tuple(ceil(edge - 1e-9) for edge in _EDGES[1:])
"""Age, in whole requests, at which a block enters each bin after the first."""
_MAX_AGE: Final = 1 << 13
"""A power of two above every age at which a block enters a bin."""

# The constants below are those with which the policy was tuned on a trace of a chat service and
# held out on others; halving or doubling one of them changes the hits by less than 0.003.
_UPDATE_REQUESTS: Final = 64
_KEPT_PER_UPDATE: Final = 0.99
"""Factor by which an update decays the counts: half of a count is forgotten in 4,400 requests."""
_PRIOR_ARRIVALS: Final = 60.0
"""Weight, in arrivals, of the class's mean in the estimate for a bin."""
_PRIOR_HITS: Final = 1.8
"""Hits per `_PRIOR_ARRIVALS` arrivals that are assumed for a class without history."""

_BIN_BY_AGE: Final = bytes(bisect_right(_EDGES, age + 1e-9) - 1 for age in range(_MAX_AGE))


def bin_of(age: int) -> int:
    """Return the bin of an age in requests; negative ages, of live requests, are in the first."""
    if age >= _MAX_AGE:
        return _NUM_BINS - 1
    return _BIN_BY_AGE[age] if age > 0 else 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """Properties of a prompt that determine the class of a request's new blocks.

    Attributes:
        last: Key of its last block.
        new_class: Class of its new blocks but the last one.
    """

    last: OffloadKey
    new_class: int


class ReuseTables:
    """Arrivals and hits by class and age, and the estimates made from them.

    Attributes:
        density: By class and bin: expected hits per block and request of occupancy, for a block
            that may be dropped at the best later age. It is the index of LHD (Beckmann et al.,
            NSDI 2018) and EVA (Beckmann and Sanchez, HPCA 2017), with Gittins' stopping rule.
    """

    __slots__ = ("_arrivals", "_hazard", "_hits", "density")

    def __init__(self) -> None:
        """Start with the same estimate for every class and age."""
        self._arrivals = [[0.0] * _NUM_BINS for _ in range(NUM_CLASSES)]
        self._hits = [[0.0] * _NUM_BINS for _ in range(NUM_CLASSES)]
        self.density: list[list[float]] = []
        self._estimate()

    def arrive(self, kind: int, which_bin: int, weight: float) -> None:
        """Count blocks of a class that reach an age bin."""
        self._arrivals[kind][which_bin] += weight

    def hit(self, kind: int, which_bin: int, weight: float) -> None:
        """Count blocks of a class that are reused in an age bin."""
        self._hits[kind][which_bin] += weight

    def update(self) -> None:
        """Recompute the estimates, and decay the counts."""
        self._estimate()
        for rows in self._arrivals, self._hits:
            rows[:] = [[count * _KEPT_PER_UPDATE for count in row] for row in rows]

    def reuse_within(self, kind: int, num_requests: float) -> float:
        """Return the probability of reuse of a block just used, within `num_requests` requests."""
        unused = 1.0
        for hazard, edge, width in zip(self._hazard[kind], _EDGES, _WIDTHS, strict=True):
            part = min(1.0, (num_requests - edge) / width)
            if part <= 0:
                break
            unused *= (1.0 - hazard) ** part
        return float(1.0 - unused)

    def _estimate(self) -> None:
        arrivals, hits = _smoothed(self._arrivals), _smoothed(self._hits)
        totals = hits.sum(axis=1) + _PRIOR_HITS, arrivals.sum(axis=1) + _PRIOR_ARRIVALS
        mean = (totals[0] / totals[1])[:, None]
        hazard = (hits + _PRIOR_ARRIVALS * mean) / (arrivals + _PRIOR_ARRIVALS)
        hazard = np.minimum(1.0, hazard)
        # Axes: class, bin of the block's age, later bin. A block survives to a bin if it was not
        # hit in those between.
        is_later = np.tri(_NUM_BINS, dtype=bool).T
        survives = np.ones((NUM_CLASSES, _NUM_BINS, _NUM_BINS))
        survives[:, :, 1:] = np.where(is_later, 1.0 - hazard[:, None, :], 1.0)[:, :, :-1]
        reaches = np.where(is_later, survives.cumprod(axis=2), 0.0)
        expected_hits = (reaches * hazard[:, None, :]).cumsum(axis=2)
        occupied = (reaches * (_WIDTHS * (1.0 - hazard / 2))[:, None, :]).cumsum(axis=2)
        density = np.divide(
            expected_hits, occupied, out=np.zeros_like(occupied), where=occupied > 0
        ).max(axis=2)
        self._hazard: list[list[float]] = hazard.tolist()
        self.density = density.tolist()


def _smoothed(rows: Sequence[Sequence[float]]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return rows smoothed twice over adjacent bins, with weights 1, 2, 1."""
    smoothed = np.array(rows)
    for _ in range(2):
        padded = np.pad(smoothed, ((0, 0), (1, 1)), mode="edge")
        smoothed = (padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]) / 4
    return smoothed


class ReuseModel:
    """The known blocks, with their uses, and the tables that they feed; time is in requests.

    The blocks of one class that a request used form a *group*: they are used again together, so a
    group of n blocks counts as the square root of n. A known block is *held* while it is in the
    cache; of the others, at most `num_others` are remembered, the least recent ones forgotten.

    Bytes per known block: 22, with the key table's 38 to 75, and the key if no other table has it.

    Thread: owner.

    Attributes:
        clock: Number of requests recorded.
        tables: The estimates.
    """

    def __init__(self, num_cached: int, num_others: int) -> None:
        """Start without known blocks; at most `num_cached` blocks are held at once."""
        self._num_others = num_others
        self._num_known = num_cached + num_others
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        count = self._num_known
        self.clock = 0
        self.tables = ReuseTables()
        self._known = KeyMap(count)
        self._keys = Objects()
        self._free = FreeNumbers(count)
        self._others = NumberLists(count)
        """The known blocks that are not held, least recent first."""
        self._is_cached = small_integers(count)
        self._uses = small_integers(count)
        self._group_of = integers(count)
        # A group has a known member; while a request is recorded, its new groups have none yet.
        num_groups = count + NUM_CLASSES
        self._free_groups = FreeNumbers(num_groups)
        self._formed_at = integers(num_groups)
        self._class_of_group = small_integers(num_groups)
        self._size = integers(num_groups)
        self._alive = integers(num_groups)
        self._formed: list[Sequence[int]] = [()] * _MAX_AGE
        """Groups by the time at which they were formed, modulo the list's length."""

    # -- classes --------------------------------------------------------------------------------

    def prompt(self, positions: dict[OffloadKey, int], keys: Sequence[OffloadKey]) -> Prompt:
        """Return the properties of a request's prompt.

        Args:
            positions: `ReqContext.key_positions`. If it is empty, `keys` count as the whole prompt.
            keys: Keys of the request, head to tail, at least one.
        """
        whole: Iterable[OffloadKey] = positions or keys
        length = len(positions or keys)
        last = next(reversed(positions)) if positions else keys[-1]
        first = self._known.find(tuple(islice(whole, 2)))
        is_known = len(first) > 1 and None not in first
        base = _NEW_AFTER_KNOWN if is_known else _NEW
        return Prompt(last, base + bisect_right(_LONG_PROMPT, length))

    def classes(self, keys: Sequence[OffloadKey], prompt: Prompt) -> list[int]:
        """Return the class that each block gets if the request uses it now."""
        return self._classes(keys, self._known.find(keys), prompt)

    def may_become(self, kind: int, prompt: Prompt) -> range:
        """Return the other classes that a new block may have when its request ends.

        The prompt may grow: its last block is then another one, and it may pass a length.
        """
        if kind == LAST_OF_PROMPT:
            kind = prompt.new_class - 1
        elif kind < _NEW_AFTER_KNOWN:
            return range(0)
        longest = prompt.new_class - prompt.new_class % 3 + len(_LONG_PROMPT)
        return range(kind + 1, longest + 1)

    def reuse_within(self, kind: int, num_requests: float) -> float:
        """Return the probability of reuse of a block just used, within `num_requests` requests."""
        return self.tables.reuse_within(kind, num_requests)

    # -- requests -------------------------------------------------------------------------------

    def record(
        self, keys: Sequence[OffloadKey], prompt: Prompt, is_cached: Sequence[bool]
    ) -> tuple[list[int], list[int]]:
        """Record the blocks that a request has used, head to tail, and advance the clock.

        Args:
            keys: The keys, without duplicates; those behind the first `num_others` are ignored.
            prompt: The request's prompt.
            is_cached: For each key, whether the cache holds the block.

        Returns:
            The class of each block, also of ignored ones, and the numbers of the others.
        """
        self.clock += 1
        self._pass_edges()
        found = self._known.find(keys)
        classes = self._classes(keys, found, prompt)
        keys = keys[: self._num_others]
        del found[self._num_others :]
        others, held, uses = self._others, self._is_cached, self._uses
        again = [number for number in found if number is not None]
        others.remove([number for number in again if not held[number]])
        for number in again:
            self._leave_group(number, is_hit=True)
        new = [key for key, number in zip(keys, found, strict=True) if number is None]
        fresh = iter(self._take_numbers(new))
        numbers = [next(fresh) if number is None else number for number in found]
        members: list[list[int]] = [[] for _ in range(NUM_CLASSES)]
        not_held: list[int] = []
        for number, kind, holds in zip(numbers, classes, is_cached, strict=False):
            uses[number] = min(uses[number] + 1, _MAX_USES)
            members[kind].append(number)
            held[number] = holds
            if not holds:
                not_held.append(number)
        others.append(not_held)
        self._form_groups(members)
        if self.clock % _UPDATE_REQUESTS == 0:
            self.tables.update()
        return classes, numbers

    def release(self, numbers: Sequence[int]) -> None:
        """Record that blocks are no longer held, because the cache has evicted them."""
        for number in numbers:
            self._is_cached[number] = 0
        self._others.append(numbers)

    # -- inspection -------------------------------------------------------------------------------

    def violations(self) -> Iterator[str]:
        """Yield descriptions of the violated invariants."""
        alive: dict[int, int] = {}
        known = [number for _, number in self._known.items()]
        for number in known:
            group = self._group_of[number]
            alive[group] = alive.get(group, 0) + 1
        wrong = {group for group, count in alive.items() if self._alive[group] != count}
        if wrong:
            yield f"groups {sorted(wrong)} have other numbers of members than counted"
        used = self._free_groups.count + len(alive)
        if used != self._num_known + NUM_CLASSES:
            yield f"{used} groups are free or have members"
        others = set(self._others.walk())
        if others != {number for number in known if not self._is_cached[number]}:
            yield "the list of the blocks that are not held has others"

    # -- inside ---------------------------------------------------------------------------------

    def _classes(
        self, keys: Sequence[OffloadKey], found: Sequence[int | None], prompt: Prompt
    ) -> list[int]:
        uses, last, new_class = self._uses, prompt.last, prompt.new_class
        classes: list[int] = []
        for key, number in zip(keys, found, strict=True):
            if number is not None:
                classes.append(_CLASS_BY_USES[min(uses[number] + 1, _MAX_USES)])
            else:
                classes.append(LAST_OF_PROMPT if key == last else new_class)
        return classes

    def _pass_edges(self) -> None:
        """Count the groups that enter a bin at this request."""
        formed, alive, formed_at, size = self._formed, self._alive, self._formed_at, self._size
        arrive = self.tables.arrive
        for which_bin, age in enumerate(_ENTRY_AGES, 1):
            time = self.clock - age
            for group in formed[time % _MAX_AGE]:
                if formed_at[group] == time and alive[group]:
                    weight = alive[group] * size[group] ** -0.5
                    arrive(self._class_of_group[group], which_bin, weight)

    def _form_groups(self, members: Sequence[Sequence[int]]) -> None:
        formed: list[int] = []
        for kind, numbers in enumerate(members):
            if not numbers:
                continue
            (group,) = self._free_groups.take(1)
            formed.append(group)
            self._formed_at[group] = self.clock
            self._class_of_group[group] = kind
            self._size[group] = self._alive[group] = len(numbers)
            for number in numbers:
                self._group_of[number] = group
            self.tables.arrive(kind, 0, sqrt(len(numbers)))
        self._formed[self.clock % _MAX_AGE] = formed

    def _leave_group(self, number: int, *, is_hit: bool) -> None:
        group = self._group_of[number]
        if is_hit:
            which_bin = bin_of(self.clock - self._formed_at[group])
            weight = self._size[group] ** -0.5
            self.tables.hit(self._class_of_group[group], which_bin, weight)
        self._alive[group] -= 1
        if not self._alive[group]:
            self._free_groups.give_back([group])

    def _take_numbers(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Assign numbers to new blocks; to free some, forget the least recent blocks not held."""
        surplus = len(keys) - self._free.count
        if surplus > 0:
            oldest = self._others.take_front(surplus)
            for number in oldest:
                self._leave_group(number, is_hit=False)
            self._known.discard(self._keys.find(oldest))
            self._free.give_back(oldest)
        numbers = self._free.take(len(keys))
        self._known.update(keys, numbers)
        self._keys.update(numbers, keys)
        for number in numbers:
            self._uses[number] = 0
        return numbers
