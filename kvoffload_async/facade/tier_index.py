"""What the owner knows of a tier's contents, by what kind of tier it is."""

from __future__ import annotations

from kvoffload_async.abc.tier import AsyncTier
from kvoffload_async.core.backpressure import Backpressure
from kvoffload_async.core.eventlog import EventLog
from kvoffload_async.core.index import ExactIndex, KeyIndex, ProbedIndex
from kvoffload_async.core.payback import Payback
from kvoffload_async.core.selective_index import SelectiveIndex
from kvoffload_async.core.tier_state import TierState


def create_index(
    tier: AsyncTier, min_blocks: int, prefill_blocks_per_s: float | None = None
) -> KeyIndex:
    """Return the index of a tier that is asked for requests that miss enough blocks.

    Those are `min_blocks` at least, and with `prefill_blocks_per_s` as many as loading pays for.
    """
    index: KeyIndex = (
        ExactIndex()
        if tier.capabilities.exclusive
        else ProbedIndex(
            tier.bounds.concurrent_probes,
            keeps_order=tier.capabilities.probes_prefixes,
            keys_before=tier.capabilities.keys_before,
        )
    )
    if prefill_blocks_per_s is not None:
        return SelectiveIndex(index, min_blocks, Payback(prefill_blocks_per_s))
    return index if min_blocks == 1 else SelectiveIndex(index, min_blocks)


def create_state(
    name: str,
    tier: AsyncTier,
    index: KeyIndex,
    slot_bytes: int,
    *,
    enable_kv_events: bool,
    backpressure: Backpressure | None,
) -> TierState:
    """Return the state of a tier that has nothing to do yet."""
    capabilities = tier.capabilities
    events = EventLog(
        capabilities.medium,
        capabilities.locality,
        enabled=enable_kv_events,
        ownership=name,
        announces_removals=capabilities.announces_removals,
        # Else nobody bounds what would be remembered.
        remembers=capabilities.exclusive or capabilities.announces_removals,
    )
    return TierState(
        name,
        index,
        slot_bytes,
        events,
        medium=capabilities.medium,
        locality=capabilities.locality,
        backpressure=backpressure,
    )
