"""What becomes of a store that is joined too late; needs no library and no master."""

import asyncio
import threading

import pytest

from kvoffload_async.abc.tier import KVIdentity
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.runtime.io_pool import IoPool
from kvoffload_async.tiers._environment import ActorEnvironment
from kvoffload_async.tiers.mooncake.tier import MooncakeTier

WAIT_S = 60.0


class SlowStore:
    """A connection, and the client that it comes to once `may_join` is set."""

    master = "host:1"

    def __init__(self):
        self.is_joining, self.may_join = threading.Event(), threading.Event()
        self.registered = []
        self.is_closed = False

    def open(self):
        self.is_joining.set()
        assert self.may_join.wait(WAIT_S)
        return self

    def register(self, address, num_bytes):
        self.registered.append(num_bytes)

    def close(self):
        self.is_closed = True


def test_a_store_that_is_joined_after_the_opening_was_given_up_is_left():
    store, buffer = SlowStore(), PrimaryBuffer(4, 4096)
    tier = MooncakeTier(store)
    pool = IoPool(1, 1, 1)
    env = ActorEnvironment(buffer.view, pool, lambda _event: None, KVIdentity())

    async def give_up():
        opening = asyncio.get_running_loop().create_task(tier.open(env))
        await asyncio.to_thread(store.is_joining.wait, WAIT_S)
        opening.cancel()
        store.may_join.set()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await tier.close()

    asyncio.run(give_up())
    assert store.registered
    assert store.is_closed
    assert pool.close(WAIT_S) == 0
    env.kv_view.release()
    assert buffer.release()
