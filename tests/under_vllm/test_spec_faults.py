"""Copies of `KVOffloadSpec`'s workers that fail or hang, resets, and the end."""

import threading
from dataclasses import replace

import pytest
from engine_world import EXAMPLE, canonical, failing, hooks
from vllm.v1.kv_offload import base
from vllm_world import DEADLINE_S, keys_of

from kvoffload_async.abc.tier import Direction
from kvoffload_async.errors import ConfigError, TransportError
from kvoffload_async.integrations.vllm import KVOffloadSpec


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_fails_in_one_rank_is_forgotten(pair, rank):
    here = pair(EXAMPLE, ranks=2)
    here.fill(1)
    failing(here, Direction.STORE, rank)
    here.store(keys_of(0, 1), [[3, 5]])
    here.finish_jobs()
    assert here.final(keys_of(0, 1)) == ["MISS", "MISS"]
    names = here.manager.get_stats().reduce()
    assert names["vllm:kvoffload_async_failed_stores"] == 2
    hooks(here)[rank][Direction.STORE] = None
    before = here.copies()
    here.store(keys_of(0, 1), [[3, 5]])
    here.load(keys_of(0, 1), [[6, 7]])
    assert here.tensors[rank][0][6].equal(before[rank][0][3])


def test_a_failed_store_does_not_mark_its_slots_for_good(pair):
    here = pair(slots=1)
    here.fill(1)
    failing(here, Direction.STORE)
    here.store(keys_of(0), [[3]])
    hooks(here)[0][Direction.STORE] = None
    for number in (1, 2):
        here.store(keys_of(number), [[4]])
        assert here.final(keys_of(number)) == ["HIT"]
        here.step()  # what was found in a step is not evicted in it


def test_a_load_that_fails_ends_the_engine_of_vllms_connector_with_the_remedy(pair):
    here = pair()
    here.fill(1)
    here.store(keys_of(0), [[3]])
    failing(here, Direction.LOAD)
    with pytest.raises(TransportError, match="KVOffloadConnector"):
        here.load(keys_of(0), [[4]])


def test_a_step_reports_its_own_load_although_threads_copy_it(pair, monkeypatch):
    monkeypatch.setattr("kvoffload_async.facade.connector.worker._AWAIT_LOADS_S", DEADLINE_S)
    here = pair()
    here.fill(1)
    here.store(keys_of(0), [[3]])
    request = here.request()
    assert here.lookups(keys_of(0), request) == ["HIT"]
    slots = here.manager.prepare_load(keys_of(0), request)
    (worker,) = here.workers
    is_awaited = threading.Event()
    hooks(here)[0][Direction.LOAD] = lambda _copies: is_awaited.wait(DEADLINE_S)
    wait = worker._copies.wait

    def waiting(job_ids, timeout):
        if 7 in job_ids:
            is_awaited.set()
        return wait(job_ids, timeout)

    monkeypatch.setattr(worker._copies, "wait", waiting)
    assert worker.submit_load(7, slots, here.device([[4]]))
    worker.wait(())  # before the step's computation: there is nothing to flush
    assert not is_awaited.is_set()
    assert [result.job_id for result in worker.get_finished()] == [7]


def test_a_load_that_fails_is_told_to_who_asks(pair):
    here = pair()
    here.fill(1)
    here.store(keys_of(0), [[3]])
    failing(here, Direction.LOAD)
    here.workers[0].reports_failed_loads = True
    here.load(keys_of(0), [[4]])
    assert here.workers[0].take_failed_loads() == {2}
    assert here.workers[0].take_failed_loads() == set()


def test_an_expedited_load_that_fails_is_an_error_before_the_forward_pass(pair):
    here = pair()
    here.fill(1)
    here.store(keys_of(0), [[3]])
    failing(here, Direction.LOAD)
    worker = here.workers[0]
    worker.reports_failed_loads = True
    spec = here.manager.prepare_load(keys_of(0), here_request(here))
    assert worker.submit_load(9, spec, here.device([[4]]), expedited=True)
    with pytest.raises(TransportError, match="load job 9 has failed"):
        worker.wait({9})


def here_request(here):
    request = here.request()
    assert here.lookups(keys_of(0), request) == ["HIT"]
    return request


def test_waiting_for_a_copy_that_hangs_ends_with_an_error(pair):
    here = pair(extra={"drain_timeout_s": 0.05})
    gate = threading.Event()
    hooks(here)[0][Direction.STORE] = lambda _copies: gate.wait(20)
    output = here.manager.prepare_store(keys_of(0), here.request())
    worker = here.workers[0]
    worker.submit_store(1, here.device([[3]]), output.store_spec)
    with pytest.raises(TransportError, match=r"jobs \[1\] have not ended within 0.05 s"):
        worker.wait({1})
    worker.wait({77})  # unknown: nothing to wait for
    gate.set()


def test_after_a_reset_promotions_wait_until_no_old_copy_can_touch_the_primary(pair):
    here = pair(EXAMPLE)
    here.fill(1)
    here.store(keys_of(0), [[3]])
    here.finish_jobs()
    request = here.request()
    here.manager.prepare_store(keys_of(1), request)  # under way when the reset comes
    here.manager.reset_cache()
    assert here.final(keys_of(0)) == ["MISS"]
    here.store(keys_of(2), [[5]])  # its workers have ended everything older
    if hasattr(base.OffloadingManager, "on_reset_flushed"):
        here.manager.on_reset_flushed()
    assert here.final(keys_of(0)) == ["HIT"]


def test_shutdown_is_idempotent_and_later_ends_are_ignored(pair):
    here = pair(EXAMPLE)
    request = here.request()
    output = here.manager.prepare_store(keys_of(0), request)
    here.close()
    here.close()
    here.manager.complete_store(output.keys_to_store, request)


def test_a_worker_that_shares_no_memory_with_the_scheduler_refuses_its_first_job(pair):
    here = pair()
    elsewhere = KVOffloadSpec(replace(here.config, engine_id=f"{here.config.engine_id}-elsewhere"))
    worker = elsewhere.get_worker(canonical(here.tensors[0], here.groups))
    output = here.manager.prepare_store(keys_of(0), here.request())
    device = here.device([[3]])
    try:
        with pytest.raises(ConfigError, match="this worker is on another host"):
            worker.submit_store(1, device, output.store_spec)
        with pytest.raises(ConfigError, match="place all ranks of a replica on one host"):
            worker.submit_load(2, output.store_spec, device)
    finally:
        worker._buffer.remove_name()
        worker.shutdown()
