"""Plans of jobs that overlap: a block's room, and the last directory, go to one of them alone."""

import asyncio

from fs.spaces import Unheard

from kvoffload_async.policies.lru import LruPolicy
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.fs.operations import StoreItem
from kvoffload_async.tiers.fs.space import Space
from kvoffload_async.tiers.fs.usage import Operation

K = [key_of(number) for number in range(4)]


class Granting:
    """A shared count that has room for everything."""

    granted_blocks = 0
    is_complete = True
    total_bytes = 0

    def begin(self, unit_bytes, count, _limit_bytes, _num_replacing):
        self.granted_blocks += count
        return Operation(reserved_bytes=count * unit_bytes)


def space_of(directory, capacity_blocks):
    usage = Granting()
    space = Space(
        LruPolicy(capacity_blocks),
        usage,
        directory.files(),
        Unheard(),
        capacity_bytes=1 << 20,
        block_bytes=10,
    )
    return space, usage


def plan(space, *keys):
    async def run_io(call):
        return call()

    items = [StoreItem(index, key, index) for index, key in enumerate(keys)]
    return asyncio.run(space.plan(items, run_io, lambda: None, squeeze=False))


def test_a_block_that_a_job_is_about_to_write_gets_no_room_from_another(directory):
    space, usage = space_of(directory, capacity_blocks=8)
    first, second = plan(space, K[0], K[1]), plan(space, K[1], K[2])
    assert [(item.key, item.may_write) for item in first.items] == [(K[0], True), (K[1], True)]
    assert [(item.key, item.may_write) for item in second.items] == [(K[1], False), (K[2], True)]
    assert usage.granted_blocks == 3


def test_two_jobs_do_not_take_the_same_last_place(directory):
    space, _ = space_of(directory, capacity_blocks=1)
    first = plan(space, K[0])
    space.pin([K[0]])
    assert [item.key for item in first.items] == [K[0]]
    second = plan(space, K[1])
    assert not second.items
    assert [item.key for item in second.unplaced] == [K[1]]
