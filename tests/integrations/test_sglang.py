"""The storage backend over SGLang's recorded classes: pages come back, or are reported missing."""

import hashlib
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from facade.gated_tiers import new_gates
from integrations import sglang_protocol
from integrations.sglang_protocol import HostPool
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from kvoffload_async.errors import ConfigError, StateError, TierTimeoutError, UnknownNameError
from kvoffload_async.facade.plugged import ListPosition
from kvoffload_async.integrations.sglang import page_store
from kvoffload_async.integrations.sglang.pages import PoolPages, Shard
from kvoffload_async.status.client import ask, parse_report

LAYOUTS = ["layer_first", "page_first"]
GATED = {"type": "GatedTier", "module_path": "facade.gated_tiers"}
PROBED = {"type": "ProbedTier", "module_path": "facade.gated_tiers"}


@pytest.fixture(scope="module", autouse=True)
def sglang():
    with sglang_protocol.sglang() as module:
        yield module


@pytest.fixture(autouse=True)
def gates(monkeypatch):
    with new_gates(monkeypatch) as gates:
        yield gates


@pytest.fixture
def create(sglang):
    """Return what creates a backend as SGLang does; all of them are closed at the end."""
    made = []

    def make(tier, pool=None, *, extra=None, interface_v1=1, **ranks):
        own = {"backend_name": "kv", "module_path": "m", "class_name": "c"}
        own |= {"interface_v1": interface_v1, "tier": tier, **(extra or {})}
        own = {key: value for key, value in own.items() if value is not None}
        config = sglang.HiCacheStorageConfig(**{**sglang_protocol.RANKS, **ranks}, extra_config=own)
        backend = sglang_protocol.backend_class()(config, {})
        made.append(backend)
        if pool is not None:
            backend.register_mem_pool_host(pool)
            backend.register_mem_host_pool_v2(pool, sglang.PoolName.KV)
            backend.on_host_pools_registered()
        return backend

    yield make
    for backend in made:
        backend.close()


@pytest.fixture
def fs(tmp_path):
    return {"type": "fs", "root_dir": str(tmp_path / "kv")}


def keys_of(count, first=0):
    return [hashlib.sha256(b"%d" % number).hexdigest() for number in range(first, first + count)]


def filled(pages, *args, **kwargs):
    pool = HostPool(pages, *args, **kwargs)
    pool.fill()
    return pool


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_mla", [False, True])
@pytest.mark.parametrize("native", ["", "0"])
def test_pages_come_back_and_others_stay(create, monkeypatch, layout, is_mla, native):
    monkeypatch.setenv("KVOFFLOAD_NATIVE", native)
    pool = filled(300, layout, is_mla=is_mla)
    backend = create({"type": "example"}, pool, is_mla_model=is_mla)
    keys = keys_of(140)
    assert backend.batch_set_v1(keys, pool.indices(range(140))) == [True] * 140
    expected = [pool.page(number) for number in range(300)]
    targets = [*range(299, 160, -1), 150]
    assert backend.batch_exists([*keys, "another"]) == 140
    assert backend.batch_get_v1(keys, pool.indices(targets)) == [True] * 140
    for key, page in enumerate(targets):
        assert torch.equal(pool.page(page), expected[key])
    untouched = set(range(300)) - set(targets)
    assert all(torch.equal(pool.page(page), expected[page]) for page in untouched)


def test_a_call_of_more_pages_than_fit_into_the_rows_takes_several_jobs(create):
    pool = filled(40)
    page_bytes = PoolPages(pool).page_bytes
    backend = create({"type": "example"}, pool, extra={"staging_bytes": 3 * 4096})
    assert page_bytes <= 4096
    keys = keys_of(20)
    assert backend.batch_set_v1(keys, pool.indices(range(20))) == [True] * 20
    assert backend.batch_get_v1(keys, pool.indices(range(20, 40))) == [True] * 20
    assert all(torch.equal(pool.page(page), pool.page(page + 20)) for page in range(20))
    (stats,) = backend.stats().tiers
    assert stats.stored_blocks == stats.loaded_blocks == 20
    assert stats.submitted_jobs == 14


def test_a_key_twice_in_a_call_is_loaded_to_both_pages(create):
    pool = filled(6)
    backend = create({"type": "example"}, pool)
    one, other = keys_of(2)
    assert backend.batch_set_v1([one, other, one], pool.indices([0, 1, 0])) == [True] * 3
    assert backend.batch_get_v1([one, other, one], pool.indices([3, 4, 5])) == [True] * 3
    assert torch.equal(pool.page(3), pool.page(0))
    assert torch.equal(pool.page(4), pool.page(1))
    assert torch.equal(pool.page(5), pool.page(0))


def test_a_page_that_is_damaged_or_missing_fails_alone(create, fs):
    pool = filled(20)
    backend = create(fs, pool)
    keys = keys_of(5)
    assert all(backend.batch_set_v1(keys[:4], pool.indices(range(4))))
    (damaged,) = [path for path in Path(fs["root_dir"]).rglob(f"*{keys[1]}*") if path.is_file()]
    damaged.write_bytes(bytes(damaged.stat().st_size))
    before = pool.page(11)
    assert backend.batch_get_v1(keys, pool.indices(range(10, 15))) == [
        *(True, False, True, True),
        False,
    ]
    assert torch.equal(pool.page(12), pool.page(2))
    assert torch.equal(pool.page(11), before)


def test_existence_is_the_leading_run(create, fs):
    pool = filled(8)
    backend = create(fs, pool)
    keys = keys_of(6)
    backend.batch_set_v1([*keys[:3], keys[4]], pool.indices([0, 1, 2, 4]))
    assert backend.batch_exists(keys) == 3
    assert backend.batch_exists(keys[3:]) == 0
    assert backend.batch_exists([]) == 0
    assert [backend.exists(key) for key in keys] == [True, True, True, False, True, False]
    result = backend.batch_exists_v2(keys)
    assert result.kv_hit_pages == 3


def test_a_probe_that_hangs_is_a_miss_at_its_deadline(create, gates):
    pool = filled(8)
    backend = create({**PROBED, "probe_timeout_s": 0.05}, pool)
    gates[1].shut()
    assert backend.batch_exists(keys_of(3)) == 0
    gates[1].open()


def test_a_load_that_hangs_fails_at_its_deadline_and_never_changes_a_page(create, gates):
    gate = gates[0]
    pool = filled(8)
    backend = create({**GATED, "io_timeout_s": 0.1}, pool, extra={"staging_bytes": 4096})
    keys = keys_of(2)
    assert backend.batch_set_v1(keys, pool.indices([0, 1])) == [True, True]
    before = [pool.page(page) for page in range(8)]
    gate.shut()
    gate.content = 7
    assert backend.batch_get_v1(keys[:1], pool.indices([4])) == [False]
    assert backend.stats().primary.slots.pinned == 1  # the copy may still access the row
    assert backend.batch_get_v1(keys[:1], pool.indices([5])) == [False]  # its only row is in use
    gate.content = None
    gate.open()
    loaded = []
    while not loaded or not all(loaded):  # as soon as the breaker lets it try
        loaded = backend.batch_get_v1(keys, pool.indices([6, 7]))
    assert backend.stats().primary.slots.pinned == 0
    assert torch.equal(pool.page(6), before[0])
    assert all(torch.equal(pool.page(page), before[page]) for page in range(6))


def test_a_store_that_hangs_fails_and_loads_go_on(create, gates):
    gate = gates[0]
    pool = filled(8)
    backend = create({**GATED, "io_timeout_s": 0.1}, pool, extra={"staging_bytes": 4096})
    keys = keys_of(2)
    gate.shut()
    assert backend.batch_set_v1(keys, pool.indices([0, 1])) == [False, False]
    gate.open()
    assert backend.batch_get_v1(keys_of(1, 5), pool.indices([4])) == [False]  # it is not stored


def test_the_generic_interface_has_pages_of_its_own(create, fs):
    pool = filled(8)
    backend = create(fs, pool, interface_v1=0)
    keys = keys_of(3)
    pages = [pool.page(page) for page in range(3)]
    assert backend.batch_set(keys, pages)
    assert backend.set(keys[0], pages[0])
    assert backend.batch_exists(keys) == 3
    targets = [torch.zeros_like(page) for page in pages]
    assert all(
        one is two for one, two in zip(backend.batch_get(keys, targets), targets, strict=True)
    )
    assert all(torch.equal(one, two) for one, two in zip(targets, pages, strict=True))
    assert backend.get("unknown", torch.zeros_like(pages[0])) is None
    assert backend.batch_get_v1(keys, pool.indices([4, 5, 6])) == [False] * 3
    assert backend.batch_set([keys[0]], [pages[0][:-1]]) is False
    with pytest.raises(TypeError, match="value: 1 tensors are needed, and 0 were given"):
        backend.set(keys[0])


def test_indices_that_are_no_pages_fail_the_call(create, caplog):
    pool = filled(8)
    backend = create({"type": "example"}, pool)
    with caplog.at_level(logging.ERROR):
        assert backend.batch_set_v1(keys_of(2), torch.arange(7)) == [False, False]
        assert backend.batch_get_v1(keys_of(2), pool.indices([0])) == [False, False]
    assert "7 indices do not name whole pages of 4 tokens" in caplog.text
    assert "2 keys, but indices of 1 pages" in caplog.text


def test_a_slab_store_serves_its_pages_after_a_restart(create, tmp_path):
    tier = {"type": "slab", "root_dir": str(tmp_path), "capacity_bytes": "4MiB"}
    pool = filled(16)
    first = create(tier, pool)
    keys = keys_of(8)
    assert all(first.batch_set_v1(keys, pool.indices(range(8))))
    first.close()
    again = create(tier, pool)
    assert again.batch_exists(keys) == 8
    assert all(again.batch_get_v1(keys, pool.indices(range(8, 16))))
    assert all(torch.equal(pool.page(page), pool.page(page + 8)) for page in range(8))


OTHERS = {
    "layout": ({"layout": "page_first"}, {}, {}),
    "dtype": ({"dtype": torch.float16}, {}, {}),
    "page size": ({"page_size": 8}, {}, {}),
    "model": ({}, {"model_name": "org/other"}, {}),
    "TP rank": ({}, {"tp_rank": 1, "tp_size": 2}, {}),
    "TP size": ({}, {"tp_size": 2}, {}),
    "PP rank": ({}, {"pp_rank": 1, "pp_size": 2}, {}),
    "CP rank": ({}, {"attn_cp_rank": 1, "attn_cp_size": 2}, {}),
    "MLA": ({"is_mla": True}, {"is_mla_model": True}, {}),
    "fingerprint": ({}, {}, {"fingerprint": "other"}),
    "namespace": ({}, {}, {"namespace": "other"}),
}


@pytest.mark.parametrize("other", OTHERS)
def test_pages_of_another_kind_are_never_served(create, fs, other):
    shape, ranks, options = OTHERS[other]
    pool = filled(8)
    assert all(create(fs, pool).batch_set_v1(keys_of(2), pool.indices([0, 1])))
    differing = filled(8, **shape)
    backend = create({**fs, **options}, differing, **ranks)
    assert backend.batch_exists(keys_of(2)) == 0
    assert backend.batch_get_v1(keys_of(2), differing.indices([0, 1])) == [False, False]


def test_layouts_with_parts_of_equal_sizes_are_apart(create, fs):
    pool = filled(4, "page_first")
    assert all(create(fs, pool).batch_set_v1(keys_of(1), pool.indices([0])))
    assert create(fs, filled(4, "page_first_direct")).batch_exists(keys_of(1)) == 0
    assert create(fs, filled(4, "page_first")).batch_exists(keys_of(1)) == 1


def test_mla_ranks_share_pages_that_one_of_them_stores(create, fs):
    pools = [filled(8, is_mla=True) for _ in range(3)]
    ranks = [
        create(fs, pool, is_mla_model=True, tp_rank=rank, tp_size=3)
        for rank, pool in enumerate(pools)
    ]
    keys = keys_of(2)
    for rank in (2, 1):
        assert ranks[rank].batch_set_v1(keys, pools[rank].indices([0, 1])) == [True, True]
        assert ranks[rank].batch_set(keys, [pools[rank].page(0), pools[rank].page(1)])
        assert ranks[rank].batch_exists(keys) == 0
    assert all(ranks[0].batch_set_v1(keys, pools[0].indices([0, 1])))
    for rank in (1, 2):
        pools[rank].kv_buffer.zero_()
        assert ranks[rank].batch_get_v1(keys, pools[rank].indices([4, 5])) == [True, True]
        assert torch.equal(pools[rank].page(4), pools[0].page(0))


def test_every_rank_has_its_own_slab_store(create, tmp_path):
    tier = {"type": "slab", "root_dir": str(tmp_path), "capacity_bytes": "4MiB"}
    for dp_rank in (0, 1):
        for tp_rank in (0, 1):
            pool = filled(4)
            create(tier, pool, tp_rank=tp_rank, tp_size=2, dp_rank=dp_rank)
    assert len(list(tmp_path.iterdir())) == 4


def test_ranks_share_pages_exactly_where_sglangs_file_backend_does(sglang):
    ours, theirs = {}, {}
    for number, config in enumerate(sglang_protocol.every_rank(sglang)):
        shard = Shard.of(config)
        key = config.is_mla_model, shard.rank, *shard.sizes.items()
        ours.setdefault(key, set()).add(number)
        theirs.setdefault(sglang_protocol.file_suffix(config), set()).add(number)
        assert 0 <= shard.rank < shard.count
    assert sorted(map(sorted, ours.values())) == sorted(map(sorted, theirs.values()))


BAD = {
    "no tier": ({"tier": None}, {}, r"tier: missing; give a tier, such as"),
    "no object": ({"tier": "slab"}, {}, r"tier: 'slab' is not valid; it must be a tier"),
    "no type": ({"tier": {}}, {}, r"must include 'type'"),
    "a mistyped key": (
        {"tier": {"type": "example"}, "extra": {"stageing_bytes": 1}},
        {},
        r"unknown key 'stageing_bytes' \(did you mean 'staging_bytes'\?\)",
    ),
    "a mistyped tier": ({"tier": {"type": "slap"}}, {}, r"tier\[0\].*'slap'.*'slab'"),
    "a mistyped option": (
        {"tier": {"type": "fs", "root_dri": "/kv"}},
        {},
        r"tier\[0\].*unknown key 'root_dri' \(did you mean 'root_dir'\?\)",
    ),
    "a decided option": (
        {"tier": {"type": "example", "rank": 1}},
        {},
        r"tier\[0\]: rank: 1 is determined by SGLang; leave it out",
    ),
    "heterogeneous TP": (
        {"tier": {"type": "example"}},
        {"tp_lcm_size": 4},
        r"tp_lcm_size: 4 is not supported",
    ),
    "a tenant that is no label": (
        {"tier": {"type": "example"}, "extra": {"tenant": 1}},
        {},
        r"tenant: 1 is not valid",
    ),
    "a private tier for MLA": (
        {"tier": {"type": "example"}},
        {"is_mla_model": True, "tp_size": 2},
        r"tier\[0\]: type: 'example' is for one process, but 2 TP ranks",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_configuration_is_refused_before_anything_starts(create, case, started_threads):
    given, ranks, message = BAD[case]
    with pytest.raises(ConfigError, match=message):
        create(given["tier"], extra=given.get("extra"), **ranks)
    assert started_threads() == []


def test_an_error_of_the_configuration_is_what_sglang_expects():
    assert issubclass(ConfigError, ValueError)
    assert issubclass(UnknownNameError, ValueError)


class NoMeta(HostPool):
    get_page_buffer_meta = None


class Logical(HostPool):
    """As SGLang's `LogicalHostPool`, the anchor of models with several kinds of KV cache."""

    def get_page_buffer_meta(self, indices):
        return None


class OtherLayout(HostPool):
    def get_page_buffer_meta(self, indices):
        raise ValueError(f"Unsupported layout: {self.layout}")


class OnDevice(HostPool):
    device = "cuda"


POOLS = {
    NoMeta: r"host pool NoMeta: it has no get_page_buffer_meta",
    Logical: r"host pool Logical: it has no memory of its own",
    OtherLayout: r"--hicache-mem-layout layer_first: host pool OtherLayout does not return",
    OnDevice: r"host pool OnDevice: its memory is on cuda",
}


@pytest.mark.parametrize("kind", POOLS)
def test_an_unsupported_pool_is_refused_before_anything_starts(create, kind, started_threads):
    backend = create({"type": "example"})
    with pytest.raises(ConfigError, match=POOLS[kind]):
        backend.register_mem_pool_host(kind(4))
    assert started_threads() == []
    assert backend.batch_exists(keys_of(1)) == 0


def test_pages_larger_than_the_tier_are_refused_and_nothing_is_left(create, tmp_path):
    tier = {"type": "slab", "root_dir": str(tmp_path / "kv"), "capacity_bytes": 4096}
    backend = create(tier)
    backend.register_mem_pool_host(HostPool(4, page_size=64))
    with pytest.raises(ConfigError, match="capacity_bytes"):
        backend.on_host_pools_registered()
    assert not (tmp_path / "kv").exists()


def test_a_second_kind_of_pool_is_refused_before_anything_starts(create, started_threads):
    pool = filled(4)
    backend = create({"type": "example"})
    backend.register_mem_pool_host(pool)
    with pytest.raises(ConfigError, match="host pool 'mamba': models with several kinds"):
        backend.register_mem_host_pool_v2(pool, "mamba")
    assert started_threads() == []


def test_a_pool_that_comes_later_is_refused_and_everything_closed(create, threads_left):
    pool = filled(4)
    backend = create({"type": "example"}, pool)
    with pytest.raises(ConfigError, match="host pool 'mamba': models with several kinds"):
        backend.register_mem_host_pool_v2(pool, "mamba")
    assert threads_left() == []
    assert backend.batch_set_v1(keys_of(1), pool.indices([0])) == [False]


def test_a_second_pool_is_refused(create):
    pool = filled(4)
    backend = create({"type": "example"}, pool)
    with pytest.raises(StateError, match="registered already"):
        backend.register_mem_pool_host(pool)


def test_a_closed_backend_has_no_pages_and_leaves_nothing_running(create, threads_left):
    pool = filled(4)
    backend = create({"type": "example"}, pool)
    backend.close()
    backend.close()
    assert threads_left() == []
    assert backend.batch_exists(keys_of(1)) == 0
    assert backend.batch_get_v1(keys_of(1), pool.indices([0])) == [False]
    assert backend.batch_get(keys_of(1), [pool.page(0)]) == [None]


def test_the_status_of_a_rank_has_its_tiers(create, tmp_path):
    pool = filled(4)
    path = str(tmp_path / "status")
    backend = create({"type": "example"}, pool, extra={"status_socket": path}, tp_rank=1, tp_size=2)
    backend.batch_set_v1(keys_of(2), pool.indices([0, 1]))
    status = parse_report(ask(f"{path}-tp1"), path)
    assert status.model == "org/model"
    assert [tier.stored_blocks for tier in status.statistics.tiers] == [2]
    backend.close()
    assert not Path(f"{path}-tp1").exists()
    with pytest.raises(StateError, match="not open"):
        backend.stats()


def test_sglangs_metrics_have_pages_and_bandwidth_of_each_call(create, monkeypatch):
    module_name = "sglang.srt.observability.metrics_collector"
    metrics = ModuleType(module_name)
    lists = ("prefetch_pgs", "prefetch_bandwidth", "backup_pgs", "backup_bandwidth")
    metrics.StorageMetrics = lambda: SimpleNamespace(**{name: [] for name in lists})
    monkeypatch.setitem(sys.modules, module_name, metrics)
    pool = filled(8)
    assert create({"type": "example"}, pool).get_stats() is None
    backend = create({"type": "example"}, pool, enable_storage_metrics=True)
    backend.batch_set_v1(keys_of(3), pool.indices(range(3)))
    backend.batch_get_v1(keys_of(2, 2), pool.indices([4, 5]))  # the second is missing
    found = backend.get_stats()
    assert (found.backup_pgs, found.prefetch_pgs) == ([3], [1])
    assert all(rate > 0 for rate in found.backup_bandwidth + found.prefetch_bandwidth)
    assert backend.get_stats().backup_pgs == []


@pytest.mark.parametrize("kind", ["slab", "fs"])
def test_clearing_removes_all_pages_of_the_rank_and_no_others(create, tmp_path, kind):
    tier = {"type": kind, "root_dir": str(tmp_path), "capacity_bytes": "16MiB"}
    pool = filled(200)
    ranks = [create(tier, pool, tp_rank=rank, tp_size=2) for rank in (0, 1)]
    keys = keys_of(200)
    for backend in ranks:
        assert all(backend.batch_set_v1(keys, pool.indices(range(200))))
    ranks[0].clear()
    assert [backend.batch_exists(keys) for backend in ranks] == [0, 200]
    assert all(ranks[0].batch_set_v1(keys, pool.indices(range(200))))
    assert ranks[0].batch_exists(keys) == 200
    ranks[0].close()
    ranks[0].clear()  # closed: no effect


@pytest.mark.parametrize("kind", ["slab", "fs"])
def test_servers_of_different_tenants_share_a_folder_and_no_page(
    create, tmp_path, kind, monkeypatch
):
    monkeypatch.setattr(page_store, "_KEYS_AT_ONCE", 7)
    tier = {"type": kind, "root_dir": str(tmp_path), "capacity_bytes": "16MiB"}
    pool, keys = filled(20), keys_of(20)
    for tenant in ("a", "b", "default", None):
        backend = create(tier, pool, extra={} if tenant is None else {"tenant": tenant})
        assert backend.batch_exists(keys) == 0
        assert all(backend.batch_set_v1(keys, pool.indices(range(20))))
        assert backend.batch_exists(keys) == 20
        backend.close()
    backend = create(tier, pool, extra={"tenant": "a"})
    assert backend.batch_exists(keys) == 20
    backend.clear()
    assert backend.batch_exists(keys) == 0
    backend.close()
    for tenant in ("b", "default", None):
        backend = create(tier, pool, extra={} if tenant is None else {"tenant": tenant})
        assert backend.batch_exists(keys) == 20
        backend.close()


def test_pages_in_use_outlast_clearing_which_says_so(create, tmp_path):
    tier = {"type": "slab", "root_dir": str(tmp_path), "capacity_bytes": "4MiB"}
    pool = filled(4)
    backend = create({**tier, "io_timeout_s": 0.3}, pool)
    backend.batch_set_v1(keys_of(2), pool.indices([0, 1]))
    tiers = backend._store.tiers
    tiers.pin(tiers.list_keys(ListPosition(), 1)[0], 60.0)
    with pytest.raises(TierTimeoutError, match="not all pages were removed within"):
        backend.clear()
    assert sum(map(backend.exists, keys_of(2))) == 1


@pytest.mark.parametrize("kind", ["example", "fs"])
def test_clearing_is_refused_where_a_tier_cannot(create, tmp_path, kind):
    tier = {"type": kind} | ({"root_dir": str(tmp_path)} if kind == "fs" else {})
    with pytest.raises(NotImplementedError, match=f"type {kind} cannot.*another namespace"):
        create(tier, filled(4)).clear()


def test_the_registry_has_the_metrics_of_a_rank_until_it_is_closed(create):
    pool = filled(4)
    backend = create({"type": "example"}, pool, tp_rank=1, tp_size=2)
    backend.batch_set_v1(keys_of(2), pool.indices([0, 1]))
    sample = 'kvoffload_tier_stored_blocks_total{engine="sglang-tp1",tier="example"} 2.0'
    assert sample in generate_latest(REGISTRY).decode()
    backend.close()
    assert "sglang-tp1" not in generate_latest(REGISTRY).decode()


def test_in_multiprocess_mode_the_metrics_are_where_the_server_reads_them(tmp_path):
    """As SGLang's scheduler and its HTTP server: in two processes."""
    root = Path(__file__).parents[1]
    environment = os.environ | {
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(root), str(root.parent)]),
    }
    scheduler = [sys.executable, root / "integrations" / "sglang_metrics.py", "1"]
    subprocess.run(scheduler, env=environment, check=True)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))
    printed = generate_latest(registry).decode()
    labels = '{engine="sglang-tp1",tier="example"}'
    assert f"kvoffload_tier_stored_blocks_total{labels} 3.0" in printed
    assert f"kvoffload_tier_open{labels} 1.0" in printed


def test_the_slow_interface_is_warned_of(create, caplog):
    with caplog.at_level(logging.WARNING):
        create({"type": "example"}, interface_v1=None)
    assert 'add "interface_v1": 1' in caplog.text


def test_without_sglang_the_package_can_be_imported_and_says_what_it_lacks(monkeypatch):
    import kvoffload_async.integrations.sglang as integration

    monkeypatch.setitem(sys.modules, "sglang", None)
    assert "KVOffloadHiCache" in dir(integration)
    with pytest.raises(ImportError, match=r"KVOffloadHiCache needs SGLang >=0\.5\.23,<0\.5\.24"):
        _ = integration.KVOffloadHiCache
    with pytest.raises(AttributeError, match="no attribute 'HiCache'"):
        _ = integration.HiCache


def test_a_newer_sglang_with_the_same_signatures_is_admitted():
    with sglang_protocol.sglang("0.6.0"):
        assert sglang_protocol.backend_class().__name__ == "KVOffloadHiCache"
