"""Where requests come from: the built-in workload, and traces."""

import contextlib
import json
import os

import pytest

from kvoffload_async.errors import InputError
from kvoffload_async.replay.drivers import Arrivals
from kvoffload_async.replay.source import (
    NUM_REQUESTS,
    SYSTEM_PROMPT_BLOCKS,
    Arrival,
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


def test_a_chunk_of_several_blocks_is_named_by_its_last_and_a_prompts_rest_is_left_out(command):
    trace = command.trace([[1, 2, 3, 4, 5], [1, 2, 6], [], [7], [1, 2, 3, 8]])
    with contextlib.closing(TraceFile(trace, 4, 2)) as source:
        assert source.most_blocks() == 2
        assert list(source) == [[2, 4], [2], [], []]
    assert arrivals_of(command, {"timestamp": 1, "hash_ids": [1, 2, 3]}, blocks_per_chunk=2) == [
        Arrival(0.0, [2])
    ]
    chats = ChatWorkload(60, blocks_per_chunk=4)
    assert list(chats) == [blocks[3::4] for blocks in ChatWorkload(60)]
    assert chats.most_blocks() == ChatWorkload().most_blocks() // 4


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


def arrivals_of(command, *requests, **options):
    """Return the arrivals of a trace of (timestamp, other keys)."""
    lines = (json.dumps({"hash_ids": [1], **request}) for request in requests)
    source = TraceFile(command.file("\n".join(lines)), **options)
    try:
        return list(source.arrivals())
    finally:
        source.close()


def test_times_of_arrival_are_relative_to_the_first_request(command):
    requests = [{"timestamp": 1000}, {"timestamp": 1000.5, "output_length": 7}, {"timestamp": 4000}]
    assert arrivals_of(command, *requests) == [
        *(Arrival(0.0, [1]), Arrival(0.0005, [1], 7), Arrival(3.0, [1]))
    ]
    assert len(arrivals_of(command, *requests, limit=2)) == 2


@pytest.mark.parametrize(
    ("second", "complaint"),
    [
        ({}, 'line 2: it has no "timestamp"; .* or omit --arrivals'),
        ({"timestamp": -1}, "line 2: timestamp is -1; it must be a number of milliseconds from 0"),
        ({"timestamp": True}, "line 2: timestamp is true; it must be"),
        ({"timestamp": "6"}, 'line 2: timestamp is "6"; it must be'),
        ({"timestamp": float("nan")}, "line 2: timestamp is NaN; it must be"),
        ({"timestamp": 10**30}, "line 2: timestamp is 1000"),
        (
            {"timestamp": 4.5},
            "line 2: timestamp 4.5 is less than the one before, 5; sort",
        ),
        ({"timestamp": 6, "output_length": -1}, "line 2: output_length is -1; it must be a number"),
    ],
)
def test_a_trace_without_proper_times_of_arrival_is_refused(command, second, complaint):
    with pytest.raises(InputError, match=complaint):
        arrivals_of(command, {"timestamp": 5}, second)


def test_the_built_in_workload_has_no_times_of_arrival():
    with pytest.raises(InputError, match="--arrivals: these requests have no timestamps; give"):
        next(ChatWorkload().arrivals())


def test_requests_arrive_by_the_clock():
    now_s = [100.0]
    requests = [Arrival(0.0, [1]), Arrival(4.0, [2]), Arrival(4.0, [3])]
    arrivals = Arrivals(requests, 2.0, lambda: now_s[0])
    assert arrivals.take() == [1]
    assert arrivals.take() is None
    assert arrivals.next_in_s() == 2.0
    now_s[0] = 102.0
    assert [arrivals.take() for _ in range(3)] == [[2], [3], None]
    assert arrivals.has_ended


def test_requests_without_times_are_all_available_and_taken_one_by_one():
    taken = []
    arrivals = Arrivals.at_once(taken.append(each) or [each] for each in range(3))
    assert arrivals.take() == [0]
    assert taken == [0]
    assert arrivals.next_in_s() == float("inf")
    assert [arrivals.take() for _ in range(3)] == [[1], [2], None]
    assert arrivals.has_ended
