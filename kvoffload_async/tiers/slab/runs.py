"""Joining blocks that lie beside each other into one transfer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvoffload_async.tiers.slab.places import Place


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks whose places are neighbours.

    Attributes:
        place: The first one's place.
        start: The first one's position among the blocks that were joined.
        count: How many they are.
    """

    place: Place
    start: int
    count: int


def joined(places: Sequence[Place], start: int, stop: int) -> Iterator[Run]:
    """Yield the maximal runs of neighbours among `places[start:stop]`, which ascend."""
    while start < stop:
        place = places[start]
        end = start + 1
        # Ascending and distinct, so the last one tells whether all of them are neighbours.
        if places[stop - 1] - place == stop - 1 - start:
            end = stop
        else:
            while end < stop and places[end] - place == end - start:
                end += 1
        yield Run(place, start, end - start)
        start = end


def spans(rows: Sequence[int], start: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield the maximal stretches `(first row, rows)` of `rows[start:start + count]`, in order."""
    stop = start + count
    while start < stop:
        end = start + 1
        while end < stop and rows[end] == rows[end - 1] + 1:
            end += 1
        yield rows[start], end - start
        start = end
