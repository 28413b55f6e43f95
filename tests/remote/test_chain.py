"""A slab before a remote tier: who is asked for what, and where blocks go."""

import itertools

import pytest

from kvoffload_async import ConfigError, TieringOffloadingSpec
from kvoffload_async.testing.harness import key_of
from kvoffload_async.types import LookupResult, ReqContext

pytest.importorskip("obstore", reason="needs the extra object")

HIT, MISS = LookupResult.HIT, LookupResult.MISS
BLOCK_BYTES = 4096
DEADLINE_S = 60.0
KEYS = [key_of(number) for number in range(40)]


class Host:
    """One engine with a slab of its own, before a bucket that all hosts share."""

    def __init__(self, root, name, **far):
        (root / "bucket").mkdir(exist_ok=True)
        near = {"type": "slab", "root_dir": str(root / name), "capacity_bytes": "2MiB"}
        bucket = {"type": "object", "url": f"file://{root / 'bucket'}", "negative_cache_ttl_s": 0}
        tiers = [near | {"segment_bytes": "256KiB"}, bucket | far]
        self.spec = TieringOffloadingSpec(
            {
                "cpu_bytes_to_use": 64 * BLOCK_BYTES,
                "block_bytes": BLOCK_BYTES,
                "model": "test",
                "check_invariants": True,
                "secondary_tiers": tiers,
            }
        )
        self.manager = self.spec.get_manager()
        self.near, self.far = self.manager.secondary_tiers
        self._ids = itertools.count()

    def request(self, keys):
        ctx = ReqContext(f"r{next(self._ids)}", key_positions={k: i for i, k in enumerate(keys)})
        self.manager.on_new_request(ctx)
        return ctx

    def store(self, keys):
        ctx = self.request(keys)
        granted = self.manager.prepare_store(keys, ctx)
        self.manager.complete_store(granted.keys_to_store, ctx)
        self.manager.on_request_finished(ctx)
        self.finish_jobs()

    def find(self, keys):
        """Look up as a scheduler does, until the answer is final; return how many were found."""
        ctx = self.request(keys)
        while True:
            answers = [self.manager.lookup(key, ctx) for key in keys]
            if set(answers) <= {HIT, MISS}:
                break
            self.manager.on_schedule_end()
            self.manager.wait_for_progress(DEADLINE_S)
        self.manager.on_request_finished(ctx)
        self.finish_jobs()
        return answers.count(HIT)

    def finish_jobs(self):
        self.manager.on_schedule_end()
        while self.manager.has_pending_work():
            assert self.manager.wait_for_progress(DEADLINE_S)
            self.manager.on_schedule_end()

    def empty_the_primary(self):
        self.manager.reset_cache()
        self.manager.on_reset_flushed()
        self.finish_jobs()

    def questions(self):
        """Return how many requests of any kind the far tier has made."""
        return self.far.tier.gauges()["requests"]


@pytest.fixture
def host(tmp_path):
    made = []

    def make(name="a", **far):
        made.append(Host(tmp_path, name, **far))
        return made[-1]

    yield make
    for one in made:
        one.spec.shutdown()


def test_what_is_stored_goes_to_both(host):
    one = host()
    one.store(KEYS[:8])
    stored = [tier.tier_state.counters.stored_blocks for tier in (one.near, one.far)]
    assert stored == [8, 8]


def test_what_the_slab_has_costs_the_far_tier_no_request(host):
    one = host()
    one.store(KEYS[:8])
    one.empty_the_primary()
    before = one.questions()
    assert one.find(KEYS[:8]) == 8
    assert one.questions() == before


def test_only_the_rest_is_asked_of_the_far_tier(host):
    host("b").store(KEYS[:12])
    one = host()
    one.store(KEYS[:8])
    one.empty_the_primary()
    loads = one.far.tier_state.counters.loaded_blocks
    assert one.find(KEYS[:12]) == 12
    assert one.far.tier.gauges()["probed_keys"] <= 8 + 4  # the stores', and the rest
    assert one.far.tier_state.counters.loaded_blocks == loads + 4
    assert one.near.tier_state.counters.loaded_blocks == 8


def test_what_the_far_tier_alone_had_is_offered_to_the_slab(host):
    host("b").store(KEYS[:8])
    one = host()
    assert one.find(KEYS[:8]) == 8
    assert one.near.tier_state.counters.stored_blocks == 8
    one.empty_the_primary()
    before = one.questions()
    assert one.find(KEYS[:8]) == 8
    assert one.questions() == before


def test_a_prefix_that_is_nowhere_costs_few_requests(host):
    one = host()
    before = one.questions()
    assert one.find(KEYS) == 0
    assert one.questions() - before <= 8


def test_a_far_tier_is_asked_only_where_enough_is_missed(host):
    host("b").store(KEYS[:12])
    one = host(min_blocks=8)
    before = one.questions()
    assert one.find(KEYS[:7]) == 0
    assert one.questions() == before
    assert one.find(KEYS[:12]) == 12


def test_a_driver_that_waits_for_progress_is_told_of_what_a_step_has_decided(host):
    one = host(min_blocks=8)
    ctx = one.request(KEYS[:1])
    assert one.manager.lookup(KEYS[0], ctx) is LookupResult.RETRY
    one.manager.on_schedule_end()
    assert one.manager.wait_for_progress(DEADLINE_S)
    assert one.manager.lookup(KEYS[0], ctx) is MISS
    one.manager.on_request_finished(ctx)
    one.manager.on_schedule_end()
    assert not one.manager.wait_for_progress(0.0)


def test_what_is_missed_counts_without_what_the_slab_has(host):
    host("b").store(KEYS[:12])
    one = host(min_blocks=8)
    one.store(KEYS[:8])
    one.empty_the_primary()
    before = one.questions()
    assert one.find(KEYS[:12]) == 8
    assert one.questions() == before


@pytest.mark.parametrize("value", [0, 1.5, "8", True, None])
def test_a_number_of_blocks_that_is_none_is_refused(host, value):
    with pytest.raises(ConfigError, match="min_blocks"):
        host(min_blocks=value)


def test_a_far_tier_is_not_asked_for_what_is_computed_sooner_once_that_is_known(host):
    host("b").store(KEYS[:24])
    one = host(prefill_blocks_per_s=1e9)
    assert one.find(KEYS[:8]) == 8, "nothing was measured yet"
    before = one.questions()
    assert one.find(KEYS[12:24]) == 0
    assert one.questions() == before
    stats = one.manager.stats().tiers[1]
    assert stats.skipped_lookups["too_few"] > 0
    assert stats.break_even.latency_s > 0
