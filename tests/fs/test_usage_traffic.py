"""How far the shared count is from the disk while writers go on, in virtual time.

Two processes, of which each has two jobs in flight at any time and walks with 2 % of a CPU, share
a directory that is full. Somebody else deletes a tenth of the blocks. The arithmetic is the
product's.
"""

import heapq
import itertools
import random
from collections.abc import Iterator

import pytest

from kvoffload_async.tiers.fs.layout import REST
from kvoffload_async.tiers.fs.usage import NUM_BUCKETS, Sum, Usage, WriterCount

MIB = 1 << 20
BYTES_PER_S = 300 * MIB
JOB = 8
BLOCK_WALK_S = 12e-6
"""CPU time of a walk per block, with learning it."""
STEP_S, SHARE, GROWTH = 0.02, 0.02, 4


class Directory:
    """A full directory, its count, and the processes at work on it."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.draw = random.Random(num_blocks)
        self.unit = block_bytes
        self.capacity_bytes = num_blocks * block_bytes
        self.blocks = [0] * REST
        for _ in range(num_blocks):
            self.blocks[self.draw.randrange(REST)] += 1
        total = Sum(self.capacity_bytes, 0, 1, NUM_BUCKETS, NUM_BUCKETS)
        self.usage = Usage(total=total)
        self.moving = 0
        self.now_s = 0.0
        self.cycles: list[int] = []
        """Bytes counted beyond those on disk, at the end of each cycle."""
        self.least_excess = 0

    @property
    def excess_bytes(self) -> int:
        disk_bytes = (sum(self.blocks) + self.moving) * self.unit
        return self.usage.total_bytes - disk_bytes

    def run(self, num_cycles: int) -> None:
        """Let all processes work until walks have ended so often."""
        order = itertools.count()
        processes = [self.walker(n) for n in range(2)] + [self.writer(n) for n in range(4)]
        queue = [(0.0, next(order), process) for process in processes]
        while len(self.cycles) < num_cycles:
            self.now_s, _, process = heapq.heappop(queue)
            heapq.heappush(queue, (self.now_s + next(process), next(order), process))

    def delete(self, share: float) -> None:
        """Delete a share of the blocks, as somebody else does."""
        for bucket, num_blocks in enumerate(self.blocks):
            self.blocks[bucket] -= int(num_blocks * share)

    def occupied(self) -> int:
        while not self.blocks[bucket := self.draw.randrange(REST)]:
            pass
        return bucket

    def writer(self, number: int) -> Iterator[float]:
        """Store without a pause; the jobs of all writers take as long as the rate allows."""
        pause_s = 4 * JOB * self.unit / BYTES_PER_S / (2 * JOB + 1)
        yield self.draw.random() * pause_s
        usage = self.usage
        while True:
            entry = usage.writers.setdefault(f"{number}", WriterCount())
            room = max(0, self.capacity_bytes - usage.total_bytes) // self.unit
            granted = min(JOB, room)
            entry.reserved_bytes = granted * self.unit
            entry.moving_bytes = (JOB - granted) * self.unit
            marks = usage.marks
            changes = []
            for at in range(JOB):
                if at >= granted:
                    victim = self.occupied()
                    self.blocks[victim] -= 1
                    self.moving += 1
                    changes.append((victim, -self.unit))
                yield pause_s
                bucket = self.draw.randrange(REST)
                self.blocks[bucket] += 1
                self.moving -= at >= granted
                changes.append((bucket, self.unit))
                yield pause_s
            usage.change(changes, marks)
            entry.reserved_bytes = entry.moving_bytes = 0
            self.least_excess = min(self.least_excess, self.excess_bytes)
            yield pause_s

    def walker(self, number: int) -> Iterator[float]:
        """Walk cycle after cycle, as `NamespaceWalk` does."""
        usage = self.usage
        entry = usage.writers.setdefault(f"walker {number}", WriterCount())
        yield self.draw.random()
        while True:
            entry.walk = Sum(number=self.draw.randrange(2, 1 << 32))
            position = 0
            while position < NUM_BUCKETS:
                cpu_s, count, begun = 0.0, 1, position
                while cpu_s < STEP_S and position < NUM_BUCKETS:
                    first, end = position, min(position + count, NUM_BUCKETS)
                    entry.walk.advance(first, first, end, 0)
                    found = 0
                    while position < end and cpu_s < STEP_S:
                        took_s = 1e-4
                        if position < REST:
                            took_s += self.blocks[position] * BLOCK_WALK_S
                            seen_s = self.draw.random() * took_s
                            yield seen_s
                            found += self.blocks[position]
                            yield took_s - seen_s
                        cpu_s += took_s
                        position += 1
                    entry.walk.advance(first, position, position, found * self.unit)
                    affordable = (position - begun) * (STEP_S - cpu_s) / cpu_s
                    count = max(1, int(min(GROWTH * count, affordable)))
                yield cpu_s / SHARE - cpu_s
            usage.end_walk(entry, ())
            self.cycles.append(self.excess_bytes)


@pytest.mark.parametrize("num_blocks", [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("block_bytes", [2 * MIB, MIB // 4])
def test_the_count_is_that_of_the_disk_two_walks_after_others_deleted_blocks(
    num_blocks, block_bytes
):
    directory = Directory(num_blocks, block_bytes)
    directory.run(2)
    assert max(directory.cycles) < 0.02 * directory.capacity_bytes
    directory.delete(0.1)
    deleted_bytes = directory.excess_bytes
    assert deleted_bytes > 0.09 * directory.capacity_bytes
    directory.cycles.clear()
    directory.run(4)  # two of each walker
    assert directory.least_excess == 0, "less was counted than there was"
    assert directory.excess_bytes < 0.02 * directory.capacity_bytes
