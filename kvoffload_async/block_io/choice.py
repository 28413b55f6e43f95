"""Which implementation is used."""

from __future__ import annotations

from kvoffload_async.abc.tier import IoRunner
from kvoffload_async.block_io.contract import BlockDigests, BlockIo, FileCalls
from kvoffload_async.block_io.python_io import PythonBlockIo


def implementation() -> str:
    return "python"


def create_block_io(
    io: IoRunner,
    calls: FileCalls,
    kv_view: memoryview,
    slot_bytes: int,
    digests: BlockDigests,
    *,
    threads: int,
    piece_bytes: int,
    is_direct: bool = False,
) -> BlockIo:
    return PythonBlockIo(
        io, calls, kv_view, slot_bytes, digests, threads=threads, piece_bytes=piece_bytes
    )
