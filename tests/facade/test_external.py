"""Tiers that the planner drives itself, and those whose manager keeps its say: no difference."""

import pytest
from facade.worlds import EXCLUSIVE, HIT, MISS, PENDING, Counting, Hearing, filled, k, ks, scripted

from kvoffload_async import SecondaryTierFactory, TieringOffloadingSpec
from kvoffload_async.core.backpressure import Backpressure, BackpressureSettings
from kvoffload_async.core.health import BreakerSettings
from kvoffload_async.core.invariants import check_state
from kvoffload_async.errors import ConfigError, TierUnavailableError
from kvoffload_async.facade.external import is_external
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.facade.tier_options import UnknownOptionError
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.types import (
    JobResult,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    TierMatcher,
)

BOTH = pytest.mark.parametrize(
    "manager_class", [SecondaryTierManager, Hearing], ids=["driven by the planner", "external"]
)


class Elsewhere(SecondaryTierManager):
    """Says that its blocks lie elsewhere than its tier does."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.medium = Medium.CPU
        self.backpressure_detector = Backpressure(BackpressureSettings(1.0, 0.5))


class Knowing(SecondaryTierManager):
    """Has an index of its own."""

    known = frozenset()

    def lookup(self, key, req_context):
        return LookupResult.HIT if key in self.known else LookupResult.MISS


def test_only_a_manager_that_overrides_what_is_left_to_the_planner_is_foreign(worlds):
    (elsewhere,) = worlds(manager_class=Elsewhere).secondaries
    assert not is_external(elsewhere)
    assert is_external(worlds(manager_class=Knowing).secondaries[0])


def test_the_planner_and_its_tier_share_one_state(worlds):
    world = worlds()
    assert world.manager.planner.tiers == (world.secondaries[0].tier_state,)


@BOTH
def test_a_block_goes_to_a_tier_and_comes_back(worlds, manager_class):
    world = worlds(manager_class=manager_class)
    filled(world, 1)
    world.begin("r")
    assert world.lookup(1) is PENDING
    world.step()
    world.finish_all()
    assert world.lookup(1) is HIT
    world.load(1)


@BOTH
def test_an_overdue_copy_keeps_its_block_until_it_ends(worlds, manager_class):
    world = worlds(
        EXCLUSIVE, manager_class=manager_class, io_timeout_s=5.0, num_slots=1, write_back="drop"
    )
    world.begin("r")
    world.store(1)
    world.step()
    world.runner.advance(5.0)
    world.poll()
    assert world.prepare_store(2) is None
    world.finish_job()
    world.poll()
    assert world.prepare_store(2) is not None


def test_a_job_that_is_refused_as_a_request_begins_releases_its_block_at_once(worlds):
    world = worlds(EXCLUSIVE, manager_class=Counting, num_slots=1, write_back="drop")
    world.secondaries[0].refuses = True
    world.begin("r")
    world.store(1)
    world.finish("r")  # the job waits for the end of the step, or for a request of this id
    world.begin("r")
    assert not world.manager.planner.tiers[0].cascading_blocks
    check_state(world.manager.planner)
    assert world.prepare_store(2) is not None


@BOTH
def test_a_tier_that_faults_as_often_as_its_breaker_allows_is_left_alone(worlds, manager_class):
    world = worlds(manager_class=manager_class, breaker=BreakerSettings(1, retry_after_s=60.0))
    world.begin("r")
    world.store(1)
    world.step()
    world.finish_job(error=OSError(5, "io"))
    world.poll()
    world.store(2)
    world.step()
    assert not world.parked()
    assert world.manager.planner.cascades.queues[0].count == 2
    assert not world.manager.has_pending_work(), "steps alone would not bring it back"


@BOTH
def test_a_tier_that_was_left_alone_is_tried_with_one_job(worlds, manager_class):
    world = worlds(manager_class=manager_class, breaker=BreakerSettings(1, retry_after_s=60.0))
    world.begin("r")
    world.store(1)
    world.step()
    world.finish_job(error=OSError(5, "io"))
    world.poll()
    world.runner.advance(60.0)
    world.store(2)
    world.store(3)
    world.step()
    assert len(world.parked()) == 1


def test_where_a_manager_says_that_its_blocks_lie_counts(worlds):
    world = worlds(manager_class=Elsewhere)
    filled(world, 1)
    world.begin("storage", load_tier_filter=frozenset({TierMatcher(medium=Medium.STORAGE)}))
    assert world.lookup(1, "storage") is MISS
    world.begin("cpu", load_tier_filter=frozenset({TierMatcher(medium=Medium.CPU)}))
    assert world.lookup(1, "cpu") is PENDING


def test_the_detector_that_a_manager_has_is_used(worlds):
    world = worlds(manager_class=Elsewhere)
    assert world.manager.planner.tiers[0].backpressure is world.secondaries[0].backpressure_detector


def test_an_external_manager_is_asked_for_every_key_once_as_long_as_a_request_waits(worlds):
    world = worlds(scripted(), manager_class=Knowing)
    filled(world, 1)
    world.begin("r")
    assert world.lookup(1) is MISS, "the tier has it, and its manager says no"
    world.secondaries[0].known = {k(1)}
    assert world.lookup(1) is MISS
    world.begin("s")
    assert world.lookup(1, "s") is PENDING
    world.step()
    world.finish_all()
    assert world.lookup(1) is HIT


def test_an_external_manager_is_asked_again_once_its_answer_has_decided_a_request(worlds):
    world = worlds(scripted(), manager_class=Knowing)
    filled(world, 1)
    world.begin("r")
    assert world.lookup(1) is MISS
    world.secondaries[0].known = {k(1)}
    world.step()
    assert world.lookup(1) is PENDING


class Unkind(Hearing):
    """Fails at the end of a request, and reports a job that nobody gave it."""

    reports_too_much = False

    def on_request_finished(self, req_context):
        raise ValueError("drawn")

    def get_finished_jobs(self):
        wrong = [JobResult(10**6, success=True)] if self.reports_too_much else []
        return [*wrong, *super().get_finished_jobs()]


def test_an_error_at_a_requests_end_costs_no_job_behind_it(worlds, caplog):
    world = worlds(manager_class=Unkind)
    for req_id, number in (("a", 1), ("b", 2)):
        world.begin(req_id)
        world.store(number, req_id=req_id)
        world.manager.on_request_finished(world.contexts[req_id])
    world.step()
    world.finish_all()
    world.poll()
    assert "tier0: on_request_finished failed" in caplog.text
    assert not world.manager.has_pending_work()


def test_a_wrong_report_is_logged_and_costs_no_right_one(worlds, caplog):
    world = worlds(manager_class=Unkind)
    world.begin("r")
    world.store(1)
    world.step()
    world.finish_all()
    (tier,) = world.secondaries
    tier.reports_too_much = True
    world.poll()
    assert "1000000, which is not its job" in caplog.text
    assert not world.manager.has_pending_work()


class Plain(SecondaryTierManager):
    """Implements the contract on its own: no tier, no loop, and not the constructor either."""

    def __init__(self, offloading_spec, primary_kv_view, tier_type, *, colour="red"):
        self.tier_type = tier_type
        self.colour = colour
        self.rows = primary_kv_view
        self.blocks, self.done, self.events, self.calls = {}, [], [], []

    def on_new_request(self, req_context):
        return RequestOffloadingContext(OffloadPolicy.BLOCK_LEVEL)

    def on_request_finished(self, req_context):
        self.calls.append("finished")

    def lookup(self, key, req_context):
        return LookupResult.HIT if key in self.blocks else LookupResult.MISS

    def touch(self, keys, req_context):
        pass

    def submit_store(self, job_metadata):
        rows = zip(job_metadata.keys, job_metadata.block_ids.tolist(), strict=True)
        self.blocks |= dict(rows)
        self.done.append(JobResult(job_metadata.job_id, success=True))
        self.events.append(OffloadingEvent(job_metadata.keys, Medium.STORAGE, removed=False))

    def submit_load(self, job_metadata):
        self.done.append(JobResult(job_metadata.job_id, success=True))

    def get_finished_jobs(self):
        done, self.done = self.done, []
        return done

    def get_released_jobs(self):
        return ()

    def on_schedule_end(self, context=None):
        self.calls.append("end")

    def has_pending_work(self):
        return bool(self.done)

    def take_events(self):
        events, self.events = self.events, []
        return events

    def announce_anew(self):
        self.calls.append("anew")

    def drain_jobs(self, timeout=30.0):
        return True

    def abandon_jobs(self):
        return ()

    def shutdown(self, timeout=None):
        self.calls.append("shutdown")


def test_a_class_that_implements_the_contract_on_its_own_is_a_tier(monkeypatch):
    registry = SecondaryTierFactory._registry
    monkeypatch.setattr(registry, "_loaders", {**registry._loaders, "plain": lambda: Plain})
    tiers = [{"type": "plain", "colour": "blue"}, {"type": "plain"}]
    config = {"cpu_bytes_to_use": "64KiB", "block_bytes": 4096, "check_invariants": True}
    with TieringOffloadingSpec({**config, "secondary_tiers": tiers}) as spec:
        manager = spec.get_manager()
        plain, other = manager.secondary_tiers
        assert (plain.colour, other.colour) == ("blue", "red")
        ctx = ReqContext("r")
        manager.on_new_request(ctx)
        manager.prepare_store(ks(1), ctx)
        manager.complete_store(ks(1), ctx)
        manager.on_schedule_end()
        manager.on_schedule_end()
        assert [event.ownership for event in manager.take_events()][-2:] == ["plain", "plain-2"]
        manager.reset_cache()
        manager.on_reset_flushed()
        assert manager.lookup(k(1), ctx) is PENDING
        manager.on_schedule_end()
        assert manager.lookup(k(1), ctx) is HIT
        manager.prepare_load(ks(1), ctx)
        manager.complete_load(ks(1), ctx)
        manager.on_request_finished(ctx)
        manager.on_schedule_end()
        manager.announce_anew()
        first, second = manager.stats().tiers
        assert (first.stored_blocks, first.stored_bytes, first.loaded_blocks) == (1, 4096, 1)
        assert (first.name, second.name, second.loaded_blocks) == ("plain", "plain-2", 0)
        assert not manager.has_pending_work()
    assert set(plain.calls) == {"finished", "end", "anew", "shutdown"}


@pytest.mark.parametrize("key", ["min_blocks", "io_timeout_s", "size"])
def test_an_option_that_such_a_class_does_not_take_is_refused_by_name(monkeypatch, key):
    registry = SecondaryTierFactory._registry
    monkeypatch.setattr(registry, "_loaders", {**registry._loaders, "plain": lambda: Plain})
    with pytest.raises(UnknownOptionError, match=f"unknown key '{key}'.*colour"):
        SecondaryTierFactory.check_config({"type": "plain", key: 1})


def test_a_class_of_another_contract_is_a_tier_where_it_has_an_adapter(monkeypatch):
    class Contract:
        pass

    class Theirs(Contract):
        pass

    registry = SecondaryTierFactory._registry
    monkeypatch.setattr(registry, "_loaders", {**registry._loaders, "theirs": lambda: Theirs})
    monkeypatch.setattr(SecondaryTierFactory, "_adapters", {})
    with pytest.raises(ConfigError, match="subclass of neither SecondaryTierManager nor AsyncTier"):
        SecondaryTierFactory.get_tier_class("theirs")
    SecondaryTierFactory.register_adapter(Contract, {Theirs: Plain}.__getitem__)
    assert SecondaryTierFactory.get_tier_class("theirs") is Plain


class Unclosable(Plain):
    """Raises as it is shut down."""

    closed = 0

    def shutdown(self, timeout=None):
        type(self).closed += 1
        raise SystemExit(1)


def test_an_opening_that_fails_closes_all_it_has_opened_although_a_manager_raises(
    monkeypatch, caplog
):
    class Refusing(Plain):
        def __init__(self, *_args, **_options):
            raise OSError("no such device")

    registry = SecondaryTierFactory._registry
    classes = {"plain": Plain, "unclosable": Unclosable, "refusing": Refusing}
    loaders = {name: lambda cls=cls: cls for name, cls in classes.items()}
    monkeypatch.setattr(registry, "_loaders", {**registry._loaders, **loaders})
    monkeypatch.setattr(Unclosable, "closed", 0)
    shut_down = []
    monkeypatch.setattr(Plain, "shutdown", lambda _plain, _timeout_s: shut_down.append("plain"))
    released = []
    release = PrimaryBuffer.release
    monkeypatch.setattr(
        PrimaryBuffer, "release", lambda buffer, **o: released.append(release(buffer, **o))
    )
    tiers = [{"type": name} for name in classes]
    config = {"cpu_bytes_to_use": "64KiB", "block_bytes": 4096, "secondary_tiers": tiers}
    with (
        TieringOffloadingSpec(config) as spec,
        pytest.raises(TierUnavailableError, match=r"secondary_tiers\[2\]: OSError: no such device"),
    ):
        spec.get_manager()
    assert (shut_down, Unclosable.closed, len(released)) == (["plain"], 1, 1)
    assert "tier unclosable was not closed: the tier broke its contract with a Sys" in caplog.text
