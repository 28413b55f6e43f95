"""What a device must have room for."""

from __future__ import annotations

from kvoffload_async.cli.device import FramePool
from kvoffload_async.cli.errors import InputError
from kvoffload_async.cli.flight import Flight


def require_room(flight: Flight, pool: FramePool) -> None:
    """Raise InputError if a request is larger than the device."""
    if len(flight.ids) > pool.num_frames:
        raise InputError(
            f"{flight.request_id} has {len(flight.ids)} blocks, and the device room for "
            f"{pool.num_frames}; give more --device-blocks"
        )
