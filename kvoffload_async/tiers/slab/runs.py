"""Joining blocks that lie beside each other into one transfer."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import sub
from typing import NamedTuple

from kvoffload_async.tiers.slab.places import Place


class Run(NamedTuple):
    """Blocks whose places are neighbours.

    Attributes:
        place: The first one's place.
        start: The first one's position among the blocks that were joined.
        length: How many they are.
    """

    place: Place
    start: int
    length: int


def joined(places: Sequence[Place], start: int, stop: int) -> Sequence[Run]:
    """Return the maximal runs of neighbours among `places[start:stop]`, which ascend."""
    if start < stop and places[stop - 1] - places[start] == stop - 1 - start:
        return [Run(places[start], start, stop - start)]  # ascending and distinct: all neighbours
    runs: list[Run] = []
    # The same for all of a run, and more for those behind it.
    surplus = list(map(sub, places[start:stop], range(stop - start)))
    at, end = 0, len(surplus)
    while at < end:
        behind = bisect_right(surplus, surplus[at], at)
        runs.append(Run(places[start + at], start + at, behind - at))
        at = behind
    return runs
