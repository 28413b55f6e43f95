"""Between vLLM's vocabulary and this package's nothing is lost."""

import numpy as np
import pytest
import torch
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm_world import key_of, keys_of

from kvoffload_async.errors import StateError, TierUnavailableError
from kvoffload_async.integrations.vllm import convert
from kvoffload_async.types import (
    JobResult,
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadPolicy,
    RequestOffloadingContext,
)


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([(0, 0, 4, 1, 4, 4), (4, 16, 4, 1, 4, 4)], [(0, 0, 4, 2, 4, 16)]),
        (
            [(0, 8, 4, 1, 4, 4), (4, 24, 4, 1, 4, 4), (8, 40, 4, 1, 4, 4)],
            [(0, 8, 4, 3, 4, 16)],
        ),
        (
            [(0, 0, 4, 1, 4, 4), (4, 16, 4, 1, 4, 4), (8, 33, 4, 1, 4, 4)],
            [(0, 0, 4, 2, 4, 16), (8, 33, 4, 1, 4, 4)],
        ),
        (
            [(0, 0, 4, 1, 4, 4), (4, 16, 8, 1, 8, 8)],
            [(0, 0, 4, 1, 4, 4), (4, 16, 8, 1, 8, 8)],
        ),
        (
            [(4, 16, 4, 1, 4, 4), (0, 0, 4, 1, 4, 4)],
            [(4, 16, 4, 1, 4, 4), (0, 0, 4, 1, 4, 4)],
        ),
        (
            [(0, 0, 4, 2, 8, 16), (4, 8, 4, 2, 8, 16)],
            [(0, 0, 4, 2, 8, 16), (4, 8, 4, 2, 8, 16)],
        ),
        (
            [(0, 0, 4, 2, 4, 16), (8, 32, 4, 1, 4, 4)],
            [(0, 0, 4, 3, 4, 16)],
        ),
    ],
)
def test_single_fragments_of_a_page_at_equal_distances_become_one_run(runs, expected):
    copy_runs = tuple(base.CopyRun(*run) for run in runs)
    mapping = base.CanonicalPageMapping(64, 16, copy_runs, 2, 1, True)
    page = base.CanonicalKVCacheTensor(torch.zeros(3, 16, dtype=torch.int8), 16)
    refs = [[base.CanonicalKVCacheRef(0, 16, mapping)]]
    layout = convert.kv_layout(base.CanonicalKVCaches([page], refs), 2, is_canonical=True)
    ((table,),) = layout.groups
    assert [tuple(run) for run in table.runs] == expected
    assert (layout.chunk_bytes, table.slot_page_bytes) == (128, 64)
    assert (table.num_writers, table.writer) == (2, 1)


def test_a_job_keeps_its_keys_slots_and_request_in_order():
    request = base.ReqContext(req_id="r", kv_transfer_params={"a": 1})
    keys = keys_of(3, 1, 2)
    slots = np.array([7, 0, 5], dtype=np.int64)
    job = convert.job_of(TransferJob(9, keys, slots, True, request, submit_time=1.5))
    assert (job.job_id, job.keys, job.block_ids.tolist()) == (9, tuple(keys), [7, 0, 5])
    assert (job.is_promotion, job.submit_time) == (True, 1.5)
    assert (job.req_context.req_id, job.req_context.kv_transfer_params) == ("r", {"a": 1})


def test_a_jobs_slots_are_its_own():
    slots = np.array([1, 2], dtype=np.int32)
    request = base.ReqContext(req_id="r")
    job = convert.job_of(TransferJob(0, keys_of(1, 2), slots, False, request))
    slots[:] = 0
    assert job.block_ids.tolist() == [1, 2]
    assert not job.block_ids.flags.writeable


def test_a_request_has_one_context_for_its_whole_life():
    request, other = base.ReqContext(req_id="a"), base.ReqContext(req_id="b")
    assert convert.request_of(request) is convert.request_of(request)
    assert convert.request_of(request) is not convert.request_of(other)


def test_a_request_knows_the_positions_that_vllm_notes_after_it_was_begun():
    context = base.ReqContext(req_id="r")
    request = convert.request_of(context)
    for number, key in enumerate(keys_of(1, 2), 1):
        context.set_offload_key_position(key, 16 * number)
    assert request.key_positions == dict(zip(keys_of(1, 2), (16, 32), strict=True))


def test_requests_of_a_vllm_that_keeps_positions_in_another_way_have_their_own():
    context = base.ReqContext(req_id="r")
    del context._offload_key_positions
    assert convert.request_of(context).key_positions == {}


@pytest.mark.parametrize("result", list(LookupResult))
def test_a_lookups_answer_keeps_its_name(result):
    assert convert.lookup_result(result) is base.LookupResult[result.name]


@pytest.mark.parametrize(
    ("ours", "vllms"),
    [
        (OffloadPolicy.BLOCK_LEVEL, base.OffloadPolicy.CHUNK_LEVEL),
        (OffloadPolicy.REQUEST_LEVEL, base.OffloadPolicy.REQUEST_LEVEL),
    ],
)
def test_a_policy_keeps_its_meaning(ours, vllms):
    assert convert.offloading_context(RequestOffloadingContext(ours)).policy is vllms


def test_a_partial_result_names_what_landed_in_the_jobs_order():
    keys = keys_of(5, 4, 3, 2, 1)
    landed = frozenset(keys) - {keys[1]}
    result = convert.job_result(
        JobResult(4, False, landed, 0.5, 32768, TierUnavailableError("x")), keys
    )
    assert (result.job_id, result.success) == (4, False)
    assert result.successful_keys == (keys[0], keys[2], keys[3], keys[4])
    assert (result.transfer_time, result.transfer_bytes) == (0.5, 32768)


@pytest.mark.parametrize("landed", [None, frozenset()])
def test_nothing_landed_is_none(landed):
    assert convert.job_result(JobResult(4, False, landed), keys_of(1)).successful_keys is None


@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize("medium", list(Medium))
def test_an_event_has_the_tiers_configured_locality(removed, medium):
    keys = (key_of(1), key_of(2))
    ours = OffloadingEvent(keys, medium, removed, locality=Locality.LOCAL)
    event = convert.event(ours, base.Locality.REMOTE)
    assert (event.keys, event.removed) == (list(keys), removed)
    assert event.medium is base.Medium[medium.name]
    assert event.locality is base.Locality.REMOTE
    assert convert.event(ours, None).locality is None


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.float32])
def test_the_primarys_view_becomes_rows_of_bytes_and_is_given_back(dtype):
    array = np.arange(6 * 64, dtype=np.uint8).reshape(6, 64).view(dtype)
    view = memoryview(array)
    rows = convert.rows_of(view)
    assert (rows.shape, rows.format, rows.nbytes) == ((6, 64), "B", 6 * 64)
    rows[2, 5] = 200
    assert array.view(np.uint8)[2, 5] == 200
    rows.release()
    view.release()


@pytest.mark.parametrize(
    "array",
    [np.zeros(8, np.int8), np.zeros((2, 2, 2), np.int8), np.zeros((4, 8), np.int8)[:, ::2]],
)
def test_a_view_of_another_shape_is_refused(array):
    with pytest.raises(StateError, match="num_slots, slot_bytes"):
        convert.rows_of(memoryview(array))
