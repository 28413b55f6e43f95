"""Selects the transport for the tensors' device."""

from __future__ import annotations

from kvoffload_async.abc.transport import Transport
from kvoffload_async.transport.host import HostTransport
from kvoffload_async.transport.layout import KVLayout


def create_transport(
    layout: KVLayout, kv_view: memoryview, *, cell_offset_bytes: int = 0
) -> Transport:
    """Create a transport between a layout's tensors and the primary's slots.

    Args:
        layout: The device's tensors; those on the CPU simulate a device.
        kv_view: The primary's buffer, shape `[num_slots, slot_bytes]` uint8.
        cell_offset_bytes: Offset of this worker's cell in a slot.

    Raises:
        ConfigError: A slot is too small for a chunk, or the device cannot be used.
    """
    if layout.device.type == "cpu":
        return HostTransport(layout, kv_view, cell_offset_bytes=cell_offset_bytes)
    from kvoffload_async.transport.cuda import CudaTransport  # noqa: PLC0415 - only with a device

    return CudaTransport(layout, kv_view, cell_offset_bytes=cell_offset_bytes)
