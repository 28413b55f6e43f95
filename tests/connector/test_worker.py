"""The worker: when copies begin, and what it reports of their ends."""

import contextlib

import numpy as np
import pytest
from connector.workers import Broken, Computing, ended, job, meta
from transport.worlds import DEADLINE_S, LOAD, MOMENT_S, STORE

from kvoffload_async.abc.transport import TransferOutcome
from kvoffload_async.errors import StateError
from kvoffload_async.facade.connector.protocol import ConnectorOutput
from kvoffload_async.facade.connector.worker import OffloadingConnectorWorker, summed

# -- single jobs --------------------------------------------------------------------------------


class OddError(BaseException):
    """An error that nobody expects."""

    def __str__(self):
        raise RuntimeError("no text")


def test_a_store_and_a_load_are_reported_once_each(world):
    world.worker.submit_store(1, job((1, 2), (5, 6)))
    assert world.worker.wait({1}, DEADLINE_S)
    world.expect(STORE, (1, 2), (5, 6))
    world.worker.submit_load(2, job((3,), (6,)))
    assert world.worker.wait({1, 2}, DEADLINE_S)
    world.expect(LOAD, (3,), (6,))
    results = world.worker.get_finished()
    assert [(r.job_id, r.success, r.transfer_size) for r in results] == [
        (1, True, 32),
        (2, True, 16),
    ]
    assert all(r.transfer_time >= 0 for r in results)
    assert world.worker.get_finished() == []
    assert world.device.agrees()


def test_submitting_never_waits_for_the_compute_stream(world):
    world.is_computing = True
    world.worker.submit_store(1, job((1,), (1,)))
    world.worker.submit_load(2, job((2,), (2,)))
    assert world.worker.get_finished() == []
    assert not world.worker.wait({1, 2}, MOMENT_S)
    world.finish()
    assert world.worker.wait({1, 2}, DEADLINE_S)


def test_an_expedited_load_is_there_when_the_call_returns(world):
    world.device.rows[4] = np.arange(world.device.rows.shape[1], dtype=np.uint8)
    world.device.snapshot()
    world.worker.submit_load(1, job((7,), (4,)), expedited=True)
    world.expect(LOAD, (7,), (4,))
    assert world.device.agrees()
    assert ended(world.worker.get_finished()) == {1: True}


def test_waiting_ignores_what_it_does_not_know(world):
    assert world.worker.wait({7, 8}, 0)
    world.worker.submit_store(1, job((1,), (1,)))
    assert world.worker.wait([7, 1], DEADLINE_S)
    assert world.worker.wait([1], 0)
    assert ended(world.worker.get_finished()) == {1: True}
    assert world.worker.wait([1], 0)


def test_two_jobs_at_once_have_two_ids(world):
    world.is_computing = True
    world.worker.submit_store(1, job((1,), (1,)))
    with pytest.raises(StateError, match="job 1 runs already"):
        world.worker.submit_load(1, job((2,), (2,)))


# -- the end of a step --------------------------------------------------------------------------


def wait_calls(world, monkeypatch, before=lambda: None):
    """Return what the worker waits for from now on; `before` is called first, each time."""
    calls = []
    wait = world.worker.wait

    def waiting(job_ids, timeout):
        calls.append((set(job_ids), timeout))
        before()
        return wait(job_ids, timeout)

    monkeypatch.setattr(world.worker, "wait", waiting)
    return calls


@pytest.mark.parametrize("way", ["build_output", "get_finished"])
def test_a_step_reports_its_own_loads_if_the_kv_cache_is_in_host_memory(
    world, each_device, monkeypatch, way
):
    monkeypatch.setattr("kvoffload_async.facade.connector.worker._AWAIT_LOADS_S", DEADLINE_S)
    world.is_computing = True  # the load has not ended when the step's end is reached
    world.worker.start_kv_transfers(meta({1: job((7,), (4,))}))
    calls = wait_calls(world, monkeypatch, before=world.finish)
    if way == "build_output":
        output, loaded = world.worker.build_output()
        reported = set(output.completed)
        assert loaded == ({"r"} if reported else set())
    else:
        reported = {result.job_id for result in world.worker.get_finished()}
    if each_device == "host":
        assert (reported, calls) == ({1}, [({1}, DEADLINE_S)])
    else:
        assert (reported, calls) == (set(), []), "a device is never waited for"


def test_a_load_that_hangs_is_awaited_once_and_briefly(world, each_device, monkeypatch):
    world.is_computing = True
    world.worker.start_kv_transfers(meta({1: job((7,), (4,))}))
    world.worker.prepare_store_kv(meta(stores={2: job((1,), (1,))}))
    calls = wait_calls(world, monkeypatch)
    for _ in range(3):
        assert world.worker.get_finished() == []
    assert calls == ([({1}, 0.1)] if each_device == "host" else [])


# -- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_a_copy_that_fails_is_a_result_and_the_next_one_works(world, direction, caplog):
    def fail(_copies):
        raise OSError("injected")

    submit = world.worker.submit_store if direction is STORE else world.worker.submit_load
    world.transport.before_copy[direction] = fail
    submit(1, job((1,), (1,)))
    assert world.worker.wait({1}, DEADLINE_S)
    (line,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert line.startswith(f"{direction.name.lower()} of 1 blocks for request ")
    assert "(transfer job 1) failed: " in line
    world.transport.before_copy[direction] = None
    submit(2, job((2,), (2,)))
    assert world.worker.wait({2}, DEADLINE_S)
    assert ended(world.worker.get_finished()) == {1: False, 2: True}
    world.expect(direction, (2,), (2,))
    assert world.device.agrees()


def test_a_job_that_makes_no_sense_fails_like_any_other(world):
    world.worker.submit_store(1, job((99,), (1,)))
    world.worker.submit_load(2, job((1, 2), (1,)))
    assert world.worker.wait({1, 2}, DEADLINE_S)
    assert ended(world.worker.get_finished()) == {1: False, 2: False}


def test_even_a_transport_that_raises_gives_results():
    worker = OffloadingConnectorWorker(Broken())
    worker.submit_store(1, job((1,), (1,)))
    worker.submit_load(2, job((1,), (1,)))
    assert worker.wait({1, 2}, DEADLINE_S)
    assert ended(worker.get_finished()) == {1: False, 2: False}
    assert worker.shutdown(DEADLINE_S)


@pytest.mark.parametrize("is_coroutine", [True, False])
@pytest.mark.parametrize(
    "end", [None, 7, TransferOutcome(0, error="bad"), SystemExit(1), OddError()]
)
def test_a_copy_that_ends_with_no_outcome_has_failed(end, is_coroutine):
    def now(_transfer):
        if isinstance(end, BaseException):
            raise end
        return end

    async def later(transfer):
        return now(transfer)

    class Odd(Broken.Lost):
        outcome = later if is_coroutine else now

    transport = Broken()
    transport.submit = lambda *_: Odd()
    worker = OffloadingConnectorWorker(transport)
    worker.submit_store(1, job((1,), (1,)))
    assert worker.wait({1}, DEADLINE_S)
    assert ended(worker.get_finished()) == {1: False}
    assert worker.shutdown(DEADLINE_S)


@pytest.mark.parametrize("error", [OddError(), SystemExit(1), KeyboardInterrupt()])
def test_a_submission_that_raises_anything_is_a_failed_copy_and_an_interrupt_is_the_users(error):
    def submit(_copies, _after):
        raise error

    transport = Broken()
    transport.submit = submit
    worker = OffloadingConnectorWorker(transport)
    is_interrupt = isinstance(error, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt) if is_interrupt else contextlib.nullcontext():
        worker.submit_store(1, job((1,), (1,)))
    assert ended(worker.get_finished()) == {1: False}
    assert worker.shutdown(DEADLINE_S)


def test_a_failed_load_ends_its_requests_waiting_too(world):
    world.worker.submit_load(1, job((99,), (1,), "bad"))
    world.worker.submit_load(2, job((1,), (1,), "good"))
    world.worker.submit_store(3, job((3,), (2,), "store"))
    assert world.worker.wait({1, 2, 3}, DEADLINE_S)
    output, loaded = world.worker.build_output()
    assert output == ConnectorOutput({1: 1, 2: 1, 3: 1}, frozenset({1}))
    assert loaded == {"bad", "good"}
    assert world.worker.build_output() == (ConnectorOutput({}, frozenset()), set())


# -- a step -------------------------------------------------------------------------------------


def test_stores_begin_with_the_next_step(world):
    first = meta(stores={1: job((1,), (1,))})
    assert world.worker.handle_preemptions(first)
    world.worker.start_kv_transfers(first)
    world.device.fill(5)  # the forward pass of this step
    world.device.snapshot()
    world.worker.prepare_store_kv(first)
    assert not world.events, "nothing competes with sampling"
    world.worker.start_kv_transfers(meta(loads={2: job((2,), (2,))}))
    assert len(world.events) == 2
    assert world.worker.wait({1, 2}, DEADLINE_S)
    world.expect(STORE, (1,), (1,))
    world.expect(LOAD, (2,), (2,))
    assert world.device.agrees()


def test_a_store_is_ordered_after_what_its_step_computes(world):
    step = meta(stores={1: job((1,), (1,))})
    world.worker.prepare_store_kv(step)
    world.is_computing = True  # the forward pass of that step is still queued
    world.worker.start_kv_transfers(meta())
    assert not world.worker.wait({1}, MOMENT_S)
    world.device.fill(6)
    world.device.snapshot()
    world.finish()
    assert world.worker.wait({1}, DEADLINE_S)
    world.expect(STORE, (1,), (1,))
    assert world.device.agrees()


def test_a_load_is_ordered_after_the_zeroing_of_its_blocks(world):
    world.device.rows[2] = 7
    world.device.snapshot()
    world.is_computing = True
    world.worker.start_kv_transfers(meta(loads={1: job((2,), (2,))}))
    assert not world.worker.wait({1}, MOMENT_S)
    for cache in world.device.caches.values():
        cache[2] = 0
    world.finish()
    assert world.worker.wait({1}, DEADLINE_S)
    world.expect(LOAD, (2,), (2,))
    assert world.device.agrees()


def test_flushed_stores_begin_and_end_before_the_step(world):
    step = meta(stores={1: job((1,), (1,)), 2: job((2,), (2,))}, flush={1, 77})
    assert world.worker.handle_preemptions(step)
    world.expect(STORE, (1,), (1,))
    assert world.device.agrees()
    world.worker.prepare_store_kv(step)
    assert len(world.events) == 1, "the flushed one has begun, once; the other waits"
    assert ended(world.worker.get_finished()) == {1: True}


def test_a_flush_starts_what_was_deferred_before(world):
    world.worker.prepare_store_kv(meta(stores={1: job((1,), (1,))}))
    assert world.worker.handle_preemptions(meta(flush={1}))
    assert ended(world.worker.get_finished()) == {1: True}


def test_waiting_for_a_deferred_store_starts_it(world):
    world.worker.prepare_store_kv(meta(stores={1: job((1,), (1,))}))
    assert world.worker.wait({1}, DEADLINE_S)
    assert ended(world.worker.get_finished()) == {1: True}


def test_without_anything_to_flush_the_step_waits_for_nothing(world):
    world.is_computing = True
    world.worker.submit_store(1, job((1,), (1,)))
    assert world.worker.handle_preemptions(meta())
    assert world.worker.get_finished() == []


@pytest.mark.usefixtures("each_device")
def test_a_store_that_outlasts_its_flush_has_failed_for_its_blocks_may_be_overwritten():
    world = Computing(flush_timeout_s=MOMENT_S)
    world.is_computing = True
    world.worker.submit_store(1, job((1,), (1,)))
    world.worker.submit_store(2, job((2,), (2,)))
    assert world.worker.handle_preemptions(meta(flush={1})), "the step may run"
    world.finish()
    assert world.worker.wait({1, 2}, DEADLINE_S)
    assert ended(world.worker.get_finished()) == {1: False, 2: True}
    world.worker.submit_store(3, job((1,), (1,)))
    assert world.worker.shutdown(DEADLINE_S)
    assert ended(world.worker.get_finished()) == {3: True}


@pytest.mark.usefixtures("each_device")
def test_a_load_that_outlasts_its_flush_holds_the_step_back_and_keeps_its_own_result():
    world = Computing(flush_timeout_s=MOMENT_S)
    world.is_computing = True
    world.worker.submit_load(1, job((1,), (1,)))
    world.worker.submit_store(2, job((2,), (2,)))
    assert not world.worker.handle_preemptions(meta(flush={1, 2}))
    world.finish()
    assert world.worker.wait({1, 2}, DEADLINE_S), "from here on the blocks are free to use"
    assert ended(world.worker.get_finished()) == {1: True, 2: False}
    assert world.worker.shutdown(DEADLINE_S)


# -- several workers ----------------------------------------------------------------------------


def test_the_reports_of_several_workers_add_up():
    first = ConnectorOutput({1: 1, 2: 1}, frozenset())
    second = ConnectorOutput({2: 1, 3: 1}, frozenset({2}))
    assert summed([first, second]) == ConnectorOutput({1: 1, 2: 2, 3: 1}, frozenset({2}))
    assert summed([]) == ConnectorOutput({}, frozenset())
