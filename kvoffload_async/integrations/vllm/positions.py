"""Positions of a request's keys in its prompt, as recorded by vLLM's scheduler.

vLLM records all keys' positions before the first lookup. Its public method returns the position of
one given key at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from kvoffload_async.types import OffloadKey, ReqContext


class VLLMContext(Protocol):
    """The part of vLLM's request context used here."""

    def get_offload_key_position(self, key: OffloadKey) -> int | None:
        """Return the end token of a key's block, or None if unknown."""
        ...


def share_positions(context: VLLMContext, request: ReqContext) -> None:
    """Let a new request share vLLM's own dictionary of positions, including later additions.

    Has no effect if vLLM stores positions differently. The dictionary is never modified here.

    Not thread-safe; call only from the scheduler's thread.
    """
    positions = _positions_of(context)
    if positions is not None:
        request.key_positions = positions


def take_positions(keys: Iterable[OffloadKey], context: VLLMContext, request: ReqContext) -> None:
    """Copy the keys' positions from vLLM, unless the request shares vLLM's dictionary."""
    if request.key_positions is _positions_of(context):
        return
    for key in keys:
        position = context.get_offload_key_position(key)
        if position is not None:
            request.key_positions[key] = position


def _positions_of(context: VLLMContext) -> dict[OffloadKey, int] | None:
    positions = getattr(context, "_offload_key_positions", None)
    return positions if isinstance(positions, dict) else None
