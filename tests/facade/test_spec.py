"""From a configuration to a running manager, and what is unwound when that fails."""

import math
import sys

import numpy as np
import pytest
import torch
from facade.worlds import HIT, MISS, PENDING, k, ks
from scripted_tier import ScriptedTier

from kvoffload_async import (
    CPUOffloadingSpec,
    CPUPrimaryTierOffloadingManager,
    OffloadConfig,
    SecondaryTierFactory,
    TieringOffloadingManager,
    TieringOffloadingSpec,
)
from kvoffload_async.errors import ConfigError, OffloadError, StateError
from kvoffload_async.types import ReqContext

CONFIG = {"cpu_bytes_to_use": "64KiB", "block_bytes": 4096}
WITH_TIER = {**CONFIG, "secondary_tiers": [{"type": "example"}]}
DEADLINE_S = 60.0

opened, closed = [], []


class NotingTier(ScriptedTier):
    """Notes the order in which instances open and close."""

    def __init__(self, number, fails=False):
        super().__init__(open_error=ConfigError("fails: True") if fails else None)
        self.number = number

    async def open(self, env):
        opened.append(self.number)
        await super().open(env)

    async def close(self):
        closed.append(self.number)
        await super().close()


@pytest.fixture
def noting(monkeypatch):
    registry = SecondaryTierFactory._registry
    monkeypatch.setattr(registry, "_loaders", {**registry._loaders, "noting": lambda: NotingTier})
    opened.clear()
    closed.clear()


# -- checks before anything has started ---------------------------------------------------------


@pytest.mark.parametrize("spec", [CPUOffloadingSpec, TieringOffloadingSpec])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cpu_bytes_to_use": 4095}, "cpu_bytes_to_use: 4095 bytes hold no block; one takes 4096"),
        ({"eviction_policy": "lfu"}, "eviction_policy: 'lfu' is unknown"),
        ({"evict": 1}, "unknown key 'evict'"),
    ],
)
def test_an_unusable_config_is_refused_before_anything_starts(spec, change, message, threads_left):
    with pytest.raises(ConfigError, match=message):
        spec({**CONFIG, **change})
    assert not threads_left()


@pytest.mark.parametrize(
    ("tier", "message"),
    [
        ({}, "must include 'type'"),
        ({"type": "exmaple"}, "did you mean 'example'"),
        ({"type": "example", "custom": 1}, "unknown key 'custom'"),
        ({"type": "example", "io_timeout_s": "soon"}, "io_timeout_s: 'soon'"),
        ({"type": "T", "module_path": "no.such"}, r"secondary_tiers\[0\]: .*No module named"),
        ({"type": "T", "module_path": "json"}, r"secondary_tiers\[0\]: .* no attribute 'T'"),
    ],
)
def test_an_unusable_tier_is_refused_before_anything_starts(tier, message, threads_left):
    with pytest.raises(ConfigError, match=message):
        TieringOffloadingSpec({**CONFIG, "secondary_tiers": [tier]})
    assert not threads_left()


def test_tiers_do_not_go_with_the_cpu_spec():
    with pytest.raises(ConfigError, match="use TieringOffloadingSpec"):
        CPUOffloadingSpec(WITH_TIER)


def test_a_row_holds_a_cell_for_each_worker():
    spec = CPUOffloadingSpec({**CONFIG, "num_workers": 2})
    assert (spec.stride_bytes, spec.num_blocks) == (8192, 8)


def test_a_parsed_config_is_taken_as_it_is():
    assert CPUOffloadingSpec(OffloadConfig.parse(CONFIG)).num_blocks == 16


# -- running ------------------------------------------------------------------------------------


def test_the_cpu_spec_gives_a_manager_with_memory():
    manager = CPUOffloadingSpec(CONFIG).get_manager()
    assert isinstance(manager, CPUPrimaryTierOffloadingManager)
    assert manager.get_primary_kv_view().shape == (16, 4096)
    manager.shutdown()


def test_a_block_comes_back_from_a_tier_with_its_bytes(threads_left):
    with TieringOffloadingSpec({**WITH_TIER, "check_invariants": True}) as spec:
        manager = spec.get_manager()
        assert isinstance(manager, TieringOffloadingManager)
        assert spec.get_manager() is manager
        view = manager.get_primary_kv_view()
        ctx = ReqContext("r")
        manager.on_new_request(ctx)
        (slot,) = manager.prepare_store(ks(1), ctx).store_spec.block_ids.tolist()
        np.asarray(view)[slot] = 0x5A
        manager.complete_store(ks(1), ctx)
        manager.reset_cache()
        manager.on_reset_flushed()
        np.asarray(view)[:] = 0
        assert manager.lookup(k(1), ctx) is PENDING
        manager.on_schedule_end()
        assert manager.wait_for_progress(DEADLINE_S)
        assert manager.lookup(k(1), ctx) is HIT
        (slot,) = manager.prepare_load(ks(1), ctx).block_ids.tolist()
        assert bytes(view[slot, i] for i in (0, 4095)) == b"\x5a\x5a"
        manager.complete_load(ks(1), ctx)
        del view
    assert not threads_left()


def test_the_tiers_of_a_spec_share_one_loop_thread(noting, started_threads):
    config = {**CONFIG, "secondary_tiers": [{"type": "noting", "number": n} for n in range(3)]}
    with TieringOffloadingSpec(config) as spec:
        spec.get_manager()
        assert sum(name.startswith("kvoffload-loop") for name in started_threads()) == 1
    assert opened == closed == [0, 1, 2]


def test_a_tier_that_fails_to_open_unwinds_the_others_in_reverse(noting, threads_left):
    tiers = [{"type": "noting", "number": n, "fails": n == 2} for n in range(4)]
    spec = TieringOffloadingSpec({**CONFIG, "secondary_tiers": tiers})
    with pytest.raises(ConfigError, match="fails: True"):
        spec.get_manager()
    assert opened == [0, 1, 2]
    assert closed == [2, 1, 0]
    assert not threads_left()
    spec.shutdown()


def test_a_failing_first_tier_leaves_nothing_behind(noting, threads_left):
    spec = TieringOffloadingSpec(
        {**CONFIG, "secondary_tiers": [{"type": "noting", "number": 0, "fails": True}]}
    )
    for _ in range(2):
        with pytest.raises(ConfigError):
            spec.get_manager()
        assert not threads_left()


def test_a_tier_that_fails_to_open_gives_the_primarys_memory_back(noting):
    class Spec(TieringOffloadingSpec):
        def _create_buffer(self):
            self.buffer = super()._create_buffer()
            return self.buffer

    spec = Spec({**CONFIG, "secondary_tiers": [{"type": "noting", "number": 0, "fails": True}]})
    with pytest.raises(ConfigError, match="fails: True"):
        spec.get_manager()
    with pytest.raises(ValueError, match="released"):
        spec.buffer.view[0, 0]


@pytest.mark.parametrize("spec", [CPUOffloadingSpec, TieringOffloadingSpec])
def test_tensors_whose_chunks_are_larger_than_a_block_are_refused(spec):
    caches = {"layer": torch.zeros(4, 4097, dtype=torch.uint8)}
    with pytest.raises(ConfigError, match=r"block_bytes: 4096 bytes do not hold .* takes 4097"):
        spec(CONFIG).transport_maker(caches)
    spec(CONFIG).transport_maker({"layer": torch.zeros(4, 4096, dtype=torch.uint8)})


def test_a_failing_close_is_raised_after_everything_else_has_been_closed(monkeypatch, threads_left):
    registry = SecondaryTierFactory._registry
    broken = lambda: type("Broken", (ScriptedTier,), {"__init__": _broken_init})  # noqa: E731
    monkeypatch.setattr(registry, "_loaders", {**registry._loaders, "broken": broken})
    spec = TieringOffloadingSpec({**CONFIG, "secondary_tiers": [{"type": "broken"}]})
    manager = spec.get_manager()
    with pytest.raises(OffloadError, match="umount"):
        spec.shutdown()
    assert not threads_left()
    manager.secondary_tiers[0].link._view.release()


def test_a_spec_that_was_never_used_starts_and_stops_nothing(threads_left):
    with TieringOffloadingSpec(WITH_TIER):
        assert not threads_left()


def test_shutdown_is_idempotent(threads_left):
    spec = TieringOffloadingSpec(WITH_TIER)
    spec.get_manager()
    spec.shutdown(DEADLINE_S)
    spec.shutdown(DEADLINE_S)
    assert not threads_left()


def test_a_spec_without_tiers_is_a_primary_with_the_same_surface():
    with TieringOffloadingSpec(CONFIG) as spec:
        manager = spec.get_manager()
        ctx = ReqContext("r")
        manager.on_new_request(ctx)
        assert manager.lookup(k(1), ctx) is MISS
        manager.on_schedule_end()


def _broken_init(self):
    ScriptedTier.__init__(self, close_error=OSError("umount"))


@pytest.mark.parametrize("timeout", [1e10, sys.float_info.max])
def test_a_timeout_of_any_length_is_a_time(timeout):
    with TieringOffloadingSpec(WITH_TIER) as spec:
        (tier,) = spec.get_manager().secondary_tiers
        assert tier.drain_jobs(timeout)
        tier.shutdown(timeout)
        spec.shutdown(timeout)


@pytest.mark.parametrize("timeout", [math.nan, -1, math.inf, "1"])
def test_a_timeout_that_is_no_time_is_an_error_and_closes_nothing(timeout):
    with TieringOffloadingSpec(WITH_TIER) as spec:
        manager = spec.get_manager()
        (tier,) = manager.secondary_tiers
        for wait in (
            *(spec.shutdown, manager.shutdown, manager.wait_for_progress),
            *(tier.shutdown, tier.drain_jobs),
        ):
            with pytest.raises(StateError, match=r"timeout.*: .* is not valid; give seconds"):
                wait(timeout)
        manager.on_new_request(ReqContext("r"))
        assert tier.drain_jobs(0)
