"""Blocks in use do not expire, and their renewals are few and bounded."""

import pytest
from remote.fake_store import FakeClient, LibraryError, World

from kvoffload_async.errors import TierUnavailableError
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.remote import existence
from kvoffload_async.tiers.remote import tier as renewal_module
from kvoffload_async.tiers.remote.client import RefusedError

K = [key_of(number) for number in range(40)]
TTL_S = 160.0


def touch(world, keys):
    world.runner.call_soon(world.tier.touch, keys)
    world.runner.advance(0.0)


def test_uses_are_renewed_in_one_batch():
    with World(ttl_s=TTL_S) as world:
        for key in K[:20]:
            touch(world, [key])
        world.runner.advance(TTL_S / 16)
        assert world.client.renewed == K[:20]
        assert world.client.calls["renew"] == 1
        assert world.gauge("renewed") == 20


def test_a_block_is_renewed_once_a_quarter_of_its_lifetime():
    with World(ttl_s=TTL_S) as world:
        world.store(K[:1])
        for _ in range(64):
            touch(world, K[:1])
            world.runner.advance(TTL_S / 64)
        assert 3 <= len(world.client.renewed) <= 4


def test_a_load_is_a_use():
    with World(FakeClient(portion=2), ttl_s=TTL_S) as world:
        world.store(K[:2])
        world.runner.advance(TTL_S / 2)
        world.load(K[:3])
        world.runner.advance(TTL_S / 2)
        assert world.client.renewed == K[:2]


def test_nothing_is_renewed_that_does_not_expire():
    with World() as world:
        world.store(K[:2])
        touch(world, K[:2])
        world.load(K[:2])
        world.runner.advance(1e6)
        assert world.client.calls["renew"] == 0


def test_renewals_that_fail_are_counted_and_tried_at_the_next_use(caplog):
    with World(ttl_s=TTL_S, max_retries=0) as world:
        world.client.failures = [LibraryError()]
        touch(world, K[:2])
        world.runner.advance(TTL_S / 16)
        assert world.gauge("dropped_renewals") == 2
        assert "2 blocks were not renewed" in caplog.text
        touch(world, K[:2])
        world.runner.advance(TTL_S / 16)
        assert world.client.renewed == K[:2]


@pytest.mark.parametrize("request_s", [0.03, 0.05])
def test_a_thousand_objects_behind_a_slow_network_are_all_renewed_and_counted_on_the_way(request_s):
    keys = [key_of(number) for number in range(1000)]
    with World(FakeClient(answers_many=False), ttl_s=TTL_S, call_timeout_s=5.0) as world:
        world.client.renewal_s = 3 * request_s
        touch(world, keys)
        world.runner.advance(TTL_S / 16 + 5.0)
        on_the_way = world.gauge("renewed")
        assert 100 < on_the_way < 1000
        world.runner.advance(20.0)
        assert world.gauge("renewed") == 1000
        assert sorted(world.client.renewed) == sorted(keys)
        assert world.gauge("dropped_renewals") == world.gauge("timeouts") == 0


def test_an_object_that_cannot_be_renewed_costs_no_other():
    with World(FakeClient(answers_many=False), ttl_s=TTL_S, max_retries=0) as world:
        world.client.failures = [None, LibraryError(), None, LibraryError()]
        touch(world, K)
        world.runner.advance(TTL_S / 16)
        assert world.gauge("renewed") == len(world.client.renewed) == len(K) - 2
        assert world.gauge("dropped_renewals") == 2


@pytest.mark.parametrize("kind", [TierUnavailableError, RefusedError])
def test_a_server_that_renews_nothing_is_not_asked_for_all_and_warned_of_once(kind, caplog):
    with World(FakeClient(answers_many=False), ttl_s=TTL_S, max_retries=0) as world:
        for _ in range(3):
            world.client.failures = [LibraryError(kind)] * 1000
            touch(world, K)
            world.runner.advance(TTL_S / 16)
        assert world.client.calls["renew"] < 3 * 16
        assert world.gauge("dropped_renewals") == 3 * len(K)
        assert caplog.text.count("were not renewed") == 1


def test_what_waits_is_bounded_and_batches_are(monkeypatch):
    monkeypatch.setattr(renewal_module, "_MOST_WAITING", 10)
    monkeypatch.setattr(renewal_module, "_BLOCKS_A_CALL", 4)
    monkeypatch.setattr(existence, "MOST_KEYS", 5)
    with World(ttl_s=TTL_S) as world:
        touch(world, K[:12])
        world.runner.advance(TTL_S / 16)
        assert world.client.renewed == K[:10]
        assert world.client.calls["renew"] == 3
        assert world.gauge("dropped_renewals") == 2
        touch(world, K[:10])
        world.runner.advance(TTL_S / 16)
        assert world.client.renewed[10:] == K[:5], "only the last five are remembered as fresh"


def test_closing_ends_a_renewal_that_hangs():
    with World(ttl_s=TTL_S) as world:
        world.client.is_stalled = True
        touch(world, K[:2])
        world.runner.advance(TTL_S / 16)
        touch(world, K[2:4])
    assert world.client.is_closed


def test_a_use_before_the_opening_is_nothing():
    world = World(ttl_s=TTL_S)
    world.tier.touch(K)
    world.runner.close()


def test_renewals_under_way_when_the_tier_closes_are_counted_as_dropped():
    with World(FakeClient(answers_many=False), ttl_s=TTL_S) as world:
        world.client.renewal_s = 100.0
        touch(world, K[:20])
        world.runner.advance(TTL_S / 16)
        assert world.client.calls["renew"] == 8
        world.run(world.tier.close())
        assert world.gauge("renewed") + world.gauge("dropped_renewals") == 20


@pytest.mark.parametrize("steps", range(6))
def test_a_use_while_the_last_renewal_ends_is_renewed_too(steps):
    with World(FakeClient(answers_many=False), ttl_s=TTL_S) as world:
        renew, loop = world.client.renew, world.runner.loop

        def use_after(steps):
            if steps:
                loop.call_soon(use_after, steps - 1)
            else:
                world.tier.touch(K[1:2])

        async def renew_and_use(keys):
            await renew(keys)
            if keys == (K[0],):
                use_after(steps)

        world.client.renew = renew_and_use
        touch(world, K[:1])
        world.runner.advance(TTL_S / 4 - 1)
        assert world.client.renewed == K[:2]
