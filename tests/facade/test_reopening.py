"""A tier that is not required: the engine starts without it, and opens it later."""

import threading
from contextlib import closing
from itertools import islice

import pytest
from facade.worlds import HIT, MISS, PENDING, RETRY, k, ks

from kvoffload_async import SecondaryTierFactory, TieringOffloadingSpec
from kvoffload_async.abc.tier import Direction
from kvoffload_async.errors import (
    ClosedError,
    ConfigError,
    OffloadError,
    TierTimeoutError,
    TierUnavailableError,
)
from kvoffload_async.facade import tier_group
from kvoffload_async.facade.secondary import ExampleSecondaryTierManager, SecondaryTierManager
from kvoffload_async.facade.tier_group import UnopenedTier, pauses_s
from kvoffload_async.runtime.bridge import Bridge
from kvoffload_async.runtime.loop import LoopThread
from kvoffload_async.tiers.example import ExampleTier
from kvoffload_async.types import ReqContext

DEADLINE_S = 30.0
CONFIG = {"cpu_bytes_to_use": "64KiB", "block_bytes": 4096, "check_invariants": True}


class Mount:
    """What the tiers of a test stand on."""

    def __init__(self):
        self.is_there = False
        self.tries = 0
        self.closed = 0
        self.heard = []
        self.hangs = False
        self.unclosable = False
        self.reached = threading.Event()
        self.released = threading.Event()

    def open(self):
        self.tries += 1
        if not self.is_there:
            raise TierUnavailableError("nothing is mounted")

    def hang(self):
        self.reached.set()
        self.released.wait(DEADLINE_S)


@pytest.fixture
def short_pauses(monkeypatch):
    monkeypatch.setattr(tier_group, "_LONGEST_PAUSE_S", 0.001)


@pytest.fixture(params=["async tier", "manager"])
def mount(request, monkeypatch, short_pauses):
    """Make the tier "mounted" known: as an AsyncTier, or as a third party's manager."""
    made = Mount()

    class MountedTier(ExampleTier):
        async def open(self, env):
            if made.hangs:
                await env.io.run(Direction.METADATA, made.hang)
            made.open()
            await super().open(env)

        async def close(self):
            made.closed += 1
            await super().close()

    class MountedManager(ExampleSecondaryTierManager):
        def __init__(self, *args, **kwargs):
            if made.hangs:
                made.hang()
            made.open()
            super().__init__(*args, **kwargs)

        def on_new_request(self, req_context):
            made.heard.append(req_context.req_id)
            if req_context.req_id == "bad":
                raise ValueError("third-party code")
            return super().on_new_request(req_context)

        def shutdown(self, timeout=None):
            made.closed += 1
            if made.unclosable:
                super().shutdown(timeout)
                raise ValueError("third-party code")
            return super().shutdown(timeout)

    cls = MountedTier if request.param == "async tier" else MountedManager
    made.is_manager = cls is MountedManager
    registry = SecondaryTierFactory._registry
    monkeypatch.setattr(registry, "_loaders", {**registry._loaders, "mounted": lambda: cls})
    return made


def spec(**options):
    tier = {"type": "mounted", "required": False, **options}
    return TieringOffloadingSpec({**CONFIG, "secondary_tiers": [tier, {"type": "example"}]})


def thread_of(manager):
    """The thread that tries to open the tier."""
    return manager._tiers._unopened[0]._thread


def opened(manager):
    """Let the tier be opened, and the manager take it over."""
    thread_of(manager).join(DEADLINE_S)
    manager.on_schedule_end()
    manager.on_schedule_end()
    return manager.planner.tiers[0]


def store(manager, ctx, *numbers):
    assert manager.prepare_store(ks(*numbers), ctx) is not None
    manager.complete_store(ks(*numbers), ctx)
    quiet(manager)


def quiet(manager):
    manager.on_schedule_end()
    for tier in manager.secondary_tiers:
        tier.on_schedule_end()
        assert tier.drain_jobs(DEADLINE_S)
    manager.on_schedule_end()
    manager.on_schedule_end()


def reopening(names):
    return [name for name in names if name.startswith("kvoffload-reopen")]


def test_the_engine_works_without_it_and_uses_it_once_it_is_open(mount, caplog, started_threads):
    with spec() as engine:
        manager = engine.get_manager()
        ctx = ReqContext("r")
        manager.on_new_request(ctx)
        store(manager, ctx, 1)
        missing, other = manager.planner.tiers
        assert (missing.counters.stored_blocks, other.counters.stored_blocks) == (0, 1)
        assert not missing.takes_store(0.0)
        assert manager.lookup(k(1), ctx) is HIT
        assert manager.lookup(k(2), ctx) is MISS
        manager.touch(ks(1), ctx)
        assert not list(manager.take_events())
        mount.is_there = True
        state = opened(manager)
        assert state.is_available
        store(manager, ctx, 3)
        # It is tried again after a moment.
        while manager.planner.cascades.has_pending or manager.has_pending_work():
            manager.wait_for_progress(0.05)
            quiet(manager)
        assert state.counters.stored_blocks == 2, "and so is what was stored before"
        manager.reset_cache()
        manager.on_reset_flushed()
        assert manager.lookup(k(3), ctx) is PENDING
        quiet(manager)
        assert manager.lookup(k(3), ctx) is HIT
        assert state.counters.loaded_blocks == 1
        manager.touch(ks(3), ctx)
        manager.on_request_finished(ctx)
        manager.has_pending_work()
        list(manager.take_events())
    assert mount.tries >= 2
    assert caplog.text.count("cannot be opened") == 1
    assert caplog.text.count("was opened after") == 1
    assert not reopening(started_threads())


def test_a_request_that_began_before_is_told_of(mount):
    with spec() as engine:
        manager = engine.get_manager()
        manager.on_new_request(ReqContext("live"))
        ended = ReqContext("ended")
        manager.on_new_request(ended)
        manager.on_request_finished(ended)
        mount.is_there = True
        opened(manager)
        manager.on_new_request(ReqContext("later"))
    assert mount.heard == (["live", "later"] if mount.is_manager else [])


def test_a_deletion_waits_until_it_is_open_and_a_count_does_not(mount):
    if mount.is_manager:
        pytest.skip("a third party's manager deletes nothing")
    with spec() as engine:
        manager = engine.get_manager()
        deletion, count = manager.cache.delete(ks(1)), manager.cache.count(ks(1))
        report = manager.finish(count, DEADLINE_S)
        assert report.left == {"primary": 0, "mounted": 1, "example": 0}
        assert report.errors == {"mounted": "tier mounted is not open"}
        assert not deletion.is_done
        mount.is_there = True
        opened(manager)
        assert manager.finish(deletion, DEADLINE_S).is_complete


def test_an_error_at_one_request_that_began_before_costs_the_others_nothing(mount, caplog):
    with spec() as engine:
        manager = engine.get_manager()
        for name in ("bad", "good"):
            manager.on_new_request(ReqContext(name))
        mount.is_there = True
        opened(manager)
    assert mount.heard == (["bad", "good"] if mount.is_manager else [])
    assert ("third-party code" in caplog.text) is mount.is_manager


def test_a_tier_that_is_required_stops_the_engine(mount, started_threads):
    with spec(required=True) as engine, pytest.raises(TierUnavailableError, match="mounted"):
        engine.get_manager()
    assert not reopening(started_threads())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"required": "no"}, "required: 'no'"),
        ({"colour": 1}, "unknown key 'colour'.*required"),
    ],
)
def test_a_wrong_configuration_is_an_error_at_once(mount, options, message):
    with pytest.raises(ConfigError, match=message):
        spec(**options)
    assert not mount.tries


def test_a_shutdown_ends_the_tries(mount, started_threads, monkeypatch):
    monkeypatch.setattr(tier_group, "_FIRST_PAUSE_S", DEADLINE_S)
    monkeypatch.setattr(tier_group, "_LONGEST_PAUSE_S", DEADLINE_S)
    with spec() as engine:
        engine.get_manager()
        assert reopening(started_threads())
    assert not reopening(started_threads())


def test_a_tier_that_was_opened_and_not_yet_taken_over_is_closed(mount):
    with spec() as engine:
        manager = engine.get_manager()
        mount.is_there = True
        thread_of(manager).join(DEADLINE_S)
    failed = 0 if mount.is_manager else mount.tries - 1  # a tier is closed after a failed open
    assert mount.closed == failed + 1


def test_a_manager_that_raises_before_it_is_taken_over_keeps_no_other_open(mount):
    if not mount.is_manager:
        pytest.skip("an AsyncTier has this package's manager, which reports the error")
    engine = spec()
    manager = engine.get_manager()
    mount.is_there = mount.unclosable = True
    thread_of(manager).join(DEADLINE_S)
    (example,) = manager.secondary_tiers
    close, closed = example.link.close, []
    example.link.close = lambda timeout_s: closed.append(close(timeout_s)) or closed[-1]
    with pytest.raises(OffloadError, match="third-party code"):
        engine.shutdown()
    assert [report.is_clean for report in closed] == [True]
    with pytest.raises(ClosedError):
        manager._primary.get_primary_kv_view()


def test_a_shutdown_beside_a_tier_that_hangs_while_it_opens_is_bounded(mount, started_threads):
    engine = spec(open_timeout_s=0.2)
    manager = engine.get_manager()
    mount.hangs = True
    assert mount.reached.wait(DEADLINE_S)
    with pytest.raises(OffloadError, match="still being opened"):
        engine.shutdown(0.1)
    mount.is_there = True
    mount.released.set()
    thread_of(manager).join(DEADLINE_S)
    assert not reopening(started_threads())
    manager._primary.shutdown()  # its memory has been there until the end


def test_while_an_opening_hangs_no_other_is_begun(short_pauses):
    asked = threading.Event()
    tries = []

    def hangs():
        asked.set()
        return True

    tier = UnopenedTier("t", lambda: tries.append(1), TierUnavailableError("no"), hangs)
    assert asked.wait(DEADLINE_S)
    assert tier.shutdown(DEADLINE_S).is_clean
    assert not tries


def test_the_statistics_say_since_when_and_why_a_tier_is_not_open(mount, monkeypatch):
    monkeypatch.setattr(tier_group, "_LONGEST_PAUSE_S", DEADLINE_S)
    with spec() as engine:
        manager = engine.get_manager()
        tier, healthy = manager.stats().tiers
        assert (healthy.is_open, healthy.unopened) == (True, None)
        assert not tier.is_open
        assert tier.unopened.reason == "nothing is mounted"
        assert tier.unopened.attempts == 1
        assert tier.unopened.since_s <= tier.unopened.next_attempt_s


def test_failed_attempts_are_counted_until_one_succeeds_even_if_the_engine_is_idle(mount):
    with spec() as engine:
        manager = engine.get_manager()
        while (now := manager.stats().tiers[0].unopened).attempts < 3:
            threading.Event().wait(0.001)
        assert now.since_s < now.next_attempt_s
        mount.is_there = True
        thread_of(manager).join(DEADLINE_S)  # no step has taken the tier over yet
        tier = manager.stats().tiers[0]
        assert (tier.is_open, tier.unopened) == (True, None)
        opened(manager)
        tier = manager.stats().tiers[0]
        assert (tier.is_open, tier.unopened) == (True, None)
    assert not any(tier.is_open for tier in manager.stats().tiers[1:])


def test_a_thread_that_hangs_after_an_opening_is_known_until_it_ends(mount):
    mount.hangs = True
    if mount.is_manager:  # its constructor hangs, and with it the thread that tries
        return
    with closing(Bridge(LoopThread())) as bridge:
        view = memoryview(bytearray(64)).cast("B", (1, 64))
        tier = SecondaryTierFactory.get_tier_class("mounted").tier_class()
        with pytest.raises(TierTimeoutError):
            SecondaryTierManager(None, view, "t", tier, runtime=bridge, open_timeout_s=0.1)
        assert bridge.opening_hangs("t")
        assert not bridge.opening_hangs("other")
        mount.released.set()
        for thread in bridge.hung_openings["t"]._threads:
            thread.join(DEADLINE_S)
        assert not bridge.opening_hangs("t")


def test_before_it_is_open_it_is_shown_as_it_is_and_nothing_is_done_with_it(mount):
    with spec() as engine:
        manager = engine.get_manager()
        assert [tier.tier_type for tier in manager.secondary_tiers] == ["example"]
        ctx = ReqContext("r")
        manager.on_new_request(ctx)
        store(manager, ctx, 1)
        manager.touch(ks(1), ctx)
        manager.on_request_finished(ctx)
        manager.on_schedule_end()
        manager.announce_anew()
        manager.reset_cache()
        (missing, _) = manager.stats().tiers
        assert (missing.name, missing.submitted_jobs, missing.gauges) == ("mounted", 0, {})
        assert not manager.planner.tiers[0].effects
        assert not manager.has_pending_work()


def test_who_waits_for_what_its_probes_find_is_told(mount):
    with spec(min_blocks=2) as engine:
        manager = engine.get_manager()
        told = []
        manager.planner.tiers[0].index.watch(told.extend)
        mount.is_there = True
        opened(manager)
        ctx = ReqContext("r")
        manager.on_new_request(ctx)
        assert manager.lookup(k(1), ctx) is RETRY
        manager.on_schedule_end()
        assert told == ([] if mount.is_manager else ks(1))


def test_the_pauses_grow_and_are_bounded():
    assert list(islice(pauses_s(), 8)) == [1, 2, 4, 8, 16, 32, 60, 60]


def test_one_that_is_asked_only_for_enough_blocks_says_what_it_was_not_asked_for(mount):
    if mount.is_manager:  # which blocks it is asked for is its own affair
        return
    with spec(min_blocks=2, prefill_blocks_per_s=100.0) as engine:
        manager = engine.get_manager()
        mount.is_there = True
        state = opened(manager)
        assert manager.secondary_tiers[0].tier_state is state
        assert state.cost_gated is state.index
        ctx = ReqContext("r")
        manager.on_new_request(ctx)
        assert manager.lookup(k(1), ctx) is RETRY
        manager.on_schedule_end()
        assert manager.lookup(k(1), ctx) is MISS
        manager.on_request_finished(ctx)
        stats = manager.stats().tiers[0]
        assert stats.skipped_lookups["too_few"] == 1
        assert stats.break_even.needed_blocks == 2
