"""LMCache's native file tier as a peer: its adapter's calls, made as a scheduler makes them."""

import sys
from types import ModuleType
from typing import NamedTuple

import pytest

from kvoffload_async.bench.baseline import Payload
from kvoffload_async.errors import ConfigError, InputError
from kvoffload_async.types import LookupResult, as_block_ids, make_offload_key
from laboratory.lmcache_fs import LmcacheManager
from laboratory.peers import load_peer

L2 = "lmcache.v1.distributed.l2_adapters"
BLOCK = 4096


class Key(NamedTuple):
    chunk_hash: bytes
    model_name: str
    kv_rank: int


class Stored(int):
    def is_successful(self):
        return self >= 0


class Loaded(tuple):
    __slots__ = ()

    def popcount(self):
        return sum(self)


class Adapter:
    """As LMCache's, with files in a dictionary; a task ends when the next question is asked."""

    def __init__(self, config):
        self.config = config
        self.files, self.stored, self.loaded, self.closed = {}, {}, {}, False
        self.answered = 0

    def submit_store_task(self, keys, objects):
        self.files |= {k: bytes(o.byte_array) for k, o in zip(keys, objects, strict=True)}
        self.answered += 1
        self.stored[self.answered] = Stored(-1 if len(keys) > 2 else 0)
        return self.answered

    def pop_completed_store_tasks(self):
        stored, self.stored = self.stored, {}
        return stored

    def submit_load_task(self, keys, objects):
        found = Loaded(key in self.files for key in keys)
        for key, one in zip(keys, objects, strict=True):
            one.byte_array[:] = self.files.get(key, bytes(BLOCK))
        self.answered += 1
        self.loaded[self.answered] = [None, found]
        return self.answered

    def query_load_result(self, task):
        return self.loaded[task].pop(0)

    def close(self):
        self.closed = True


@pytest.fixture
def lmcache(monkeypatch):
    """What the peer imports of LMCache."""
    contents = {
        "lmcache": {},
        "lmcache.lmcache_fs": {},
        "lmcache._version": {"__version__": "0.5.6"},
        "lmcache.v1.distributed.api": {"ObjectKey": Key},
        f"{L2}.fs_native_l2_adapter": {"FSNativeL2AdapterConfig": dict},
        f"{L2}.factory": {"create_l2_adapter_from_registry": Adapter},
    }
    for name, attributes in contents.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        parts = name.split(".")
        for end in range(1, len(parts)):
            parent = ".".join(parts[:end])
            if parent not in contents:
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def keys():
    return [make_offload_key(bytes([number]) * 32) for number in range(4)]


def test_blocks_are_stored_and_loaded_and_each_job_gets_its_result(lmcache, keys):
    peer = load_peer({"type": "lmcache-fs", "num_workers": 2})
    assert peer.options == {"num_workers": 2, "use_odirect": False, "lmcache": "0.5.6"}
    assert peer.capacity_bytes(1) is None
    with Payload(4, BLOCK) as payload:
        tier = peer.open(payload.view, "/folder", 1)
        adapter = tier._adapter
        assert adapter.config == {"base_path": "/folder", "num_workers": 2, "use_odirect": False}
        payload.fill()
        rows = as_block_ids([0, 1])
        tier.manager.submit_store(tier.make_job(7, keys[:2], rows, is_load=False))
        tier.manager.on_schedule_end(tier.step)
        assert [(r.job_id, r.success) for r in tier.manager.get_finished_jobs()] == [(7, True)]
        payload.wipe()
        tier.manager.submit_load(tier.make_job(8, keys[:2], rows, is_load=True))
        assert tier.manager.get_finished_jobs() == []
        assert [(r.job_id, r.success) for r in tier.manager.get_finished_jobs()] == [(8, True)]
        assert payload.wrong_rows(2) == 0
        assert tier.manager.lookup(keys[0], tier.request) is LookupResult.MISS
        del rows
        tier.close()
        assert adapter.closed


def test_what_fails_is_a_failed_job(lmcache, keys):
    with Payload(4, BLOCK) as payload:
        tier = load_peer({"type": "lmcache-fs"}).open(payload.view, "/folder", 1)
        rows = as_block_ids(range(3))
        tier.manager.submit_store(tier.make_job(1, keys[:3], rows, is_load=False))
        tier.manager.submit_load(tier.make_job(2, keys[1:], rows, is_load=True))
        results = [*tier.manager.get_finished_jobs(), *tier.manager.get_finished_jobs()]
        assert [(r.job_id, r.success) for r in results] == [(1, False), (2, False)]
        tier.close()


def test_without_jobs_the_adapter_is_not_asked():
    assert LmcacheManager(None).get_finished_jobs() == []


def test_its_options_are_checked(lmcache):
    with pytest.raises(ConfigError, match="num_workers: 0"):
        load_peer({"type": "lmcache-fs", "num_workers": 0})


def test_without_lmcache_there_is_a_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "lmcache", None)
    with pytest.raises(InputError, match=r"cannot be measured here.*pip install lmcache"):
        load_peer({"type": "lmcache-fs"})
