"""Prefixes of prompts, for batches of keys that list them head to tail, by KV-cache group.

A block is useless without the other groups' blocks for the same tokens, so a batch is cut at one
token across all groups. Without positions only the order within a group is known, and a batch of
several groups is not cut.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from kvoffload_async.types import OffloadKey, get_offload_group_idx


def longest_fitting_prefix(
    keys: Sequence[OffloadKey], positions: Mapping[OffloadKey, int], room: int
) -> tuple[Sequence[OffloadKey], Sequence[OffloadKey]]:
    """Split keys into the longest prefix of at most `room` blocks and the rest, keeping order.

    Args:
        keys: Without duplicates.
        positions: Key -> the end token of its block.
        room: Number of blocks that fit.
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
    """Return the `keys` that precede all keys left out by `longest_fitting_prefix`."""
    if not left_out:
        return keys
    if left_out[0] not in positions:
        return keys[: keys.index(left_out[0])]
    first_out = min(positions[key] for key in left_out)
    return [key for key in keys if positions.get(key, first_out) < first_out]


def prefix_test(
    wanted: Sequence[OffloadKey],
    used: Collection[OffloadKey],
    positions: Mapping[OffloadKey, int],
) -> Callable[[OffloadKey], bool]:
    """Return a predicate: whether a request has used a key that precedes `wanted` in its prompt.

    The request must not evict these blocks to store `wanted`.
    """
    first = min(positions.get(key, 0) for key in wanted)
    return lambda key: positions.get(key, first) < first and key in used
