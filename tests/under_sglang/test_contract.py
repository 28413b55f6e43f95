"""The recording is SGLang's; ranks share pages exactly where SGLang's file backend shares them."""

import pytest
from integrations import sglang_protocol
from sglang.srt.mem_cache import hicache_storage
from sglang.srt.mem_cache.hicache_storage import HiCacheFile

from kvoffload_async.integrations.sglang import CONTRACT
from kvoffload_async.integrations.sglang.hicache import _MOST_PAGES
from kvoffload_async.integrations.sglang.pages import Shard


def test_the_recorded_signatures_are_sglangs():
    assert CONTRACT.read() == CONTRACT.recorded()


def test_a_job_has_as_many_pages_as_sglang_passes_per_call():
    assert hicache_storage.STORAGE_BATCH_SIZE == _MOST_PAGES


@pytest.fixture
def suffix_of(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    return lambda config: HiCacheFile(config).config_suffix


def test_ranks_share_pages_exactly_where_the_file_backend_does(suffix_of):
    ours, theirs = {}, {}
    for number, config in enumerate(sglang_protocol.every_rank(hicache_storage)):
        shard = Shard.of(config)
        key = config.is_mla_model, shard.rank, *shard.sizes.items()
        ours.setdefault(key, set()).add(number)
        theirs.setdefault((config.is_mla_model, suffix_of(config)), set()).add(number)
    assert sorted(map(sorted, ours.values())) == sorted(map(sorted, theirs.values()))


def test_the_recorded_writers_are_sglangs():
    for config in sglang_protocol.every_rank(hicache_storage):
        assert sglang_protocol.is_storage_writer(config) == config.is_storage_writer
