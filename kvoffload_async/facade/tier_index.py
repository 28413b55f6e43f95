"""What the owner knows of a tier's contents, by what kind of tier it is."""

from __future__ import annotations

from kvoffload_async.abc.tier import AsyncTier
from kvoffload_async.core.index import ExactIndex, KeyIndex, ProbedIndex
from kvoffload_async.core.selective_index import SelectiveIndex


def create_index(tier: AsyncTier, min_blocks: int) -> KeyIndex:
    """Return the index of a tier that is asked for requests that miss `min_blocks` at least."""
    index: KeyIndex = (
        ExactIndex()
        if tier.capabilities.exclusive
        else ProbedIndex(
            tier.bounds.concurrent_probes,
            keeps_order=tier.capabilities.probes_prefixes,
            keys_before=tier.capabilities.keys_before,
        )
    )
    return index if min_blocks == 1 else SelectiveIndex(index, min_blocks)
