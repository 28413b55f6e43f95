"""The choice of a transport for a layout's tensors."""

from __future__ import annotations

from kvoffload_async.abc.transport import Transport
from kvoffload_async.errors import naming_shortage
from kvoffload_async.transport.cuda import CudaTransport
from kvoffload_async.transport.host import HostTransport
from kvoffload_async.transport.layout import KVLayout
from kvoffload_async.transport.streams import DeviceRuntime


def create_transport(
    layout: KVLayout,
    kv_view: memoryview,
    *,
    cell_offset_bytes: int = 0,
    runtime: DeviceRuntime | None = None,
) -> Transport:
    """Create a transport between a layout's tensors and the primary's slots.

    Args:
        layout: The device's tensors.
        kv_view: The primary's buffer, shape `[num_slots, slot_bytes]` uint8.
        cell_offset_bytes: Offset of this worker's cell in a slot.
        runtime: Runtime of the tensors' device. None: CUDA's, and for tensors on the CPU no
            runtime at all: host threads copy, as if the tensors were on a device.

    Raises:
        ConfigError: A slot is too small for a chunk, or the device cannot be used.
        TierUnavailableError: Threads cannot be started.
    """
    with naming_shortage("the threads for copies cannot be started"):
        if runtime is None and layout.device.type == "cpu":
            return HostTransport(layout, kv_view, cell_offset_bytes=cell_offset_bytes)
        return CudaTransport(
            layout, kv_view, cell_offset_bytes=cell_offset_bytes, runtime=runtime or DeviceRuntime()
        )
