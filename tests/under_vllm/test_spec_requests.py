"""What requests may ask of `KVOffloadSpec`'s manager."""

import pytest
from engine_world import EXAMPLE
from vllm.v1.kv_offload import base
from vllm_world import keys_of

from kvoffload_async.errors import ConfigError


def test_a_request_may_shut_tiers_out(pair):
    here = pair(EXAMPLE)
    here.fill(1)
    here.store(keys_of(0), [[3]])
    here.finish_jobs()
    here.manager.reset_cache()
    here.manager.on_reset_flushed()
    none = here.request(load_tier_filter=base.TierFilter(()))
    storage = here.request(
        load_tier_filter=base.TierFilter((base.TierMatcher(base.Medium.STORAGE, None),))
    )
    assert here.lookups(keys_of(0), none) == ["MISS"]
    assert here.lookups(keys_of(0), storage) == ["MISS"]
    assert here.lookups(keys_of(0)) != ["MISS"]


def test_eviction_follows_the_positions_that_vllm_gives(pair):
    here = pair(slots=4)
    here.fill(1)
    request = here.request()
    keys = keys_of(3, 2, 1, 0)  # offered tail first
    for position, key in enumerate(reversed(keys)):
        request.set_offload_key_position(key, 16 * (position + 1))
    here.store(keys, [[1, 2, 3, 4]], request)
    here.manager.on_request_finished(request)
    output = here.store(keys_of(9), [[5]])
    assert output.evicted_keys == keys_of(3)


@pytest.mark.parametrize("groups", [((0, 1),), ((0,), (1,))])
def test_a_connector_that_does_not_offer_the_rest_again_gets_a_whole_store_or_none(pair, groups):
    here = pair(slots=2, groups=groups)
    assert here.manager.prepare_store(keys_of(0, 1, 2), here.request()) is None
    assert here.lookups(keys_of(0, 1, 2)) == ["MISS"] * 3
    assert "vllm:kvoffload_async_lost_tails" not in here.manager.get_stats().reduce()


def test_accept_prefix_is_no_option(pair):
    with pytest.raises(ConfigError, match="accept_prefix"):
        pair(extra={"accept_prefix": True})
