"""What every remote tier does with jobs, over a store in memory and in virtual time."""

import asyncio
import logging

import pytest
from remote.fake_store import SLOT_BYTES, FakeClient, LibraryError, World

from kvoffload_async.errors import (
    BlockMissingError,
    CallTimeoutError,
    ConfigError,
    CorruptBlockError,
    ServerHangError,
    SlowDownError,
    TierClosedError,
    TierFullError,
    TierTimeoutError,
    TierUnavailableError,
)
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.remote.client import RefusedError
from kvoffload_async.tiers.remote.settings import Redactor

K = [key_of(number) for number in range(40)]


def test_a_job_is_divided_into_portions_of_one_call_each():
    with World(FakeClient(portion=4)) as world:
        assert world.store(K[:10]) == {}
        assert world.load(K[:10]) == {}
        assert world.client.calls["put"] == world.client.calls["get"] == 3
        assert all(world.holds(K[i], i) for i in range(10))


def test_a_block_that_is_there_is_not_sent_again():
    with World() as world:
        world.store(K[:3])
        puts = world.client.calls["put"]
        assert world.store(K[:3]) == {}
        assert world.client.calls["put"] == puts
        assert world.gauge("present_blocks") == 3


def test_a_block_that_was_found_absent_is_sent_without_another_question():
    with World(negative_cache_ttl_s=5.0) as world:
        world.run(world.tier.contains(K[:3]))
        questions = world.client.calls["exist"]
        assert world.store(K[:3]) == {}
        assert world.client.calls["exist"] == questions


def test_every_removal_of_corrupt_blocks_at_once_is_counted():
    with World(FakeClient(portion=1)) as world:
        world.client.values |= dict.fromkeys(K[:8], b"bad")
        assert len(world.load(K[:8])) == 8
        assert world.gauge("corrupt") == world.gauge("removed") == 8


def test_corrupt_blocks_that_cannot_be_removed_are_warned_of_once_and_counted(caplog):
    async def refused(*_):
        raise LibraryError(RefusedError)

    with World() as world:
        world.client.values |= dict.fromkeys(K[:8], b"bad")
        world.client.remove_if = refused
        assert len(world.load(K[:8])) == 8
        assert len(world.load(K[:8])) == 8
        assert world.gauge("unremoved") == 16
        assert caplog.text.count(" was not removed: ") == 1
        world.runner.advance(60.0)
        world.load(K[:1])
        assert "(15 more since the last such line)" in caplog.text


def test_a_corrupt_block_fails_alone_and_is_removed():
    with World() as world:
        world.store(K[:3])
        world.client.values[K[1]] = world.client.values[K[1]][:-1] + b"\1"
        failures = world.load(K[:3])
        assert {i: type(error) for i, error in failures.items()} == {1: CorruptBlockError}
        assert K[1] not in world.client.values
        assert world.gauge("corrupt") == world.gauge("removed") == 1
        assert world.store(K[:3]) == {}
        assert world.load(K[:3]) == {}


def test_calls_for_which_no_time_is_left_are_neither_made_nor_counted_nor_a_doubt():
    with World(FakeClient(portion=8), job_timeout_s=8.0) as world:
        world.client.values |= dict.fromkeys(K[:8], b"bad")
        removed = []

        async def remove_slowly(key, *_):
            removed.append(key)
            await asyncio.sleep(3.0)
            return True

        world.client.remove_if = remove_slowly
        world.load(K[:8])
        assert len(removed) == 3
        assert world.gauge("removed") == 2
        assert world.gauge("unremoved") == 6
        assert world.gauge("requests") == 1 + 2 + 3
        assert world.gauge("timeouts") == world.gauge("failed") == 1


def test_a_block_that_was_written_anew_meanwhile_is_not_removed():
    with World() as world:
        world.store(K[:1])
        good, get = world.client.values[K[0]], world.client.get

        async def get_bad(keys, targets):
            world.client.values[K[0]] = good[:-1] + b"\1"
            found = await get(keys, targets)
            world.client.values[K[0]] = good
            return found

        world.client.get = get_bad
        assert isinstance(world.load(K[:1])[0], CorruptBlockError)
        assert world.client.values[K[0]] == good
        assert world.gauge("removed") == 0


def test_a_bad_block_that_cannot_be_removed_is_counted_and_fails_nothing_else(caplog):
    with World(max_retries=0) as world:
        world.store(K[:2])
        world.client.values[K[0]] = b"x"
        world.client.failures = [None, None, LibraryError()]
        assert list(world.load(K[:2])) == [0]
        assert world.gauge("unremoved") == 1
        assert "was not removed" in caplog.text


@pytest.mark.parametrize("value", [b"", b"KVOB", bytes(64), b"x" * (SLOT_BYTES + 128)])
def test_what_is_no_block_is_corrupt(value):
    with World() as world:
        world.client.values[K[0]] = value
        assert isinstance(world.load(K[:1])[0], CorruptBlockError)


def test_a_block_under_the_key_of_another_is_corrupt():
    with World() as world:
        world.store(K[:1])
        world.client.values[K[1]] = world.client.values[K[0]]
        assert isinstance(world.load(K[1:2])[0], CorruptBlockError)


def test_a_missing_block_fails_alone():
    with World() as world:
        world.store(K[:1])
        failures = world.load(K[:2])
        assert {i: type(error) for i, error in failures.items()} == {1: BlockMissingError}


def test_a_block_that_cannot_be_read_fails_alone_and_stays():
    with World() as world:
        world.store(K[:2])
        world.client.values[K[0]] = TierUnavailableError("one node is down")
        assert {i: type(e) for i, e in world.load(K[:2]).items()} == {0: TierUnavailableError}


def test_a_server_without_room_is_full_and_the_others_are_stored():
    with World(redact=Redactor(["s3cret"])) as world:
        world.client.full = {K[1]}
        failures = world.store(K[:3])
        assert {i: type(error) for i, error in failures.items()} == {1: TierFullError}
        assert "s3cret" not in str(failures[1])
        assert set(world.client.values) == {K[0], K[2]}


def test_a_portion_that_fails_fails_its_own_blocks_only():
    with World(FakeClient(portion=2), max_retries=0) as world:
        world.store(K[:4])
        world.client.failures = [LibraryError()]
        failures = world.load(K[:4])
        assert len(failures) == 2
        assert all(isinstance(error, TierUnavailableError) for error in failures.values())


def test_a_call_is_repeated_until_it_works():
    with World(max_retries=2) as world:
        world.store(K[:1])
        world.client.failures = [LibraryError(), LibraryError()]
        assert world.load(K[:1]) == {}
        assert world.gauge("retries") == 2


def test_a_server_that_said_slow_down_leaves_a_failed_call_its_retries():
    with World(max_retries=1) as world:
        world.store(K[:1])
        world.client.failures = [LibraryError(SlowDownError)] * 3 + [LibraryError()]
        assert world.load(K[:1]) == {}
        assert world.gauge("retries") == 4


def test_a_refusal_is_not_repeated():
    with World(max_retries=5) as world:
        world.client.failures = [LibraryError(RefusedError)]
        assert isinstance(world.load(K[:1])[0], RefusedError)
        assert world.gauge("retries") == 0


def test_a_stalled_server_ends_a_job_at_its_deadline():
    with World(call_timeout_s=2.0, job_timeout_s=5.0, max_retries=9) as world:
        world.client.is_stalled = True
        began_s = world.runner.loop.time()
        failures = world.load(K[:20])
        assert world.runner.loop.time() - began_s <= 5.0
        assert {type(error) for error in failures.values()} == {TierTimeoutError}
        assert sorted(failures) == list(range(20))
        assert world.gauge("bytes_in_flight") == 0


def test_blocks_that_wait_for_the_limits_end_at_the_deadline_too():
    client = FakeClient(portion=1)
    with World(client, connections=1, call_timeout_s=60.0, job_timeout_s=5.0) as world:
        client.is_stalled = True
        failures = world.load(K[:3])
        assert sorted(failures) == [0, 1, 2]
        assert client.calls["get"] == 1


@pytest.mark.parametrize(
    ("call_timeout_s", "kind"),
    [(1.0, CallTimeoutError), (5.0, ServerHangError), (60.0, ServerHangError)],
)
def test_a_stall_is_counted_and_doubted_and_its_error_names_the_cause(call_timeout_s, kind):
    with World(call_timeout_s=call_timeout_s, job_timeout_s=5.0, max_retries=0) as world:
        world.client.is_stalled = True
        assert {type(error) for error in world.load(K[:1]).values()} == {kind}
        assert world.gauge("timeouts") == world.gauge("failed") == 1
        world.client.is_stalled = False
        world.load(K[:1])
        assert world.gauge("health_checks") == 1


def test_a_timeout_of_the_librarys_own_is_one():
    with World(max_retries=0) as world:
        world.client.failures = [LibraryError(TierTimeoutError)]
        world.load(K[:1])
        assert world.gauge("timeouts") == 1


def test_a_call_that_was_given_up_leaves_a_doubt():
    with World(call_timeout_s=60.0, job_timeout_s=60.0) as world:
        world.client.is_stalled = True

        async def give_up():
            async with asyncio.timeout(1.0):
                await world.tier.contains(K[:1])

        with pytest.raises(TimeoutError):
            world.run(give_up())
        world.client.is_stalled = False
        world.load(K[:1])
        assert world.gauge("health_checks") == 1


def test_after_a_fault_a_job_first_asks_whether_the_server_is_there():
    with World(max_retries=0) as world:
        world.client.failures = [LibraryError()]
        world.load(K[:1])
        world.client.failures = [LibraryError()]
        with pytest.raises(TierUnavailableError):
            world.load(K[:8])
        assert world.client.calls["check"] == 1
        assert world.client.calls["get"] == 1
        assert len(world.load(K[:8])) == 8  # it is there again, and has none of them
        world.load(K[:8])
        assert world.client.calls["check"] == world.gauge("health_checks") == 2


def test_a_suspected_server_that_answers_slow_down_is_there():
    with World(max_retries=0) as world:
        world.store(K[:8])
        world.client.failures = [LibraryError()]
        world.load(K[:1])
        world.client.failures = [LibraryError(SlowDownError)]
        assert world.load(K[:8]) == {}
        assert world.gauge("health_checks") == 1


def test_a_server_that_refuses_at_the_opening_is_an_error_of_the_configuration():
    world = World(redact=Redactor(["s3cret"]))
    world.client.failures = [LibraryError(RefusedError, "bad password s3cret")]
    with (
        pytest.raises(ConfigError, match=r"fake://host.*\*\*\*.*correct url or credentials"),
        world,
    ):
        pass
    world.run(world.tier.close())
    assert world.client.is_closed
    world.runner.close()


def test_no_secret_is_in_what_is_logged_of_an_error_and_its_causes(caplog):
    caplog.set_level(logging.DEBUG)
    with World(max_retries=0, redact=Redactor(["s3cret"])) as world:
        world.client.failures = [LibraryError(text="redis://u:s3cret@host said s3cret")]
        (error,) = world.load(K[:1]).values()
    assert error.__cause__ is None
    assert error.__context__ is None
    assert "s3cret" not in str(error) + repr(error) + caplog.text + repr(world.tier.gauges())


@pytest.mark.parametrize("bound", [1, 4 * SLOT_BYTES, 9 * SLOT_BYTES, 1 << 20])
def test_no_more_bytes_are_in_flight_than_may_be_and_a_call_passes_however_large(bound):
    client = FakeClient(portion=4)
    most = []
    with World(client, first_bytes=bound, num_slots=12) as world:
        begin = client._begin

        async def watched(*arguments):
            most.append(world.gauge("bytes_in_flight"))
            await begin(*arguments)

        client._begin = watched
        assert world.store(K[:12]) == {}
    assert max(most) <= max(bound, 4 * SLOT_BYTES)


def test_the_loss_of_the_servers_contents_is_counted_and_forgets_what_was_there(caplog):
    with World(positive_cache_ttl_s=100.0) as world:
        world.store(K[:2])
        assert world.run(world.tier.contains(K[:2])) == set(K[:2])
        world.client.values.clear()
        world.client.emptied()
        assert world.run(world.tier.contains(K[:2])) == frozenset()
        assert world.gauge("emptied") == 1
        assert "has lost its contents" in caplog.text


def test_it_refuses_work_when_it_is_closed():
    with World() as world:
        world.run(world.tier.close())
        job = world.job(K[:1], is_promotion=True)
        for call in (world.tier.load, world.tier.store):
            with pytest.raises(TierClosedError):
                world.run(call(job))
        for call in (world.tier.contains(K), world.tier.longest_prefixes([K])):
            with pytest.raises(TierClosedError):
                world.run(call)


def test_what_was_remembered_is_asked_anew_where_the_answer_shows_that_all_is_lost():
    with World(positive_cache_ttl_s=100.0) as world:
        world.store(K[:2])
        exist = world.client.exist

        async def exist_emptied(keys):
            if K[0] in world.client.values:
                world.client.values.clear()
                world.client.emptied()
            return await exist(keys)

        world.client.exist = exist_emptied
        assert world.run(world.tier.contains(K[:3])) == frozenset()


def test_a_block_that_was_bad_on_its_way_alone_is_read_again_and_served():
    with World() as world:
        world.store(K[:3])
        good, get = dict(world.client.values), world.client.get

        async def get_bad_once(keys, targets):
            if len(keys) == 3:
                world.client.values[K[1]] = good[K[1]][:-1] + b"\1"
            found = await get(keys, targets)
            world.client.values[K[1]] = good[K[1]]
            return found

        world.client.get = get_bad_once
        assert world.load(K[:3]) == {}
        assert all(world.holds(K[i], i) for i in range(3))
        assert world.client.values == good
        assert world.gauge("read_again") == 1


def test_a_tier_that_was_closed_still_says_what_it_has_done():
    with World() as world:
        assert world.tier.gauges()["requests"] > 0
        world.store(K[:3])
        before = world.tier.gauges()
        world.run(world.tier.close())
        assert world.tier.gauges() == before
