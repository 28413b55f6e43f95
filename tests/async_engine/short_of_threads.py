"""An engine in a system that gives no thread, from each start of one on: run beside the tests.

    python short_of_threads.py FOLDER TIERS KIND

`TIERS` are configurations as JSON. `KIND` is "once" (only the n-th start of a thread fails, for
each n), "always" (the n-th and all later ones, for each n) or "closing" (all while it is closed).
Prints a line for each schedule: n, and how the engine ended.
"""

import asyncio
import gc
import hashlib
import json
import logging
import sys
import threading
import time
from pathlib import Path

import thread_refusals
import torch

from kvoffload_async import OffloadEngine, OffloadError

BLOCK_BYTES = 16384
NUM_BLOCKS = 24
PRIMARY_BYTES = 37 * BLOCK_BYTES  # a size that no other mapping has
HASHES = [hashlib.sha256(bytes([number])).digest() for number in range(NUM_BLOCKS)]
GRACE_S = 20.0
MOST_STARTS = 200


def config(folder, tiers):
    return {
        "cpu_bytes_to_use": PRIMARY_BYTES,
        "model": "m",
        "prefault": True,
        "secondary_tiers": tiers,
        "status_socket": str(folder / "socket"),
        "record_trace": str(folder / "trace"),
    }


def tasks():
    return {path.name for path in Path("/proc/self/task").iterdir()}


def state():
    """Return what an engine must not leave: threads, descriptors, the primary's memory."""
    gc.collect()
    mapped = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, _, end = line.split()[0].partition("-")
        mapped += int(end, 16) - int(begin, 16) == PRIMARY_BYTES
    files = len(list(Path("/proc/self/fd").iterdir()))
    own = sorted(t.name for t in threading.enumerate() if t.name.startswith("kvoffload"))
    return own, len(tasks()), files, mapped


def rest(before):
    """Return what is left of an engine after the kernel had time to forget it."""
    deadline_s = time.monotonic() + GRACE_S
    while (now := state()) != before and time.monotonic() < deadline_s:
        threading.Event().wait(0.01)
    return now


async def use(engine, device):
    """Store and load blocks; what is loaded is right."""
    for number, one in enumerate(HASHES):
        device[number] = one[0]
    async with engine.request("s", HASHES) as request:
        first = await engine.lookup(request)
        assert first == await engine.load(request, range(first))
        await engine.store(request, range(first, NUM_BLOCKS), first)
    async with engine.request("l", HASHES) as request:
        found = await engine.lookup(request)
        device.zero_()
        found = await engine.load(request, range(found))
    assert [int(row[0]) for row in device[:found]] == [one[0] for one in HASHES[:found]]
    return found


async def run(folder, tiers, number, kind):
    device = torch.zeros(NUM_BLOCKS, BLOCK_BYTES, dtype=torch.uint8)
    if kind != "closing":
        thread_refusals.refuse(number, only=kind == "once")
    try:
        engine = OffloadEngine(config(folder, tiers), kv_caches={"layer": device})
        await engine.__aenter__()
    except OffloadError as error:
        is_named = "raise this process's limits of threads" in str(error)
        return "start refused" if is_named else f"start failed: {error}"
    try:
        await use(engine, device)
        if kind == "closing":
            thread_refusals.refuse(0, only=False)
    finally:
        await engine.close()
    return f"ran, {thread_refusals.seen() if kind == 'closing' else 0} starts while closing"


def main(folder, tiers, kind):
    asyncio.run(run(folder, tiers, 0, "closing"))  # the first engine of a process starts more
    thread_refusals.allow()
    gc.collect()
    gc.freeze()  # a collection with torch's modules takes 0.2 s, and each schedule has some
    before = state()
    for number in range(1 if kind == "closing" else MOST_STARTS):
        outcome = asyncio.run(run(folder, tiers, number, kind))
        seen = thread_refusals.seen()
        thread_refusals.allow()
        assert rest(before) == before, (number, outcome, before, state())
        sys.stdout.write(f"{number} {outcome}\n")
        if seen <= number:
            break
    else:
        assert kind == "closing", "an engine starts more threads"
    # No lock stays either: the same store opens, and has its blocks.
    sys.stdout.write(f"again {asyncio.run(run(folder, tiers, MOST_STARTS, 'closing'))}\n")


if __name__ == "__main__":
    logging.disable()
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3])
