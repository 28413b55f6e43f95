"""After an outage nothing keeps the primary's memory, whoever keeps the errors and the log."""

import asyncio
import errno
import gc
import logging

import pytest
from faulty_files import FaultyFileOps
from fs.directories import FsDirectory
from log_records import errors_with_frames
from slab.stores import SlabStore

from kvoffload_async.abc.tier import AsyncTier, Direction, TierBounds, TierCapabilities
from kvoffload_async.errors import BlockMissingError
from kvoffload_async.testing.harness import ManagerHarness, key_of
from kvoffload_async.types import Locality

K = [key_of(number) for number in range(40)]
BLOCK = 4096
kept: list[BaseException] = []
"""What a client library remembers of its failures."""


class ServerError(Exception):
    """A client library's error, which is kept, and has another one behind it."""

    def __init__(self):
        super().__init__("503")
        kept.append(self)


def request(body):
    """Fail with frames that hold what was to be sent."""
    sent = body[:16]
    try:
        {}[len(sent)]
    except KeyError:
        raise ServerError from OSError(errno.EPIPE, "pipe")


async def request_later(body):
    part = body[:8]
    request(part)


class ClientTier(AsyncTier):
    """A third party's: every operation may fail in its client library."""

    def __init__(self, failing):
        self.capabilities = TierCapabilities(
            exclusive=False, persistent=False, locality=Locality.LOCAL, announces_removals=False
        )
        self.bounds = TierBounds()
        self.failing = failing
        self.rows = None

    async def open(self, env):
        self.env = env
        self.rows = env.kv_view[:]
        if "open" in self.failing:
            await request_later(self.rows.cast("B"))

    async def store(self, job):
        await self._fail("store")
        return {}

    async def load(self, job):
        if "blocks" in self.failing:
            return {index: self._checked(job, index) for index in range(len(job.keys))}
        await self._fail("load")
        return dict.fromkeys(range(len(job.keys)), BlockMissingError("not here"))

    async def contains(self, keys):
        await self._fail("contains")
        return frozenset()

    def touch(self, keys):
        if "touch" in self.failing:
            request(self.rows.cast("B"))

    def gauges(self):
        if "gauges" in self.failing:
            request(self.rows.cast("B"))
        return {}

    async def close(self):
        rows, self.rows, self.env = self.rows, None, None
        if rows is None:
            return
        try:
            if "close" in self.failing:
                await request_later(rows.cast("B"))
        finally:
            rows.release()

    async def _fail(self, name):
        flat = self.rows.cast("B")
        if name in self.failing:
            await request_later(flat)
        if f"{name} by a thread" in self.failing:
            await self.env.io.run(Direction.STORE, lambda: request(flat))
        if f"{name} in a group" in self.failing:
            errors = [_caught(flat), _caught(flat)]
            raise ExceptionGroup("parts", errors)

    def _checked(self, job, index):
        error = BlockMissingError(f"block {index}")
        error.__cause__ = _caught(self.rows[index : index + 1].cast("B"))
        return error


def _caught(body):
    try:
        request(body)
    except ServerError as error:
        return error


@pytest.fixture
def memory(caplog):
    """Keep the log and the client's errors; no frames may be among them, nor in a collector."""
    kept.clear()
    caplog.set_level(logging.DEBUG)
    gc.collect()
    gc.disable()
    yield caplog
    gc.enable()
    kept.clear()


OPERATIONS = [
    *("store", "store by a thread", "store in a group"),
    *("load", "load by a thread", "load in a group", "blocks"),
    *("contains", "contains by a thread", "contains in a group"),
    *("touch", "gauges"),
]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_error_of_a_client_library_keeps_the_memory_mapped(memory, operation):
    with ManagerHarness(ClientTier({operation}), 8, BLOCK) as harness:
        harness.submit_store(K[:2], [0, 1])
        harness.wait()
        harness.submit_load(K[:2], [2, 3])
        harness.wait()
        actor = harness.manager.link.actor
        harness.run(probe(actor))
        harness.run(recheck(actor))
        harness.on_loop(lambda: actor.touch(K[:1]))
        harness.manager.stats()
    assert len(kept) > 0
    assert not errors_with_frames(memory.records)
    assert "still in use" not in memory.text


async def probe(actor):
    actor.probes.start(1, K[:1])
    await asyncio.wait(actor.probes.tasks)


async def recheck(actor):
    actor._reconciler.ask(K[:1])
    await asyncio.wait(actor._reconciler.tasks)


def test_an_error_in_the_middle_of_closing_keeps_no_memory(memory):
    harness = ManagerHarness(ClientTier({"close"}), 8, BLOCK)
    with harness:
        report = harness.shutdown()
    assert isinstance(report.error, ServerError)
    assert "still in use" not in memory.text


def test_an_error_in_the_middle_of_opening_keeps_no_memory(memory):
    # The harness says so: memory that stays mapped is an AssertionError.
    with pytest.raises(ServerError) as raised:
        ManagerHarness(ClientTier({"open"}), 8, BLOCK)
    assert raised.value is kept[0]
    assert "in request_later" in memory.text, "where it came from is in the log"


# -- the tiers on disk --------------------------------------------------------------------------


def put_out(ops, code):
    for name in ("open", "pwrite", "pwritev", "preadv", "publish", "stat", "lock", "fdatasync"):
        ops.fail(code, on=name)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.ESTALE])
@pytest.mark.parametrize("capacity_bytes", [None, 1 << 20])
def test_an_outage_of_a_directory_keeps_no_memory(memory, tmp_path, code, capacity_bytes):
    ops = FaultyFileOps()
    directory = FsDirectory(tmp_path)
    with directory.manage(ops, capacity_bytes=capacity_bytes) as harness:
        use(harness, ops, code)
    assert not errors_with_frames(memory.records)
    assert "still in use" not in memory.text


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.ESTALE])
def test_an_outage_of_a_store_keeps_no_memory(memory, tmp_path, code):
    ops = FaultyFileOps()
    with ManagerHarness(SlabStore(tmp_path).tier(ops), 64, BLOCK) as harness:
        use(harness, ops, code)
    assert not errors_with_frames(memory.records)
    assert "still in use" not in memory.text


def use(harness, ops, code):
    """Store and load before, during and after an outage."""
    harness.submit_store(K[:8], range(8))
    harness.wait()
    put_out(ops, code)
    for number in range(8, 32, 8):
        harness.submit_store(K[number : number + 8], range(number, number + 8))
        harness.submit_load(K[:8], range(32, 40))
        harness.wait()
    assert not all(result.success for result in harness.results)
    ops.heal()
    harness.submit_load(K[:8], range(32, 40))
    harness.wait()
