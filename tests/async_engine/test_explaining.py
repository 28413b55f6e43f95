"""`explain` of the engine: what only the engine knows, copies to and from the device."""

import asyncio

import pytest
import torch

from kvoffload_async import OffloadEngine
from kvoffload_async.abc.transport import Transport
from kvoffload_async.async_engine.transfers import EngineBounds
from kvoffload_async.errors import ClosedError, TransportError
from kvoffload_async.timeline import JobEnded, JobStarted, Note

CONFIG = {"cpu_bytes_to_use": 8192, "model": "m", "explain_requests": 4}
HASHES = [bytes([number]) * 32 for number in range(2)]


class Broken(Transport):
    """Takes no copy."""

    def submit(self, copies, after):
        raise OSError("no stream")

    def record_compute(self):
        return None

    def close(self, timeout_s):
        return True


async def store(engine, req_id, block):
    async with engine.request(req_id, [HASHES[block]]) as request:
        await engine.store(request, [block])


def test_copies_wait_for_each_other_and_are_recorded_with_their_bytes():
    async def serve():
        caches = {"layer": torch.zeros(4, 64, dtype=torch.uint8)}
        bounds = EngineBounds(concurrent_stores=1)
        async with OffloadEngine(CONFIG, kv_caches=caches, bounds=bounds) as engine:
            async with asyncio.TaskGroup() as group:
                for number in range(2):
                    group.create_task(store(engine, str(number), number))
            return engine.explain("0"), engine.explain("1")

    first, second = asyncio.run(serve())
    waits = [event for event in second.events if isinstance(event, Note) and event.kind == "waits"]
    assert [wait.reason for wait in waits] == ["other stores to end"]
    for timeline in (first, second):
        (end,) = [event for event in timeline.events if isinstance(event, JobEnded)]
        assert (end.job.tier, end.job.direction, end.num_bytes) == ("device", "store", 64)
        assert end.error is None
        assert timeline.ended_s is not None


def test_a_copy_that_cannot_begin_is_recorded_with_its_error():
    async def serve():
        config = {**CONFIG, "block_bytes": 64}
        async with OffloadEngine(config, lambda _view: Broken()) as engine:
            with pytest.raises(TransportError):
                await store(engine, "r", 0)
            return engine.timelines()

    (timeline,) = asyncio.run(serve())
    begin, end = [e for e in timeline.events if isinstance(e, JobStarted | JobEnded)]
    assert end.job == begin
    assert (end.error, end.landed_blocks) == ("OSError: no stream", 0)


def test_an_engine_that_was_not_opened_explains_nothing():
    engine = OffloadEngine({**CONFIG, "block_bytes": 64}, lambda _view: Broken())
    with pytest.raises(ClosedError):
        engine.explain("r")
