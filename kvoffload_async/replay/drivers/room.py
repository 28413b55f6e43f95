"""What a device must have room for."""

from __future__ import annotations

from kvoffload_async.errors import InputError
from kvoffload_async.replay.device import FramePool
from kvoffload_async.replay.prompt import Prompt


def require_room(prompt: Prompt, pool: FramePool) -> None:
    """Raise InputError if a request is larger than the device."""
    if len(prompt.ids) > pool.num_frames:
        raise InputError(
            f"{prompt.request_id} has {len(prompt.ids)} blocks, and the device room for "
            f"{pool.num_frames}; give more --device-blocks"
        )
