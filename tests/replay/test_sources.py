"""Where requests come from: the built-in workload, and traces."""

import os

import pytest

from kvoffload_async.errors import InputError
from kvoffload_async.replay.source import (
    NUM_REQUESTS,
    SYSTEM_PROMPT_BLOCKS,
    ChatWorkload,
    TraceFile,
)


class TestWorkload:
    def test_is_the_same_for_the_same_seed(self):
        assert list(ChatWorkload()) == list(ChatWorkload())
        assert list(ChatWorkload(seed=1)) != list(ChatWorkload(seed=2))

    def test_equal_ids_mean_equal_prefixes(self):
        prefix_of = {}
        for blocks in ChatWorkload():
            for i, block in enumerate(blocks):
                assert prefix_of.setdefault(block, blocks[:i]) == blocks[:i]

    def test_conversations_share_system_prompts_and_return(self):
        requests = list(ChatWorkload())
        assert len(requests) == NUM_REQUESTS
        assert {r[0] for r in requests} == {0, 12, 20}
        assert min(map(len, requests)) > min(SYSTEM_PROMPT_BLOCKS)
        heads = [r[max(SYSTEM_PROMPT_BLOCKS)] for r in requests if len(r) > 20]
        assert len(set(heads)) < len(heads) / 2

    def test_tells_how_far_it_is(self):
        source = ChatWorkload()
        assert source.fraction_done == 0.0
        for _ in source:
            pass
        assert source.fraction_done == 1.0

    def test_tells_how_far_it_is_to_the_limit(self):
        source = ChatWorkload(limit=4)
        requests = iter(source)
        next(requests)
        assert source.fraction_done == 0.25


def test_a_trace_tells_how_far_it_is(command):
    source = TraceFile(command.trace([[1], [2]]))
    fractions = [source.fraction_done for _ in source]
    source.close()
    assert fractions == [0.5, 1.0]


def test_an_empty_trace_is_no_division_by_zero(command):
    source = TraceFile(command.trace([]))
    with pytest.raises(InputError, match="no request"):
        list(source)
    assert source.fraction_done == 0.0
    source.close()


def test_a_read_error_is_bad_input(command):
    source = TraceFile(command.trace([[1]]))
    os.close(source._file.fileno())
    with pytest.raises(InputError, match="cannot be read: Bad file descriptor"):
        list(source)
    with pytest.raises(OSError, match="Bad file descriptor"):
        source.close()
