"""An asyncio server whose requests share prefixes: each loads what another has computed.

`OffloadEngine` runs on the server's own loop. Thirty-two requests over eight conversations come at
once; the device has room for six of them at a time.
"""

import asyncio
import contextlib
import hashlib
import random

import torch

from kvoffload_async import (
    BusyError,
    EngineRequest,
    InvalidatedError,
    OffloadEngine,
    TransportError,
)

BLOCK_BYTES, BLOCKS_PER_REQUEST, ROOMS, CONVERSATIONS = 256, 8, 6, 8


def chained_hashes(prompt: str) -> list[bytes]:
    """One hash a block of four letters; equal hashes mean equal text up to there."""
    ends = range(4, len(prompt) + 1, 4)
    return [hashlib.sha256(prompt[:end].encode()).digest() for end in ends]


def kv_of(block_hash: bytes) -> torch.Tensor:
    """What a model would compute for a block."""
    return torch.tensor(list(block_hash * (BLOCK_BYTES // 32)), dtype=torch.uint8)


class Server:
    """Answers prompts; `rooms` are the parts of the device that a request can have."""

    def __init__(self, engine: OffloadEngine, kv_cache: torch.Tensor) -> None:
        self.engine = engine
        self.kv_cache = kv_cache
        self.rooms: asyncio.Queue[list[int]] = asyncio.Queue()
        for first in range(0, ROOMS * BLOCKS_PER_REQUEST, BLOCKS_PER_REQUEST):
            self.rooms.put_nowait(list(range(first, first + BLOCKS_PER_REQUEST)))
        self.loaded = self.computed = 0

    async def answer(self, name: str, prompt: str) -> None:
        async with self.engine.request(name, chained_hashes(prompt)) as request:
            device_blocks = await self.rooms.get()
            try:
                await self.compute(request, chained_hashes(prompt), device_blocks)
            finally:
                # Also after an error or a cancellation, when a copy may still use the blocks.
                if await request.released():
                    self.rooms.put_nowait(device_blocks)

    async def compute(
        self, request: EngineRequest, hashes: list[bytes], device_blocks: list[int]
    ) -> None:
        """Load the longest known prefix, compute the rest, and store that."""
        found = await self.engine.lookup(request)  # pins the prefix
        try:
            found = await self.engine.load(request, device_blocks[:found])
        except (BusyError, InvalidatedError, TimeoutError, TransportError):
            await request.released()  # what was begun has ended: compute it instead
            found = 0
        for index, block_hash in enumerate(hashes):
            block = self.kv_cache[device_blocks[index]]
            if index < found:
                assert torch.equal(block, kv_of(block_hash)), "wrong KV was loaded"
            else:
                block.copy_(kv_of(block_hash))
        await asyncio.sleep(0)  # the forward pass would be awaited here
        with contextlib.suppress(BusyError):  # no room: others cannot use what was computed
            await self.engine.store(request, device_blocks[found : len(hashes)], found)
        self.loaded += found
        self.computed += len(hashes) - found


async def main() -> None:
    kv_cache = torch.zeros(ROOMS * BLOCKS_PER_REQUEST, BLOCK_BYTES, dtype=torch.uint8)
    config = {
        "cpu_bytes_to_use": "192KiB",  # 48 blocks: less than all conversations together
        "model": "org/example",
        "secondary_tiers": [{"type": "example"}],
    }
    draw = random.Random(0)  # noqa: S311 - prompts, not secrets
    async with OffloadEngine(config, kv_caches={"layer": kv_cache}) as engine:
        server = Server(engine, kv_cache)
        async with asyncio.TaskGroup() as requests:
            for number in range(32):
                text = f"system prompt--- user {number % CONVERSATIONS}: "
                prompt = text + "la" * draw.randint(0, 4)
                requests.create_task(server.answer(f"request-{number}", prompt))
        counters = engine.manager.planner.counters
        print(f"{server.computed} blocks computed, {server.loaded} loaded")
        print(f"{counters.jobs_submitted} jobs of the secondary tier, all of them reported")
        assert server.loaded > server.computed


if __name__ == "__main__":
    asyncio.run(main())
