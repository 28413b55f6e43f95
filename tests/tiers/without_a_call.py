"""Stores blocks in tiers and loads them in a second run, while a system call is refused.

python without_a_call.py CALL ERROR TIERS

The tiers are a JSON object, by name. Prints one too: what was found and what differed, or the error
at the start.
"""

import asyncio
import errno
import json
import logging
import os
import sys

import seccomp
import torch

from kvoffload_async import OffloadEngine, OffloadError

BLOCKS = 8
HASHES = [bytes([number]) * 32 for number in range(BLOCKS)]


async def store_and_load(tier):
    device = {"layer": torch.zeros(BLOCKS, 16384, dtype=torch.uint8)}
    config = {"cpu_bytes_to_use": "1MiB", "model": "m", "secondary_tiers": [tier]}
    async with OffloadEngine(config, kv_caches=device) as engine:
        async with engine.request("store", HASHES) as request:
            for number in range(BLOCKS):
                device["layer"][number] = number + 1
            await engine.store(request, range(BLOCKS), 0)
        await engine.quiesce(30)
        stats = engine.stats().tiers[0]
    device["layer"].zero_()
    again = OffloadEngine(config, kv_caches=device)
    async with again as engine, engine.request("load", HASHES) as request:
        found = await engine.load(request, range(await engine.lookup(request)))
    wrong = sum(int((device["layer"][n] != n + 1).any()) for n in range(found))
    return {"found": found, "wrong": wrong, "failed": stats.failed_jobs_by_error}


def main(call, error, tiers):
    logging.disable()
    seccomp.refuse(call, getattr(errno, error))
    outcomes = {}
    for name, tier in json.loads(tiers).items():
        try:
            outcomes[name] = asyncio.run(store_and_load(tier))
        except OffloadError as refusal:
            outcomes[name] = {"refused": str(refusal)}
    os.write(1, json.dumps(outcomes).encode())


main(*sys.argv[1:])
