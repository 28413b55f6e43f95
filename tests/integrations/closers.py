"""Threads that close a `PageStore` beside running copies: run beside the tests, as it may crash.

    python closers.py SCHEDULES

Each schedule draws two to four closers, the copies that run, when each begins, and whether a copy
outlives the deadline of closing. Prints the schedules, and those in which a copy outlived it.
"""

import logging
import random
import sys
import threading
from types import SimpleNamespace

import numpy as np
import torch

from kvoffload_async.abc.tier import AsyncTier, Direction, TierBounds, TierCapabilities
from kvoffload_async.errors import ClosedError
from kvoffload_async.integrations.sglang.page_store import PageStore
from kvoffload_async.types import make_offload_key

PAGE_BYTES = 8192
DEADLINE_S = 60.0
KEYS = [make_offload_key(bytes([number]) * 32) for number in range(8)]


class CopyingTier(AsyncTier):
    """Reads and writes the rows of its jobs until it is told to end."""

    capabilities = TierCapabilities(exclusive=True)
    bounds = TierBounds(4, 4, 8, 64, 2)
    ends = threading.Event()
    running = threading.Semaphore(0)

    async def open(self, env):
        self.env, self.rows = env, np.asarray(env.kv_view)

    async def contains(self, keys):
        return frozenset()

    async def store(self, job):
        await self.env.io.run(Direction.STORE, lambda: self.copy(job.block_ids))
        return {}

    async def load(self, job):
        await self.env.io.run(Direction.LOAD, lambda: self.copy(job.block_ids))
        return {}

    def copy(self, rows):
        self.running.release()
        while True:
            self.rows[rows] = self.rows[rows] + 1
            if self.ends.wait(0.0005):
                return

    async def close(self):
        pass


def schedule(seed):
    """Run one; return whether a copy outlived the deadline."""
    draw = random.Random(seed)
    is_late = draw.random() < 0.3
    CopyingTier.ends.clear()
    tier = {"type": "CopyingTier", "module_path": "closers"}
    tier["close_timeout_s"] = 0.05 if is_late else DEADLINE_S
    pages = SimpleNamespace(page_bytes=PAGE_BYTES, part_bytes=None, addresses=None)
    store = PageStore(pages, [tier], 4, 1 << 20)

    def copy(number):
        try:
            page = torch.ones(PAGE_BYTES, dtype=torch.uint8)
            store.move_tensors(Direction.STORE, [KEYS[number]], [page])
        except ClosedError:
            return

    copiers = [threading.Thread(target=copy, args=(n,)) for n in range(draw.randint(1, 3))]
    for copier in copiers:
        copier.start()
    assert CopyingTier.running.acquire(timeout=DEADLINE_S)
    reports = []
    closers = [
        threading.Thread(target=lambda: reports.append(store.close()))
        for _ in range(draw.randint(2, 4))
    ]
    actions = [closer.start for closer in closers]
    if not is_late:
        actions.insert(draw.randint(0, len(actions)), CopyingTier.ends.set)
    for act in actions:
        threading.Event().wait(draw.choice([0, 0, 0.001, 0.003]))
        act()
    for closer in closers:
        closer.join(DEADLINE_S)
    assert len(reports) == len(closers), "each closer has ended"
    assert all(report is reports[0] for report in reports), reports
    assert bool(reports[0].unfinished_jobs) is is_late, reports
    CopyingTier.ends.set()
    for copier in copiers:
        copier.join(DEADLINE_S)
        assert not copier.is_alive()
    while CopyingTier.running.acquire(blocking=False):
        pass
    return is_late


if __name__ == "__main__":
    sys.modules["closers"] = sys.modules["__main__"]
    logging.disable()
    late = [schedule(seed) for seed in range(int(sys.argv[1]))]
    sys.stdout.write(f"{len(late)} schedules, {sum(late)} with a late copy\n")
