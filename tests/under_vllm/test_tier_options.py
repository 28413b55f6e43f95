"""What a user may write into a tier's JSON, what it says of itself, and what it announces."""

import errno
import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadPromMetrics
from vllm.v1.kv_offload.base import Locality, Medium
from vllm.v1.kv_offload.tiering.backpressure import EMABackpressureDetector
from vllm_world import keys_of

from kvoffload_async.errors import ConfigError, UnknownNameError
from kvoffload_async.integrations.vllm.tiers import CONFIG_INFO_KEYS, FAILED_JOBS


def test_every_option_of_vllms_tier_is_taken(serving, fs, theirs):
    vllms = {"n_read_threads": 3, "n_write_threads": 2, "enable_kv_events": True}
    theirs = {**theirs, **vllms, "locality": "REMOTE"}
    ours = {**theirs, "type": fs["type"], "module_path": fs["module_path"]}
    world = serving(ours, events=True)
    assert world.tier.tier_type == "FsTier"
    assert world.tier.locality is serving(theirs, events=True).tier.locality is Locality.REMOTE


def test_our_own_options_go_beside_vllms(serving, fs):
    world = serving({**fs, "capacity_bytes": "64 KiB", "verify": "when_present", "fsync": True})
    for first in range(0, 24, 4):
        world.store(keys_of(*range(first, first + 4)))
        world.finish_jobs()
    assert 0 < len(list(Path(fs["root_dir"]).rglob("*.bin"))) <= 64 // 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_read_thread": 2}, "unknown key 'n_read_thread'.*did you mean 'n_read_threads'"),
        ({"model": "mine"}, "unknown key 'model'"),
        ({"run_config": {}}, "unknown key 'run_config'"),
        ({"ops": None}, "unknown key 'ops'"),
        ({"backpressure_cls": "ema"}, "unknown key 'backpressure_cls'"),
        ({"n_read_threads": "two"}, "n_read_threads: 'two'"),
        ({"io_timeout_s": 0}, "io_timeout_s: 0 "),
        ({"io_timeout_s": "soon"}, "io_timeout_s: 'soon'"),
        ({"enable_kv_events": "yes"}, "enable_kv_events: 'yes'"),
        ({"locality": "near"}, "locality: 'near' is unknown; allowed: LOCAL, REMOTE"),
        ({"locality": "local"}, "locality: 'local' is unknown.*; allowed: LOCAL, REMOTE"),
        ({"locality": ""}, "locality: '' is unknown; allowed: LOCAL, REMOTE"),
        ({"locality": 3}, "locality: 3 is unknown; allowed: LOCAL, REMOTE"),
        ({"root_dir": 5}, "root_dir: 5 "),
        ({"root_dir": ""}, "root_dir: '' "),
        ({"root_dir": None}, "root_dir: None "),
        ({"verify": "maybe"}, "verify: 'maybe' is unknown"),
        ({"namespace": ""}, "namespace: ''"),
        ({"namespace": 5}, "namespace: 5"),
        ({"fingerprint": "x" * 201}, "fingerprint: 'x*' is not valid.* 1 to 200 printable"),
        ({"trust_vllm_directory": "yes"}, "trust_vllm_directory: 'yes'"),
        ({"trust_vllm_directory": True}, "fingerprint: 'made up' conflicts with trust_vllm"),
    ],
)
def test_a_bad_option_is_refused_by_name_before_anything_starts(serving, fs, options, message):
    with pytest.raises(ConfigError, match=message):
        serving({**fs, **options}, events=True)
    assert not list(Path(fs["root_dir"]).iterdir())


def test_an_unknown_key_is_told_from_a_bad_value(serving, fs):
    with pytest.raises(UnknownNameError, match=r"'FsTier': unknown key 'size'.*root_dir"):
        serving({**fs, "size": 1})


def test_a_missing_directory_is_asked_for(serving, fs):
    del fs["root_dir"]
    with pytest.raises(ConfigError, match="root_dir"):
        serving(fs)


def test_a_bounded_tier_asks_for_its_bound(serving, slab):
    del slab["capacity_bytes"]
    with pytest.raises(ConfigError, match="capacity_bytes: missing"):
        serving(slab)
    assert not list(Path(slab["root_dir"]).iterdir())


def test_a_model_name_that_the_two_would_shorten_differently_is_refused(serving, trusting):
    with pytest.raises(ConfigError, match="model name this long"):
        serving(trusting, model="m" * 220)


def test_vllms_back_pressure_goes_with_our_tier(serving, fs):
    settings = {"backpressure_cls": "EMABackpressureDetector"}
    world = serving({**fs, "backpressure": settings})
    assert isinstance(world.tier.bp_detector, EMABackpressureDetector)
    world.store(keys_of(1))
    world.finish_jobs()


def test_locality_is_unknown_where_nobody_says(serving, fs):
    assert serving(fs).tier.locality is None


# -- events -------------------------------------------------------------------------------------


@pytest.mark.parametrize("locality", [None, "LOCAL", "REMOTE"])
def test_stored_blocks_are_announced_with_the_configured_locality(serving, fs, locality):
    world = serving({**fs, "enable_kv_events": True, "locality": locality}, events=True)
    keys = keys_of(1, 2)
    world.store(keys)
    world.finish_jobs()
    (event,) = (e for e in world.on(world.manager.take_events) if e.medium is Medium.STORAGE)
    assert (event.keys, event.removed, event.locality) == (keys, False, world.tier.locality)
    assert list(world.tier.take_events()) == []


def test_blocks_that_a_capacity_evicts_are_announced_as_removed(serving, fs):
    world = serving(
        {**fs, "enable_kv_events": True, "capacity_bytes": "64 KiB"}, events=True, slots=4
    )
    for number in range(12):
        world.store(keys_of(number))
        world.finish_jobs()
    present = set()
    for event in world.tier.take_events():
        (present.difference_update if event.removed else present.update)(event.keys)
    on_disk = {path.stem for path in Path(fs["root_dir"]).rglob("*.bin")}
    assert {f"{key[:-4].hex()}_g0" for key in present} == on_disk


def test_events_need_vllms_own_switch(serving, fs, caplog):
    with caplog.at_level(logging.WARNING, "kvoffload_async"):
        world = serving({**fs, "enable_kv_events": True})
    assert "enable_kv_cache_events" in caplog.text
    world.store(keys_of(1))
    world.finish_jobs()
    assert list(world.tier.take_events()) == []


# -- what people see ----------------------------------------------------------------------------


def prometheus(*tiers):
    """Return vLLM's Prometheus metrics of an engine with these tiers, and their registry."""
    registry = CollectorRegistry()
    extra_config = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": list(tiers)}
    transfer = SimpleNamespace(kv_connector_extra_config=extra_config)
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config = SimpleNamespace(kv_transfer_config=transfer)
    return OffloadPromMetrics(config, kinds, ["engine"], {0: ["0"]}), registry


def test_failures_reach_prometheus_by_cause_and_each_once(serving, ops, faulty, fs):
    world = serving(faulty)
    ops.fail(errno.ENOSPC, on="pwritev")
    world.store(keys_of(1))
    world.finish_jobs()
    metrics, registry = prometheus(faulty, fs)
    metrics.observe(world.on(world.manager.get_stats).data)
    assert world.tier.get_stats() is None
    labels = {"engine": "0", "tier": "FaultyFsTier", "error": "TierFullError"}
    assert registry.get_sample_value(f"{FAILED_JOBS}_total", labels) == 1


def test_without_failures_nothing_is_counted(serving, fs):
    world = serving(fs)
    world.store(keys_of(1))
    world.reset()
    assert world.holds(keys_of(1))
    assert world.tier.get_stats() is None


def test_a_tier_says_what_and_where_it_is(serving, fs):
    tier = serving(fs).tier
    info = tier.config_info()
    assert tuple(info) == tier.config_info_keys(fs) == CONFIG_INFO_KEYS
    assert info["kvoffload_async_tier"] == "fs"
    assert fs["root_dir"] in info["kvoffload_async_location"]
