"""Hints of requests that come through the connector."""

from connector.worlds import Desk, Request, keys

from kvoffload_async.hints import ACTION_TYPE, ACTION_VERSION, HINTS_KEY, LOAD_TIERS_KEY


def stored(desk):
    return {key for key, _, _ in desk.primary.resident()}


def test_only_the_first_tokens_of_a_request_are_stored_and_it_runs_on():
    desk = Desk()
    request = Request("r", "abcd", kv_transfer_params={HINTS_KEY: {"max_offload_tokens": 8}})
    meta = desk.prefill(request, [1, 2, 3, 4, 5])
    assert stored(desk) == set(keys("ab"))
    desk.report(*meta.store_jobs)
    desk.end(request)
    assert not desk.step().store_jobs
    assert desk.primary.counters.withheld_blocks == 2
    assert desk.connector.counters.stores_refused == desk.connector.counters.lost_blocks == 0


def test_nothing_is_stored_if_each_step_computes_one_chunk():
    desk = Desk()
    request = Request("r", "ab", kv_transfer_params={HINTS_KEY: {"max_offload_tokens": 0}})
    desk.ask(request)
    desk.allocate(request, [1, 2])
    for _ in range(2):
        assert not desk.step({request: 4}).store_jobs
    assert (stored(desk), desk.primary.counters.withheld_blocks) == (set(), 2)


def test_an_envelope_of_hints_that_a_request_has_is_read():
    desk = Desk()
    request = Request("r", "ab")
    action = {
        "action_type": ACTION_TYPE,
        "action_version": ACTION_VERSION,
        "payload": {"retain_s": 60},
    }
    request.kv_hints = {"actions": [action]}
    meta = desk.prefill(request, [1, 2, 3])
    desk.report(*meta.store_jobs)
    desk.end(request)
    desk.step()
    assert desk.primary.hinted_blocks == 2


def test_a_request_names_the_tiers_to_load_from():
    desk = Desk()
    request = Request("r", "ab", kv_transfer_params={LOAD_TIERS_KEY: []})
    desk.ask(request)
    assert desk.table["r"].ctx.load_tier_filter == frozenset()
