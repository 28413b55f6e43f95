"""Joining blocks that lie beside each other into one transfer."""

from __future__ import annotations

from collections.abc import Sequence
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
    runs: list[Run] = []
    while start < stop:
        place = places[start]
        end = start + 1
        # Ascending and distinct, so the last one tells whether all of them are neighbours.
        if places[stop - 1] - place == stop - 1 - start:
            end = stop
        else:
            while end < stop and places[end] - place == end - start:
                end += 1
        runs.append(Run(place, start, end - start))
        start = end
    return runs
