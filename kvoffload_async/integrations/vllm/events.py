"""An order of events in which vLLM's tracker keeps metadata until a block's last removal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvoffload_async.types import Medium, OffloadingEvent, OffloadKey


def hold_removals(
    events: Sequence[OffloadingEvent], is_rewritten: Callable[[OffloadKey], bool]
) -> tuple[list[OffloadingEvent], list[OffloadingEvent]]:
    """Separate the primary's removals that must wait.

    vLLM records a block's metadata when the block is to be written. Told only then of an eviction
    before that, its tracker drops the new metadata, and the block would be announced without any.
    So the removal is announced together with the end of the write.

    Args:
        events: Events of the primary and the tiers, oldest first; those that waited come first.
        is_rewritten: Whether the primary is writing a block just now.

    Returns:
        The events to announce, and those to be given again with the next ones.
    """
    ready: list[OffloadingEvent] = []
    held: dict[OffloadKey, None] = {}
    for event in reversed(events):
        keys = event.keys
        if event.removed and event.ownership is None and not event.metadata_only:
            waiting = {key for key in keys if is_rewritten(key) and key not in held}
            keys = tuple(key for key in keys if key not in waiting) if waiting else keys
            held.update(dict.fromkeys(waiting))
        if keys:
            ready.append(event if keys is event.keys else replace(event, keys=keys))
    ready.reverse()
    waiting_event = OffloadingEvent(tuple(held), Medium.CPU, removed=True)
    return ready, [waiting_event] if held else []
