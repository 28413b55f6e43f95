"""The batched lookups of `KVOffloadConnector` find what vLLM's own, block by block, would find."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.kv_offload import base

from kvoffload_async.facade.manager import OffloadingManager
from kvoffload_async.integrations.vllm import convert
from kvoffload_async.integrations.vllm.connector import BatchedLookups
from kvoffload_async.types import LookupResult

ANSWERS = st.lists(st.sampled_from([*[LookupResult.HIT] * 5, *LookupResult]), max_size=12)
NOT_USED = (None, None, 0)


class Answering:
    """A manager that answers as told; keys are indices of answers.

    Attributes:
        batches: The keys of each call.
    """

    def __init__(self, answers):
        self.answers = answers
        self.batches = []

    def lookup(self, key, req_context):
        return convert.lookup_result(self.answers[key])

    def lookup_many(self, keys, req_context, *, stop_at_miss=False):
        self.batches.append(list(keys))
        answers = [self.answers[key] for key in keys]
        if stop_at_miss and LookupResult.MISS in answers:
            answers = answers[: answers.index(LookupResult.MISS) + 1]
        return answers

    lookup_prefix = OffloadingManager.lookup_prefix


def vllms(method, answers, *arguments):
    scheduler = SimpleNamespace(
        manager=Answering(answers), _events_tracker=SimpleNamespace(record_lookup=lambda *_: None)
    )
    return getattr(OffloadingConnectorScheduler, method)(scheduler, *arguments)


@given(ANSWERS)
def test_a_prefix_is_found_as_vllm_finds_it_in_two_calls(answers):
    keys, context = list(range(len(answers))), base.ReqContext(req_id="r")
    manager = Answering(answers)
    found = BatchedLookups(manager).maximal_prefix(iter(keys), context, *NOT_USED)
    assert found == vllms("_maximal_prefix_lookup", answers, keys, context, *NOT_USED)
    assert len(manager.batches) <= 2, "the first block alone, then all others"


@given(ANSWERS, st.integers(1, 4), st.sampled_from([None, 0, 1, 2]))
def test_a_window_is_found_as_vllm_finds_it(answers, size, further):
    keys, context = list(range(len(answers))), base.ReqContext(req_id="r")
    initial = None if further is None else size + further
    manager = Answering(answers)
    found = BatchedLookups(manager).sliding_window(keys, size, context, initial)
    assert found == vllms("_sliding_window_lookup", answers, keys, size, context, initial)
    asked = [key for batch in manager.batches for key in batch]
    assert len(asked) == len(set(asked)), "each block once"


def test_a_window_that_is_there_takes_one_call():
    manager = Answering([LookupResult.HIT] * 9)
    window = BatchedLookups(manager).sliding_window(range(9), 3, base.ReqContext(req_id="r"))
    assert (window, manager.batches) == (9, [[8, 7, 6]])


@pytest.mark.parametrize("describes", [False, True])
def test_vllm_looks_blocks_up_itself_if_its_events_describe_them(describes):
    scheduler = SimpleNamespace(_events_tracker=SimpleNamespace(self_describing_enabled=describes))
    lookups = BatchedLookups(Answering([]))
    lookups.replace_in(scheduler)
    assert hasattr(scheduler, "_maximal_prefix_lookup") is not describes
    assert hasattr(scheduler, "_sliding_window_lookup") is not describes
