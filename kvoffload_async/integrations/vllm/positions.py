"""Where the keys of a request lie in its prompt, as vLLM's scheduler notes it.

It notes that of every key before it looks the first one up. Its public method returns one position
at a time, and only of a key that one knows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from kvoffload_async.types import OffloadKey, ReqContext


class VLLMContext(Protocol):
    """What is used here of vLLM's context of a request."""

    def get_offload_key_position(self, key: OffloadKey) -> int | None:
        """Return the end token of a key's block, where it is known."""
        ...


def share_positions(context: VLLMContext, request: ReqContext) -> None:
    """Let a request that has just begun read vLLM's own positions, also those noted from now on.

    Without effect for a vLLM that keeps them in another way. Nothing here writes to them.

    Thread: the scheduler's.
    """
    positions = _positions_of(context)
    if positions is not None:
        request.key_positions = positions


def take_positions(keys: Iterable[OffloadKey], context: VLLMContext, request: ReqContext) -> None:
    """Copy what vLLM knows of the keys' positions, unless the request shares all of them."""
    if request.key_positions is _positions_of(context):
        return
    for key in keys:
        position = context.get_offload_key_position(key)
        if position is not None:
            request.key_positions[key] = position


def _positions_of(context: VLLMContext) -> dict[OffloadKey, int] | None:
    positions = getattr(context, "_offload_key_positions", None)
    return positions if isinstance(positions, dict) else None
