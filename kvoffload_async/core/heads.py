"""Heads of prompts: what lies before what, and which head of a batch is stored for want of room.

A batch is head to tail, grouped by KV-cache group. A group's blocks are worth nothing without those
of the others for the same tokens, so it is cut at a token, over all groups. Without positions only
the order in one group is known, and a batch of several groups is not cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heappush, heapreplace
from math import inf

from kvoffload_async.types import OffloadKey, get_offload_block_hash, get_offload_group_idx


def split_where_it_fits(
    keys: Sequence[OffloadKey], positions: Mapping[OffloadKey, int], room: int
) -> tuple[Sequence[OffloadKey], Sequence[OffloadKey]]:
    """Split keys into the longest head of at most `room`, and the rest, each in their order.

    Args:
        keys: Without duplicates.
        positions: Key -> the end token of its block.
        room: How many blocks fit.
    """
    if len(keys) <= room:
        return keys, ()
    ends = [positions[key] for key in keys if key in positions]
    if len(ends) < len(keys):
        is_one_group = len({get_offload_group_idx(key) for key in keys}) == 1
        return (keys[:room], keys[room:]) if is_one_group else ((), keys)
    first_out = sorted(ends)[room]
    fits = [end < first_out for end in ends]
    return (
        [key for key, is_in in zip(keys, fits, strict=True) if is_in],
        [key for key, is_in in zip(keys, fits, strict=True) if not is_in],
    )


def those_before(
    left_out: Sequence[OffloadKey],
    keys: Sequence[OffloadKey],
    positions: Mapping[OffloadKey, int],
) -> Sequence[OffloadKey]:
    """Return which of `keys` lie before everything that `split_where_it_fits` left out of them."""
    if not left_out:
        return keys
    if left_out[0] not in positions:
        return keys[: keys.index(left_out[0])]
    first_out = min(positions[key] for key in left_out)
    return [key for key in keys if positions.get(key, first_out) < first_out]


def used_before(
    wanted: Sequence[OffloadKey],
    used: Iterable[OffloadKey],
    positions: Mapping[OffloadKey, int],
) -> Sequence[OffloadKey]:
    """Return what a request has used of the prompt before `wanted`: its tail must not evict it."""
    first = min(positions.get(key, 0) for key in wanted)
    return [key for key in used if positions.get(key, first) < first]


def nearest_before(
    key: OffloadKey, positions: dict[OffloadKey, int], most: int
) -> tuple[OffloadKey, ...]:
    """Return the keys of the same group that come right before `key`, head to tail.

    Positions are looked through once, from the last one on: mostly they were learned head to tail,
    and then all but a few are passed over at the price of a comparison.

    Args:
        key: Nothing is known to come before one without a position.
        positions: Key -> the end token of its block, of all groups, in any order.
        most: How many keys, at most; 1 at least.
    """
    end = positions.get(key)
    if end is None:
        return ()
    group = key.removeprefix(get_offload_block_hash(key))
    nearest: list[tuple[int, OffloadKey]] = []
    beyond = -inf
    for other, position in reversed(positions.items()):
        if beyond < position < end and other.endswith(group):
            if len(nearest) < most:
                heappush(nearest, (position, other))
            else:
                heapreplace(nearest, (position, other))
            if len(nearest) == most:
                beyond = nearest[0][0]
    return tuple(other for _, other in sorted(nearest))
