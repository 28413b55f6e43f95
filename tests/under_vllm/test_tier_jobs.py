"""Jobs given to our tier directly: every one has one result, as vLLM's records say it."""

import numpy as np
import pytest
from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm_world import SLOT_BYTES, keys_of

REQUEST = ReqContext(req_id="r")


@pytest.fixture
def tier(serving, fs):
    return serving(fs).tier


def job(job_id, keys, slots, *, is_promotion=False):
    return TransferJob(job_id, keys, np.array(slots, dtype=np.int64), is_promotion, REQUEST)


def results_of(tier):
    tier.drain_jobs()
    return {result.job_id: result for result in tier.get_finished_jobs()}


def test_a_result_carries_time_and_bytes(tier):
    tier.submit_store(job(1, keys_of(1, 2), [0, 1]))
    result = results_of(tier)[1]
    assert result.success
    assert result.successful_keys is None
    assert result.transfer_time >= 0
    assert result.transfer_bytes == 2 * SLOT_BYTES


@pytest.mark.parametrize("is_promotion", [False, True])
@pytest.mark.parametrize(
    ("keys", "slots"), [([1], [8]), ([1], [-1]), ([1, 2], [0]), ([1, 1], [0, 1])]
)
def test_a_job_that_cannot_be_run_has_a_failed_result(tier, keys, slots, is_promotion):
    submit = tier.submit_load if is_promotion else tier.submit_store
    submit(job(1, keys_of(*keys), slots, is_promotion=is_promotion))
    assert tier.has_pending_work()
    assert not results_of(tier)[1].success
    assert not tier.has_pending_work()


def test_an_empty_job_succeeds(tier):
    tier.submit_store(job(1, [], []))
    tier.submit_load(job(2, [], [], is_promotion=True))
    assert {i: result.success for i, result in results_of(tier).items()} == {1: True, 2: True}


def test_each_result_comes_once_and_in_no_thread_of_the_caller(tier):
    for number in range(8):
        tier.submit_store(job(number, keys_of(number), [number]))
    assert results_of(tier).keys() == set(range(8))
    assert results_of(tier) == {}


def test_jobs_run_without_a_drain_when_the_step_ends(tier):
    tier.submit_store(job(1, keys_of(1), [0]))
    tier.on_schedule_end(ScheduleEndContext((), ()))
    found = []
    while not found:
        assert tier._bridge.wait_for_progress(20)
        found += tier.get_finished_jobs()
    assert [result.success for result in found] == [True]


def test_a_missing_block_fails_its_job_and_names_the_others(tier):
    tier.submit_store(job(1, keys_of(1, 3), [0, 1]))
    results_of(tier)
    tier.submit_load(job(2, keys_of(1, 2, 3), [2, 3, 4], is_promotion=True))
    result = results_of(tier)[2]
    assert not result.success
    assert result.successful_keys == tuple(keys_of(1, 3))
