"""Load cached blocks, compute and store the rest: the README's example. Run it twice."""

import asyncio
from pathlib import Path

import torch

from kvoffload_async import OffloadEngine

device = {"layer": torch.zeros(64, 4096, dtype=torch.uint8)}  # 64 blocks of 4096 bytes
hashes = [bytes([number]) * 32 for number in range(4)]  # of a prompt of four blocks, chained
tier = {"type": "fs", "root_dir": str(Path("kv").absolute())}
config = {"cpu_bytes_to_use": "1MiB", "model": "org/model", "secondary_tiers": [tier]}


async def main() -> None:
    async with OffloadEngine(config, kv_caches=device) as engine, engine.request("1", hashes) as r:
        found = await engine.load(r, range(await engine.lookup(r)))  # the prefix that tiers have
        device["layer"][found:4] = 7  # compute the rest
        await engine.store(r, range(found, 4), found)
        print(f"{found} of 4 blocks loaded")


asyncio.run(main())
