"""Transfers that complete later: who waits for them, and what becomes of an error."""

import asyncio
from contextlib import closing

import pytest
from transport.worlds import DEADLINE_S, STORE, Wanted, gate, simple

from kvoffload_async.abc.transport import TransferOutcome
from kvoffload_async.errors import TransportError
from kvoffload_async.runtime.loop import LoopThread
from kvoffload_async.transport.completion import CompletableTransfer, failed


def test_a_cancelled_wait_ends_nothing(device, transport):
    stores = gate(transport, STORE)
    transfer = transport.submit(simple(STORE, (1,), (1,)), transport.record_compute())

    async def impatient():
        waiting = asyncio.create_task(transfer.outcome())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        patient = asyncio.create_task(transfer.outcome())
        await asyncio.sleep(0)
        stores.opened.set()
        return await asyncio.wait_for(patient, DEADLINE_S)

    assert asyncio.run(impatient()).error is None
    device.apply(STORE, [Wanted((1,), 0, (1,))])
    assert device.agrees()


def test_who_waits_on_a_loop_that_is_gone_harms_nobody():
    transfer = CompletableTransfer()

    async def begin():
        asyncio.get_running_loop().create_task(transfer.outcome())
        await asyncio.sleep(0)

    gone = asyncio.new_event_loop()
    gone.run_until_complete(begin())
    (waiting,) = asyncio.all_tasks(gone)
    with closing(LoopThread()) as loop:
        other = asyncio.run_coroutine_threadsafe(transfer.outcome(), loop._loop)
        loop.run(asyncio.sleep(0), DEADLINE_S)
        gone.close()
        transfer.end(TransferOutcome(7))
        assert other.result(DEADLINE_S).num_bytes == 7
    assert transfer.synchronize(0)
    waiting._log_destroy_pending = False
    waiting.get_coro().close()


def test_an_error_of_the_transport_stays_what_it_is():
    error = TransportError("x")
    assert failed(error).error is error
    other = failed(KeyError("x")).error
    assert str(other) == "KeyError: 'x'"
