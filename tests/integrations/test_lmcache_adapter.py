"""The L2 adapter as LMCache drives it: over LMCache's own classes where they are installed."""

import errno
import json
import os
import shutil
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from facade import gated_tiers
from facade.gated_tiers import DEADLINE_S, Gate
from integrations import lmcache_contract
from integrations.lmcache_contract import wait_for
from prometheus_client import REGISTRY, generate_latest

from kvoffload_async.errors import ConfigError
from kvoffload_async.facade.host_rows import HostMemory
from kvoffload_async.facade.plugged import ListPosition
from kvoffload_async.integrations.lmcache import stores
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.status.client import ask, parse_report

SIZE = 8192
EXAMPLE = {"type": "example"}
GATED = {"type": "GatedTier", "module_path": "facade.gated_tiers"}
HASH = bytes(range(32))


class Object:
    """A memory object of LMCache's: bytes at an address."""

    def __init__(self, array):
        self.array = array

    @property
    def data_ptr(self):
        return self.array.ctypes.data

    def get_size(self):
        return self.array.nbytes


class Shape:
    def __init__(self, *sizes):
        self._sizes = sizes

    def numel(self):
        return int(np.prod(self._sizes))


@pytest.fixture
def lmcache(monkeypatch):
    return lmcache_contract.install(monkeypatch)


@pytest.fixture
def memory():
    """LMCache's memory: 32 objects."""
    buffer = PrimaryBuffer(32, SIZE)
    yield np.asarray(buffer.view)
    buffer.release()


@pytest.fixture(autouse=True)
def gate(monkeypatch):
    gate = Gate()
    monkeypatch.setattr(gated_tiers.GatedTier, "gate", gate)
    yield gate
    gate.open()


class Host:
    """LMCache's two controllers, in one."""

    def __init__(self, lmcache, memory, params, *, is_registered=True):
        desc = lmcache.L1MemoryDesc(memory.ctypes.data, memory.nbytes, 4096)
        given = {"l1_memory_desc": desc} if is_registered else {}
        self.adapter = lmcache.KVOffloadL2Adapter(params, **given)
        self.lmcache = lmcache
        self.told = {"stored": [], "accessed": [], "deleted": []}
        self.adapter.register_listener(self)
        dtype = SimpleNamespace(itemsize=2)
        self.layout = lmcache.MemoryLayoutDesc([Shape(4, SIZE // 8)], [dtype])

    def on_l2_keys_stored(self, keys, sizes):
        self.told["stored"] += keys

    def on_l2_keys_accessed(self, keys):
        self.told["accessed"] += keys

    def on_l2_keys_deleted(self, keys):
        self.told["deleted"] += keys

    def key(self, number, salt="", model="m", rank=1, group=0):
        chunk_hash = number if isinstance(number, bytes) else number.to_bytes(4, "big") * 8
        return self.lmcache.ObjectKey(chunk_hash, model, rank, group, salt)

    def store(self, keys, arrays):
        task = self.adapter.submit_store_task(keys, list(map(Object, arrays)))
        wait_for(self.adapter.get_store_event_fd())
        (done,) = self.adapter.pop_completed_store_tasks().items()
        assert done[0] == task
        return done[1]

    def lookup(self, keys, layouts=None):
        layouts = {0: self.layout} if layouts is None else layouts
        task = self.adapter.submit_lookup_and_lock_task(keys, layouts)
        wait_for(self.adapter.get_lookup_and_lock_event_fd())
        bitmap = self.adapter.query_lookup_and_lock_result(task)
        assert self.adapter.query_lookup_and_lock_result(task) is None  # once
        return [bitmap.test(index) for index in range(len(keys))]

    def load(self, keys, arrays):
        task = self.adapter.submit_load_task(keys, list(map(Object, arrays)))
        wait_for(self.adapter.get_load_event_fd())
        bitmap = self.adapter.query_load_result(task)
        assert self.adapter.query_load_result(task) is None
        return [bitmap.test(index) for index in range(len(keys))]

    def usage(self):
        """Return the bytes by salt, once all events were told."""
        told = threading.Event()
        self.adapter._usage._calls.put(told.set)
        assert told.wait(DEADLINE_S)
        return dict(self.adapter.get_usage().bytes_by_cache_salt)

    def open_store(self):
        (store,) = self.adapter._stores.every()
        return store.opened


@pytest.fixture
def start(lmcache, memory):
    made = []

    def make(*tiers, is_registered=True, **params):
        given = {"tier": list(tiers) if len(tiers) > 1 else tiers[0], **params}
        made.append(Host(lmcache, memory, given, is_registered=is_registered))
        return made[-1]

    yield make
    for host in made:
        host.adapter.close()


@pytest.fixture
def slab(tmp_path):
    return {"type": "slab", "root_dir": str(tmp_path), "capacity_bytes": "8MiB"}


def fill(memory, *rows):
    for row in rows:
        memory[row] = row + 1
    return [memory[row] for row in rows]


# -- the protocol ---------------------------------------------------------------------------------


def test_the_classes_are_those_of_the_recording(lmcache):
    assert lmcache_contract.described(lmcache) == lmcache_contract.recorded()


def test_the_descriptors_are_three(start):
    host = start(EXAMPLE)
    adapter = host.adapter
    fds = {
        *(adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd()),
        adapter.get_load_event_fd(),
    }
    assert len(fds) == 3
    assert not adapter.supports_global_eviction


@pytest.mark.parametrize("is_registered", [True, False])
def test_objects_come_back_in_place_or_through_own_rows(start, memory, is_registered):
    host = start(EXAMPLE, is_registered=is_registered)
    keys = [host.key(number) for number in range(6)]
    stored = host.store(keys[:4], fill(memory, 0, 1, 2, 3))
    assert (stored.is_successful(), stored.bytes_transferred()) == (True, 4 * SIZE)
    assert host.lookup(keys) == [True] * 4 + [False] * 2
    targets = [memory[row] for row in range(10, 16)]
    assert host.load(keys, targets) == [True] * 4 + [False] * 2
    assert [target[0] for target in targets] == [1, 2, 3, 4, 0, 0]
    assert all((target == target[0]).all() for target in targets)
    host.usage()
    assert sorted(map(repr, host.told["accessed"])) == sorted(map(repr, keys[:4]))
    opened = host.open_store()
    # Loads go on to the staging rows only for what is not in place.
    assert (opened.in_place, opened.staged) == ((10, 0) if is_registered else (0, 10))
    assert opened.rows.num_free == opened.rows.num_own


def test_objects_beside_the_rows_are_copied(start, memory):
    host = start(EXAMPLE, staging_bytes=2 * SIZE)
    flat = memory.reshape(-1)
    beside = [flat[SIZE * n + 4096 :][:SIZE] for n in range(1, 6)]
    for number, array in enumerate(beside):
        array[:] = number
    keys = [host.key(number) for number in range(5)]
    assert host.store(keys, beside).is_successful()  # more than there are rows
    flat[:] = 99
    assert host.load(keys, beside) == [True] * 5
    assert [(array == n).all() for n, array in enumerate(beside)] == [True] * 5
    assert (flat[: SIZE + 4096] == 99).all()
    assert (flat[6 * SIZE + 4096 :] == 99).all()
    assert (host.open_store().in_place, host.open_store().staged) == (0, 10)


def test_memory_outside_of_the_registered_range_is_copied(start, memory):
    host = start(EXAMPLE)
    outside = np.full(SIZE, 5, np.uint8)
    key = host.key(1)
    assert host.store([key], [outside]).is_successful()
    assert host.load([key], [memory[3]]) == [True]
    assert (memory[3] == 5).all()


def test_a_key_twice_in_a_call(start, memory):
    host = start(EXAMPLE)
    one, two = host.key(1), host.key(2)
    assert host.store([one, two, one], fill(memory, 0, 1, 0)).is_successful()
    assert host.lookup([one, one, host.key(3), two]) == [True, True, False, True]
    assert host.load([one, one, two], [memory[10], memory[11], memory[12]]) == [True] * 3
    assert [memory[row][0] for row in (10, 11, 12)] == [1, 1, 2]


def test_fields_of_keys_never_meet(start, memory):
    host = start(EXAMPLE, num_stores=4)
    twins = [
        host.key(HASH),
        host.key(HASH, salt="a"),
        host.key(HASH, salt="b"),
        host.key(b"\0" + HASH),
        host.key(HASH, rank=256),
        host.key(HASH, salt="\x01"),
        host.key(HASH, salt="s" * 128),
        host.key(HASH, salt="t" * 128),
        host.key(HASH, model="m2"),
        host.key(HASH, group=1),
    ]
    layouts = {0: host.layout, 1: host.layout}
    for number, twin in enumerate(twins):
        assert host.lookup([twin], layouts) == [False]
        memory[0] = number + 1
        assert host.store([twin], [memory[0]]).is_successful()
    for number, twin in enumerate(twins):
        assert host.load([twin], [memory[1]]) == [True]
        assert (memory[1] == number + 1).all()


def test_a_store_that_is_not_whole_has_failed(start, memory, monkeypatch):
    host = start(GATED)
    keys = [host.key(number) for number in range(3)]
    host.store(keys[:1], fill(memory, 0))
    tier = host.open_store().tiers.managers[0].tier

    async def store(job):
        raise OSError(errno.EIO, "not this one")

    monkeypatch.setattr(tier, "store", store)
    result = host.store(keys, fill(memory, 0, 1, 2))
    assert (result.is_successful(), result.bytes_transferred()) == (False, 0)
    assert host.lookup(keys) == [True, False, False]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"number": b"x" * 90}, "a chunk hash of 90 bytes"),
        ({"number": b"x" * 300}, "a chunk hash of 300 bytes"),
        ({"number": 0, "rank": 2**2100}, "a KV rank of 263"),
        ({"number": 0, "rank": -1}, "convert negative int"),
        ({"number": 0, "group": 2**32}, "int too big"),
        ({"number": 0, "salt": "\ud800"}, "surrogates not allowed"),
    ],
)
def test_a_key_that_fits_no_tier_is_a_miss(start, memory, caplog, fields, message):
    host = start(EXAMPLE)
    keys = [host.key(**fields), host.key(1)]
    assert not host.store(keys, fill(memory, 0, 1)).is_successful()
    assert host.lookup(keys) == [False, True]
    assert host.load(keys, [memory[2], memory[3]]) == [False, True]
    assert message in caplog.text


def test_a_model_with_an_at_sign_is_lmcaches_own_error(start):
    with pytest.raises(ValueError, match="@"):
        start(EXAMPLE).key(1, model="a@b")


# -- tenants --------------------------------------------------------------------------------------

TENANTS = {"a": {}, "b": {}}


def test_an_objects_tenant_is_its_salt_also_after_a_restart(start, memory, slab):
    before = start(slab, tenants=TENANTS)
    salts = ["", "a", "b", "c", "s" * 128]
    keys = [before.key(HASH, salt=salt) for salt in salts]
    assert before.store(keys, fill(memory, *range(5))).is_successful()
    tenants = before.adapter._options.known_tenants
    stored = before.open_store().tiers.list_keys(ListPosition(), 100)[0]
    owners = sorted(tenants.names[tenants.tenant_of(key)] for key in stored)
    assert owners == ["a", "b", "default", "default", "default"]
    before.adapter.close()
    host = start(slab, tenants=TENANTS)
    assert host.lookup(keys) == [True] * 5
    memory[:] = 0
    assert host.load(keys, list(memory[10:15])) == [True] * 5
    assert [memory[10 + n][0] for n in range(5)] == [1, 2, 3, 4, 5]
    until(lambda: host.usage() == dict.fromkeys(salts, SIZE))
    assert len(host.adapter.list_l2_keys().entries) == 5
    host.adapter.submit_unlock(keys)
    host.adapter.delete(keys[1:2])
    until(lambda: host.told["deleted"] == keys[1:2])
    assert host.lookup(keys) == [True, False, True, True, True]


def test_objects_of_an_unknown_salt_are_not_stored_if_so_configured(start, memory):
    host = start(EXAMPLE, tenants=TENANTS, unknown_tenant="no_store")
    keys = [host.key(HASH, salt=salt) for salt in ("a", "c", "", "default")]
    assert not host.store(keys, fill(memory, 0, 1, 2, 3)).is_successful()
    assert host.adapter.report_status()["objects_without_key"] == 2
    assert host.lookup(keys) == [True, False, False, True]
    assert host.load(keys, list(memory[4:8])) == [True, False, False, True]
    host.adapter.delete([])


def test_a_tenant_that_floods_evicts_nothing_of_others(start, memory, slab):
    tenants = {"a": {"quota_bytes": "256KiB"}, "b": {}}
    host = start({**slab, "capacity_bytes": "1MiB"}, tenants=tenants)
    kept = [host.key(n, salt="b") for n in range(4)]
    assert host.store(kept, fill(memory, 0, 1, 2, 3)).is_successful()
    for first in range(0, 300, 4):
        keys = [host.key(n, salt="a") for n in range(first, first + 4)]
        assert host.store(keys, fill(memory, 0, 1, 2, 3)).is_successful()
    until(lambda: 0 < host.usage()["a"] <= 256 << 10)
    assert host.usage()["b"] == 4 * SIZE
    assert host.lookup(kept) == [True] * 4


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"tenants": {}}, "tenants: "),
        ({"tenants": {"a": {"quota_bytes": "1MiB"}}}, r"tier\[0\].*quota_bytes: the tier cannot"),
        ({"tenants": {"a": {"name_key_file": "/k"}}}, r"tenants\['a'\]: name_key_file"),
        ({"tenants": {"a": {"encryption_key_file": "/k"}}}, r"tenants\['a'\]: encryption_key_file"),
        ({"tenants": TENANTS, "unknown_tenant": "a"}, "unknown_tenant: 'a'"),
    ],
)
def test_tenants_that_cannot_be_are_refused(start, params, message):
    with pytest.raises(ConfigError, match=message):
        start(EXAMPLE, **params)


# -- restarts, usage, removals --------------------------------------------------------------------


def test_after_a_restart_the_first_lookup_finds_everything(start, memory, slab):
    before = start(slab)
    salts = ["", "tenant", "s" * 128]
    keys = [before.key(number, salt=salts[number % 3]) for number in range(9)]
    assert before.store(keys, fill(memory, *range(9))).is_successful()
    assert before.usage() == dict.fromkeys(salts, 3 * SIZE)
    before.adapter.close()
    host = start(slab)
    assert host.usage() == {}
    assert host.lookup([keys[0]]) == [True]
    until(lambda: host.usage() == {"": 3 * SIZE, "tenant": 3 * SIZE})
    assert host.lookup(keys) == [True] * 9
    until(lambda: host.usage() == dict.fromkeys(salts, 3 * SIZE))
    assert sorted(map(repr, host.told["stored"])) == sorted(map(repr, keys))
    memory[:] = 0
    assert host.load(keys, list(memory[10:19])) == [True] * 9
    assert [(memory[10 + n] == n + 1).all() for n in range(9)] == [True] * 9


def test_evictions_are_told_and_usage_is_what_is_there(start, memory, slab):
    host = start({**slab, "capacity_bytes": "1MiB"})
    salts = ["", "a", "t" * 100]
    for first in range(0, 300, 4):
        keys = [host.key(n, salt=salts[n % 3]) for n in range(first, first + 4)]
        assert host.store(keys, fill(memory, 0, 1, 2, 3)).is_successful()
    usage = host.usage()
    (stats,) = host.open_store().tiers.stats()
    assert stats.evicted_blocks == len(host.told["deleted"]) > 100
    assert sum(usage.values()) == (300 - stats.evicted_blocks) * SIZE
    host.adapter.close()
    again = start({**slab, "capacity_bytes": "512KiB"})
    for first in range(300, 600, 4):
        keys = [again.key(n, salt=salts[n % 3]) for n in range(first, first + 4)]
        again.store(keys, fill(memory, 0, 1, 2, 3))
    used = again.usage()
    total = again.adapter.get_usage().total_bytes_used
    assert total == sum(used.values()) > 0
    catalog = again.open_store().tiers.managers[0].tier._store.catalog
    assert total == len(catalog) * SIZE


def test_usage_of_a_tier_that_does_not_announce_removals_is_not_counted(start, memory):
    host = start(EXAMPLE)
    assert host.store([host.key(1)], fill(memory, 0)).is_successful()
    assert host.usage() == {}
    assert host.told["stored"] == [host.key(1)]


def test_deleted_objects_are_gone_where_a_tier_can_and_locked_ones_stay(start, memory, slab):
    host = start(slab)
    keys = [host.key(number) for number in range(3)]
    host.store(keys, fill(memory, 0, 1, 2))
    assert host.lookup(keys[:1]) == [True]
    host.adapter.delete([*keys[:2], host.key(9)])
    assert host.load([keys[2]], [memory[5]]) == [True]  # in the tier's order: after the removal
    assert host.lookup(keys) == [True, False, True]
    assert host.usage() == {"": 2 * SIZE}
    assert host.told["deleted"] == [keys[1]]


def test_deleting_is_refused_where_no_tier_can_or_the_store_is_not_open(start, memory, slab):
    host = start(EXAMPLE)
    with pytest.raises(NotImplementedError, match=r"store of model 'm', group 0 is not open"):
        host.adapter.delete([host.key(1)])
    host.store([host.key(1)], fill(memory, 0))
    with pytest.raises(NotImplementedError, match="tiers of type example cannot remove"):
        host.adapter.delete([host.key(1)])
    assert host.lookup([host.key(1)]) == [True]
    host.adapter.close()
    host.adapter.delete([host.key(1)])  # closed: no effect


def test_of_several_tiers_those_that_cannot_delete_keep_the_object(start, memory, slab, caplog):
    host = start(EXAMPLE, slab)
    host.store([host.key(1)], fill(memory, 0))
    for _ in range(2):
        host.adapter.delete([host.key(1)])
    assert host.lookup([host.key(1)]) == [True]
    assert caplog.text.count("tiers of type example cannot, so they keep them") == 1
    until(lambda: host.told["deleted"] == [host.key(1)])


@pytest.fixture(params=[None, "8MiB"])
def fs(tmp_path, request):
    capacity = {} if request.param is None else {"capacity_bytes": request.param}
    return {"type": "fs", "root_dir": str(tmp_path), **capacity}


def test_locked_objects_are_not_deleted_from_files_until_they_are_unlocked(start, memory, fs):
    host = start(fs)
    keys = [host.key(number) for number in range(2)]
    host.store(keys, fill(memory, 0, 1))
    for _ in range(2):
        assert host.lookup(keys[:1]) == [True]
    host.adapter.delete(keys)
    until(lambda: host.told["deleted"] == keys[1:])
    assert host.load(keys[:1], [memory[5]]) == [True]
    host.adapter.submit_unlock(keys[:1])
    host.adapter.delete([keys[0], host.key(9)])
    host.adapter.submit_unlock(keys[:1])
    host.adapter.delete(keys[:1])
    until(lambda: host.told["deleted"] == [keys[1], keys[0]])


def test_a_lock_on_a_file_that_is_never_unlocked_expires(start, memory, fs):
    host = start(fs, lock_timeout_s=0.01)
    host.store([host.key(0)], fill(memory, 0))
    assert host.lookup([host.key(0)]) == [True]
    until(lambda: not host.open_store().tiers._pins)
    host.adapter.delete([host.key(0)])
    until(lambda: host.told["deleted"] == [host.key(0)])


def test_objects_are_deleted_from_files_too(start, memory, fs):
    host = start(fs)
    keys = [host.key(number) for number in range(3)]
    host.store(keys, fill(memory, 0, 1, 2))
    host.adapter.delete([keys[1], host.key(9)])
    until(lambda: host.told["deleted"] == [keys[1]])  # a look-up would lock it
    assert host.lookup(keys) == [True, False, True]
    assert host.usage() == ({"": 2 * SIZE} if "capacity_bytes" in fs else {})


def until(is_so):
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.005)


def listed(host, size, model=None):
    """Return the objects of all pages."""
    found, cursor = [], None
    while True:
        page = host.adapter.list_l2_keys(model, size, cursor)
        assert len(page.entries) <= size
        found += page.entries
        if (cursor := page.next_page_token) is None:
            return found


@pytest.mark.parametrize("size", [1, 7, 500])
def test_every_object_is_listed_once(start, memory, slab, tmp_path, size):
    slab["root_dir"] = str(tmp_path / "slab")
    fs = {"type": "fs", "root_dir": str(tmp_path / "fs"), "capacity_bytes": "24MiB"}
    host = start({**slab, "capacity_bytes": "24MiB"}, fs, num_stores=3)
    assert listed(host, size) == []
    salts = ["", "tenant", "s" * 128]
    keys = [host.key(n, salt=salts[n % 3], model="mn"[n % 2], rank=n % 5) for n in range(20)]
    host.store(keys, [memory[0]] * 20)
    host.store([host.key(30, group=1)], fill(memory, 1))
    found = listed(host, size)
    assert len(found) == 21
    expected = [key.to_encoded_object_key() for key in (*keys, host.key(30, group=1))]
    assert set(map(repr, expected)) == {repr(entry.key) for entry in found}
    assert {entry.size_bytes for entry in found} == {SIZE}
    assert len(listed(host, size, "n")) == 10
    assert listed(host, size, "other") == []
    host.adapter.close()
    assert listed(host, size) == []


@pytest.mark.parametrize(
    ("size", "cursor", "message"),
    [(0, None, "page_size: 0"), (1, "x", "cursor: 'x'"), (1, "0.0.00", "cursor: '0.0.00'")],
)
def test_a_page_that_cannot_be_is_a_value_error(start, size, cursor, message):
    with pytest.raises(ValueError, match=message):
        start(EXAMPLE).adapter.list_l2_keys(None, size, cursor)


def test_tiers_that_do_not_know_their_contents_refuse_to_list_them(start, memory, tmp_path):
    host = start({"type": "fs", "root_dir": str(tmp_path)})
    host.store([host.key(1)], fill(memory, 0))
    with pytest.raises(NotImplementedError, match="tiers of type fs do not know their contents"):
        host.adapter.list_l2_keys()


def test_files_that_a_former_run_has_stored_are_told_by_salt(start, memory, tmp_path):
    fs = {"type": "fs", "root_dir": str(tmp_path), "capacity_bytes": "256KiB"}
    before = start(fs)
    salts = ["", "tenant", "s" * 128]
    keys = [before.key(number, salt=salts[number % 3]) for number in range(9)]
    assert before.store(keys, fill(memory, *range(9))).is_successful()
    before.adapter.close()
    host = start(fs)
    assert host.lookup(keys) == [True] * 9
    until(lambda: host.usage() == dict.fromkeys(salts, 3 * SIZE))
    assert len(listed(host, 4)) == 9
    host.adapter.submit_unlock(keys)
    for first in range(100, 200, 4):  # evicts them; the usage of no salt falls below 0
        new = [host.key(n, salt=salts[n % 3]) for n in range(first, first + 4)]
        assert host.store(new, fill(memory, 0, 1, 2, 3)).is_successful()
    assert set(map(repr, keys)) <= set(map(repr, host.told["deleted"]))
    on_disk = sum(path.suffix == ".bin" for path in tmp_path.rglob("*"))
    assert sum(host.usage().values()) == on_disk * SIZE


@pytest.mark.parametrize("error", [RuntimeError("once"), SystemExit(1)])
def test_usage_goes_on_after_an_error_of_a_listener(start, memory, slab, caplog, error):
    host = start(slab)
    host.store([host.key(0)], fill(memory, 0))
    host.usage()

    class Failing:
        def on_l2_keys_stored(self, keys, sizes):
            raise error

        on_l2_keys_accessed = on_l2_keys_deleted = on_l2_keys_stored

    host.adapter.register_listener(Failing())
    keys = [host.key(number) for number in range(1, 5)]
    for key in keys:
        host.store([key], fill(memory, 0))
    host.adapter.delete(keys[:1])
    until(lambda: host.told["deleted"] == keys[:1])
    assert host.usage() == {"": 4 * SIZE}
    assert host.told["stored"] == [host.key(0), *keys]
    assert host.adapter.report_status()["listener_errors"] == 5
    assert caplog.text.count("reporting to LMCache which objects are stored failed") == 1


def test_events_that_a_listener_is_too_slow_for_are_dropped_and_counted(
    start, memory, slab, monkeypatch, caplog
):
    monkeypatch.setattr("kvoffload_async.integrations.lmcache.adapter.MOST_WAITING", 2)
    host = start(slab)
    may_continue = threading.Event()
    host.adapter._usage._calls.put(lambda: may_continue.wait(DEADLINE_S))
    until(lambda: not host.adapter._usage._calls.qsize())
    for number in range(5):
        host.store([host.key(number)], fill(memory, 0))
    assert host.adapter.report_status()["listener_errors"] == 3
    assert "2 events wait for a listener" in caplog.text
    may_continue.set()
    assert host.usage() == {"": 2 * SIZE}


@pytest.mark.parametrize("name", ["c8" * 40, "ff" * 17, "00", "0001"])
def test_a_file_of_another_program_is_neither_counted_nor_listed(start, memory, tmp_path, name):
    fs = {"type": "fs", "root_dir": str(tmp_path), "capacity_bytes": "8MiB"}
    before = start(fs)
    keys = [before.key(number) for number in range(4)]
    before.store(keys, fill(memory, *range(4)))
    before.adapter.close()
    file = next(tmp_path.rglob("*.bin"))
    foreign = file.parents[1] / name[:2] / f"{name}_g0.bin"
    foreign.parent.mkdir(exist_ok=True)
    shutil.copyfile(file, foreign)
    host = start(fs)
    assert host.lookup(keys) == [True] * 4
    until(lambda: sum(map(len, host.adapter._usage._unreported.values())) == 1)
    until(lambda: host.usage() == {"": 4 * SIZE})
    assert len(listed(host, 2)) == 4
    host.store([host.key(9)], fill(memory, 0))
    assert host.usage() == {"": 5 * SIZE}
    assert host.adapter.report_status()["listener_errors"] == 0


def test_objects_that_cannot_be_copied_fail_alone_and_later_ones_do_not(
    start, memory, monkeypatch, caplog
):
    host = start(EXAMPLE, is_registered=False, staging_bytes=2 * SIZE)
    keys = [host.key(number) for number in range(4)]
    host.store(keys[:1], fill(memory, 0))
    stage, rows = host.open_store().stage, host.open_store().rows
    gather, scatter = stage._copies.gather, stage._copies.scatter
    monkeypatch.setattr(stage._copies, "gather", failing_once(gather))
    assert not host.store(keys, fill(memory, 0, 1, 2, 3)).is_successful()
    assert host.lookup(keys) == [True, False, True, True]  # two at a time: the first two failed
    monkeypatch.setattr(stage._copies, "scatter", failing_once(scatter))
    loads = [host.load([keys[n]], [memory[10 + n]]) for n in (2, 2, 3)]
    assert loads == [[False], [True], [True]]
    assert (memory[13] == 4).all()
    until(lambda: rows.num_free == rows.num_own == 2)
    (store,) = host.adapter.report_status()["stores"]
    assert store["copy_errors"] == 2
    assert "copying objects to or from staging memory failed" in caplog.text


def failing_once(call):
    calls = iter([True])

    def perform(*args):
        if next(calls, False):
            raise MemoryError("once")
        return call(*args)

    return perform


def test_a_request_that_fails_inside_is_answered(start, memory, monkeypatch, caplog):
    host = start(EXAMPLE)
    host.store([host.key(1)], fill(memory, 0))
    opened = host.open_store()
    for name in ("store", "load"):
        monkeypatch.setattr(opened, name, failing_once(getattr(opened, name)))
    assert not host.store([host.key(2)], fill(memory, 1)).is_successful()
    assert host.load([host.key(1)], [memory[5]]) == [False]
    assert host.adapter.report_status()["request_errors"] == 2
    assert caplog.text.count("a request failed") == 1
    assert host.store([host.key(2)], fill(memory, 1)).is_successful()
    assert host.load([host.key(2)], [memory[5]]) == [True]


def test_locks_are_counted_and_unlocking_never_fails(start, memory, slab):
    host = start(slab)
    host.adapter.submit_unlock([host.key(1)])  # nothing is open
    host.store([host.key(1)], fill(memory, 0))
    host.lookup([host.key(1)])
    host.lookup([host.key(1), host.key(2)])
    pins = host.open_store().tiers._pins_of
    (pinned,) = pins.values()
    assert len(pinned) == 2
    host.adapter.submit_unlock([host.key(1), host.key(1), host.key(2), host.key(1, model="n")])
    assert len(pinned) == 1
    host.adapter.submit_unlock([host.key(1)])
    host.adapter.submit_unlock([host.key(1)])
    assert not pins


# -- tiers that hang or cannot be opened ----------------------------------------------------------


def test_memory_of_a_load_that_hangs_is_not_given_back_before_its_copy_ends(start, memory, gate):
    host = start({**GATED, "io_timeout_s": 0.05})
    keys = [host.key(number) for number in range(3)]
    host.store(keys, fill(memory, 0, 1, 2))
    gate.shut()
    gate.content = 77
    task = host.adapter.submit_load_task([keys[0]], [Object(memory[10])])
    assert gate.entered.wait(DEADLINE_S)
    loads = host.open_store()._direct_loads
    while not any(load.ended.done() for load in loads):
        threading.Event().wait(0.001)
    assert host.adapter.query_load_result(task) is None
    # Neither lookups nor other loads wait for it: those go through own rows, and end in time.
    assert host.lookup(keys) == [True] * 3
    memory[11] = 5
    assert host.load([keys[1]], [memory[11]]) == [False]
    memory[11] = 6  # LMCache uses the memory for something else
    gate.open()
    wait_for(host.adapter.get_load_event_fd())
    assert host.adapter.query_load_result(task).popcount() == 0
    rows = host.open_store().rows
    while rows.num_free < rows.num_own:
        threading.Event().wait(0.001)
    assert (memory[11] == 6).all()


def test_loads_beyond_those_that_may_hang_use_own_rows(start, memory, gate, monkeypatch):
    monkeypatch.setattr(stores, "MOST_DIRECT_LOADS", 1)
    host = start(GATED)
    keys = [host.key(number) for number in range(2)]
    host.store(keys, fill(memory, 0, 1))
    gate.shut()
    adapter = host.adapter
    tasks = [
        adapter.submit_load_task([key], [Object(memory[10 + n])]) for n, key in enumerate(keys)
    ]
    gate.open()
    results = {}
    while len(results) < 2:
        for task in tasks:
            if (result := adapter.query_load_result(task)) is not None:
                results[task] = result.popcount()
        threading.Event().wait(0.001)
    assert set(results.values()) == {1}
    assert (memory[10] == 1).all()
    assert (memory[11] == 2).all()
    assert (host.open_store().in_place, host.open_store().staged) == (3, 1)


def test_a_lookup_does_not_wait_for_a_store_that_is_slow_to_open(start, monkeypatch):
    host = start(EXAMPLE, lookup_timeout_s=0.02)
    opening = threading.Event()
    opened = stores.OpenStore

    def slow(*args):
        assert opening.wait(DEADLINE_S)
        return opened(*args)

    monkeypatch.setattr(stores, "OpenStore", slow)
    assert host.lookup([host.key(1)]) == [False]
    opening.set()


def test_a_store_that_cannot_be_opened_has_nothing_and_is_tried_again(
    start, memory, tmp_path, caplog, monkeypatch
):
    now = [100.0]
    monkeypatch.setattr(stores, "time", SimpleNamespace(monotonic=lambda: now[0]))
    host = start({"type": "slab", "root_dir": str(tmp_path / "kv"), "capacity_bytes": "8MiB"})
    (tmp_path / "kv").write_text("a file")
    assert not host.store([host.key(1)], fill(memory, 0)).is_successful()
    (store,) = host.adapter._stores.every()
    assert "cannot be opened" in caplog.text
    assert host.adapter.report_status()["is_healthy"] is False
    (tmp_path / "kv").unlink()
    assert host.lookup([host.key(1)]) == [False]  # not yet
    assert store.opened is None
    now[0] += 1.0
    assert host.store([host.key(1)], fill(memory, 0)).is_successful()
    assert host.adapter.report_status()["is_healthy"] is True


def test_an_object_larger_than_its_part_of_the_capacity_is_named(start, memory, slab, caplog):
    host = start({**slab, "capacity_bytes": "64KiB"}, num_stores=2)
    assert not host.store([host.key(1)], fill(memory, 0)).is_successful()
    assert "capacity_bytes" in caplog.text


def test_a_further_kind_of_object_is_refused_and_named(start, memory, caplog):
    host = start(EXAMPLE)
    assert host.store([host.key(1)], fill(memory, 0)).is_successful()
    assert not host.store([host.key(1, model="other")], fill(memory, 1)).is_successful()
    assert not host.store([host.key(2)], [memory[1][:4096]]).is_successful()
    assert host.lookup([host.key(1, model="other"), host.key(1)]) == [False, True]
    assert "num_stores: 1: objects of 'other', group 0, 8192 bytes are not stored" in caplog.text
    assert host.adapter.report_status()["refused_objects"] == 2


def test_without_a_layout_the_size_used_last_applies(start, memory, lmcache):
    host = start(EXAMPLE)
    nothing = {0: lmcache.MemoryLayoutDesc([], [])}
    assert host.lookup([host.key(1)], nothing) == [False]
    host.store([host.key(1)], fill(memory, 0))
    assert host.lookup([host.key(1)], nothing) == [True]
    assert host.lookup([host.key(1)], {}) == [True]


# -- configuration, status, closing ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "tier: missing"),
        ({"tier": []}, "tier: .*must be a tier"),
        ({"tier": EXAMPLE, "num_store": 2}, "adapter_params: unknown key 'num_store'.*num_stores"),
        ({"tier": {"type": "slap"}}, r"tier\[0\]: .*did you mean 'slab'"),
        ({"tier": {"type": "slab", "capacity_byte": 1}}, r"tier\[0\]: .*capacity_bytes"),
        ({"tier": {**EXAMPLE, "model": "m"}}, r"tier\[0\]: model: 'm' is determined by LMCache"),
        ({"tier": EXAMPLE, "lookup_timeout_s": 0}, "lookup_timeout_s: 0"),
        ("slab", "adapter_params: 'slab' is not valid"),
    ],
)
def test_wrong_parameters_are_a_value_error_before_anything_starts(
    lmcache, threads_left, params, message
):
    with pytest.raises(ConfigError, match=message) as raised:
        lmcache.KVOffloadL2Adapter(params)
    assert isinstance(raised.value, ValueError)
    assert not threads_left()


def test_each_store_has_its_folder_and_its_part(start, memory, tmp_path):
    tier = {"type": "slab", "root_dir": str(tmp_path), "capacity_bytes": "16MiB"}
    host = start(tier, num_stores=2)
    host.store([host.key(1)], fill(memory, 0))
    host.store([host.key(1, group=3)], fill(memory, 1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["group0-8192", "group3-8192"]
    for store in host.adapter._stores.every():
        (stats,) = store.opened.tiers.stats()
        assert stats.capacity_bytes <= 8 << 20


def test_the_status_is_honest_and_can_be_written_as_json(start, memory, slab):
    host = start(slab)
    assert host.adapter.report_status()["stores"] == []
    host.store([host.key(1)], fill(memory, 0))
    status = json.loads(json.dumps(host.adapter.report_status()))
    assert status["is_healthy"] is True
    (store,) = status["stores"]
    assert (store["model"], store["group"], store["object_bytes"]) == ("m", 0, SIZE)
    assert store["tiers"][0]["stored_blocks"] == 1
    host.adapter.close()
    assert host.adapter.report_status()["is_healthy"] is False


def test_metrics_and_status_socket_have_the_tiers_of_all_stores(start, memory, tmp_path):
    first = start(EXAMPLE, status_socket=str(tmp_path / "s"), num_stores=2)
    second = start(EXAMPLE)
    first.store([first.key(1)], fill(memory, 0))
    first.store([first.key(1, group=1)], fill(memory, 0))
    first.load([first.key(1)], [memory[1]])
    text = generate_latest(REGISTRY).decode()
    assert 'kvoffload_tier_stored_blocks_total{engine="lmcache",tier="example"} 1.0' in text
    assert 'engine="lmcache",tier="example-2"' in text
    path = str(tmp_path / "s")
    status = parse_report(ask(path), path)
    assert [tier.stored_blocks for tier in status.statistics.tiers] == [1, 1]
    second.store([second.key(1)], fill(memory, 0))
    assert 'engine="lmcache-2",tier="example"' in generate_latest(REGISTRY).decode()
    first.adapter.close()
    second.adapter.close()
    assert "lmcache" not in generate_latest(REGISTRY).decode()


def test_closing_ends_what_runs_and_closes_the_descriptors_last(start, memory, gate, caplog):
    host = start(GATED, close_timeout_s=0.05)
    adapter = host.adapter
    keys = [host.key(number) for number in range(2)]
    host.store(keys, fill(memory, 0, 1))
    gate.shut()
    task = adapter.submit_load_task([keys[0]], [Object(memory[10])])
    assert gate.entered.wait(DEADLINE_S)
    fds = [adapter.get_store_event_fd(), adapter.get_load_event_fd()]
    adapter.close()
    adapter.close()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    assert adapter.query_load_result(task) is None  # its memory may be written to
    assert "still run; the memory that they access stays allocated" in caplog.text
    late = adapter.submit_store_task([keys[1]], [Object(memory[1])])
    assert not adapter.pop_completed_store_tasks()[late].is_successful()
    gate.open()
    stores._abandoned.clear()


def test_a_host_memory_is_told_by_address_and_size(memory):
    assert HostMemory(memory.ctypes.data, memory.nbytes).num_bytes == 32 * SIZE
