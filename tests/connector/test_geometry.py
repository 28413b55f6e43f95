"""Shapes that cannot work are refused by name."""

import pytest

from kvoffload_async.errors import ConfigError
from kvoffload_async.facade.connector.protocol import ConnectorGeometry, KVGroup


def test_there_must_be_a_group():
    with pytest.raises(ConfigError, match="groups"):
        ConnectorGeometry((), 4)


@pytest.mark.parametrize("name", ["tokens_per_hash", "blocks_per_chunk", "num_workers"])
def test_counts_begin_at_one(name):
    with pytest.raises(ConfigError, match=name):
        ConnectorGeometry((KVGroup(4),), **{"tokens_per_hash": 4, name: 0})


def test_a_chunk_must_end_where_a_hash_ends():
    with pytest.raises(ConfigError, match=r"groups\[1\].* 6 tokens .*tokens_per_hash=4"):
        ConnectorGeometry((KVGroup(4), KVGroup(6)), 4)


def test_without_more_said_one_worker_offloads_block_by_block_the_prompt_alone():
    geometry = ConnectorGeometry((KVGroup(4),), 4)
    assert geometry.tokens_per_chunk(0) == 4
    assert (geometry.num_workers, geometry.offload_prompt_only) == (1, True)


def test_a_window_is_counted_in_whole_chunks():
    groups = (KVGroup(4), KVGroup(4, 8), KVGroup(4, 9))
    geometry = ConnectorGeometry(groups, 4, blocks_per_chunk=2)
    assert [geometry.chunks_per_window(i) for i in range(3)] == [None, 1, 2]
