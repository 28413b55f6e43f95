"""What requests may ask of `KVOffloadSpec`'s manager."""

import logging
from types import SimpleNamespace

import pytest
from engine_world import EXAMPLE
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import _create_req_context
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload import base
from vllm_world import keys_of

from kvoffload_async.errors import ConfigError
from kvoffload_async.hints import (
    ACTION_TYPE,
    ACTION_VERSION,
    HINTS_KEY,
    LOAD_TIERS_KEY,
    read_hints,
)
from kvoffload_async.integrations.vllm import convert
from kvoffload_async.statistics import HINT_RESULTS
from kvoffload_async.types import ReqContext


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


PARAMETERS = {HINTS_KEY: {"max_offload_tokens": 32, "retain_s": 60}}
ENVELOPE = KvHintsEnvelope(
    protocol_version="1",
    message_id="m",
    actions=[
        KvHintAction("1", "kvcr.pin", "1", {}),
        KvHintAction("2", ACTION_TYPE, ACTION_VERSION, PARAMETERS[HINTS_KEY]),
    ],
)


@pytest.mark.parametrize(
    "context", [{"kv_transfer_params": PARAMETERS}, {"kv_hints": ENVELOPE}], ids=["params", "hints"]
)
def test_the_hints_of_a_request_are_obeyed(pair, context):
    here = pair(EXAMPLE)
    request = here.request(**context)
    keys = keys_of(0, 1, 2)
    for position, key in enumerate(keys, 1):
        request.set_offload_key_position(key, 16 * position)
    output = here.manager.prepare_store(keys, request)
    assert output.keys_to_store == keys[:2]
    here.manager.complete_store(keys[:2], request)
    here.manager.on_request_finished(request)
    primary = here.manager.manager.stats().primary
    assert (primary.withheld_blocks, primary.hinted_blocks) == (1, 2)
    assert primary.hints["applied"] == 2
    counted = here.manager.get_stats().reduce()
    assert counted["vllm:kvoffload_async_withheld_blocks"] == 1
    assert counted["vllm:kvoffload_async_applied_hints"] == 2


def test_vllms_scheduler_passes_the_hints_of_a_request_on():
    request = SimpleNamespace(
        request_id="r",
        kv_transfer_params={**PARAMETERS, LOAD_TIERS_KEY: [{"medium": "CPU"}]},
        kv_hints=ENVELOPE,
    )
    context = convert.request_of(_create_req_context(request))
    assert (context.kv_transfer_params, context.kv_hints) == (request.kv_transfer_params, ENVELOPE)
    given, ctx = context.load_tier_filter, ReqContext("r", request.kv_transfer_params)
    read_hints(ctx, dict.fromkeys(HINT_RESULTS, 0))
    assert given == ctx.load_tier_filter, "both read the filter alike"


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


def test_a_reset_says_in_vllms_log_what_keeps_its_blocks(pair, caplog):
    here = pair(EXAMPLE)
    with caplog.at_level("INFO"):
        logging.getLogger("vllm").addHandler(caplog.handler)
        try:
            here.manager.reset_cache()
        finally:
            logging.getLogger("vllm").removeHandler(caplog.handler)
    assert any("tiers that keep their blocks: example" in line for line in caplog.messages)
