"""A tier with a capacity, and what holds of it."""

import asyncio

from fs.directories import KIB, FsDirectory

from kvoffload_async.abc.events import BlocksEvicted
from kvoffload_async.testing.harness import TierHarness, key_of
from kvoffload_async.tiers.fs.housekeeping import Housekeeping
from kvoffload_async.tiers.fs.walk import Step

K = [key_of(number) for number in range(400)]


class Unheard:
    """An environment in which nobody hears of the blocks of a tier."""

    def blocks_appeared(self, keys):
        pass

    def blocks_evicted(self, keys):
        pass


def room_for(num_blocks: int) -> int:
    """Return a capacity: 4 KiB a block, 20 KiB for the count and the entry of the writer."""
    return 20 * KIB + num_blocks * 4 * KIB


ROOM_FOR_8 = room_for(8)


def evicted(harness: TierHarness) -> set:
    return {k for event in harness.events if isinstance(event, BlocksEvicted) for k in event.keys}


def rescan(harness: TierHarness) -> Step:
    """Walk over everything, from the beginning of a cycle to its end."""
    return harness.run(rescanned(harness.tier._housekeeping))


async def rescanned(housekeeping: Housekeeping) -> Step:
    async with housekeeping._walking:
        housekeeping._walk.begin_anew()
        while not (step := await housekeeping._take_step(lambda: False)).ends_cycle:
            pass
        return step


def trim(harness: TierHarness) -> None:
    harness.run(harness.tier._housekeeping._trim())


def check(directory: FsDirectory, harness: TierHarness, capacity_bytes: int) -> None:
    """What holds whenever no job runs."""
    assert directory.disk_bytes() <= capacity_bytes
    assert directory.counted_bytes() == directory.disk_bytes()
    assert not directory.usage().reserved_bytes
    space = harness.tier._space
    assert set(space._policy.resident()) == set(space._policy) == directory.blocks()
    assert not space._busy
    assert not space._policy.skipped()
    assert not directory.temps()


def start(harness: TierHarness, operation) -> list[asyncio.Task]:
    """Start an operation on the loop; return its task once it is there."""
    tasks = []
    harness.on_loop(lambda: tasks.append(asyncio.get_running_loop().create_task(operation)))
    return tasks


async def end_of(tasks: list[asyncio.Task]):
    return await tasks[0]
