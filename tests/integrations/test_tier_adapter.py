"""Tiers written for vLLM's tiering are tiers of this engine, and their errors cost no more."""

import ctypes
import gc
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
from facade.worlds import HIT, MISS, PENDING, k, ks
from integrations import vllm_contract
from own_threads import Threadless

from kvoffload_async import SecondaryTierFactory, TieringOffloadingSpec
from kvoffload_async.core.health import BreakerSettings, BreakerState, TierHealth
from kvoffload_async.errors import ClosedError, ConfigError, TierTimeoutError, TierUnavailableError
from kvoffload_async.facade.external import ExternalLink
from kvoffload_async.types import (
    JobMetadata,
    JobResult,
    Locality,
    LookupResult,
    Medium,
    OffloadPolicy,
    ReqContext,
    ScheduleEndContext,
    as_block_ids,
)

SLOT_BYTES = 16
SPEC = SimpleNamespace(outer="vLLM's spec")
CTX = ReqContext("r", {"a": 1})


@pytest.fixture
def contract(monkeypatch):
    return vllm_contract.load(monkeypatch)


class Scripted:
    """Does as a test says; notes its calls."""

    def __init__(
        self, offloading_spec, primary_kv_view, tier_type, root_dir, n_threads=2, **options
    ):
        super().__init__(offloading_spec, primary_kv_view, tier_type, **options)
        self.given = (offloading_spec, tier_type, root_dir, n_threads)
        self.calls, self.results, self.events, self.do = [], [], [], {}
        self.medium = self.base.Medium.CPU
        self.locality = self.base.Locality.REMOTE

    def _called(self, name, *arguments):
        self.calls.append((name, *arguments))
        return self.do.get(name, lambda *_: None)(*arguments)

    def on_new_request(self, req_context):
        self._called("on_new_request", req_context)
        return self.base.RequestOffloadingContext(
            self.do.get("policy", self.base.OffloadPolicy.CHUNK_LEVEL)
        )

    def lookup(self, key, req_context):
        return self._called("lookup", key, req_context)

    def submit_store(self, job_metadata):
        self._called("submit_store", job_metadata)

    def submit_load(self, job_metadata):
        self._called("submit_load", job_metadata)

    def get_finished_jobs(self):
        self._called("get_finished_jobs")
        results, self.results = self.results, []
        return results

    def touch(self, keys, req_context):
        self._called("touch", keys, req_context)

    def take_events(self):
        self._called("take_events")
        return self.events

    def has_pending_work(self):
        return self._called("has_pending_work")

    def on_request_finished(self, req_context):
        self._called("on_request_finished", req_context)

    def on_schedule_end(self, context):
        self._called("on_schedule_end", context)

    def drain_jobs(self):
        self._called("drain_jobs")

    def shutdown(self):
        self._called("shutdown")


@pytest.fixture
def plain(contract):
    """Return a class of vLLM's contract."""

    class Plain(Scripted, contract.tiering.SecondaryTierManager):
        base = contract.base

    return Plain


class World:
    """A link over an adapted manager, vLLM's manager below it, and the time."""

    made: ClassVar[list["World"]] = []

    def __init__(self, contract, plain, **options):
        self.now_s = 0.0
        self.memory = bytearray(4 * SLOT_BYTES)
        view = memoryview(self.memory).cast("B", (4, SLOT_BYTES))
        self.adapter = contract.tier_adapter.adapted(plain)(
            SPEC, view, "disk", root_dir="/kv", **options
        )
        World.made.append(self)
        self.vllms = self.adapter._manager
        self.link = ExternalLink(self.adapter, "disk-2", SLOT_BYTES, lambda: self.now_s)
        self.state = self.link.state
        self.state.health = TierHealth(BreakerSettings(1))

    def start(self, job_id=1, numbers=(1, 2), *, is_promotion=True):
        slots = as_block_ids(range(len(numbers)))
        self.state.submit(JobMetadata(job_id, tuple(ks(*numbers)), slots, is_promotion, CTX, 1.5))
        self.link.flush()

    def report(self, *results):
        self.vllms.results += results
        self.link.pump()
        return self.ended()

    def ended(self):
        return [result for _, result in self.state.jobs.take_ended()]

    def calls(self, *names):
        return [call for call in self.vllms.calls if call[0] in names]

    @property
    def open_breakers(self):
        health = self.state.health
        breakers = {"loads": health.loads, "stores": health.stores}
        return {name for name, one in breakers.items() if one.state is BreakerState.OPEN}


@pytest.fixture
def world(contract, plain):
    return World(contract, plain)


@pytest.fixture(autouse=True)
def _threads_end():
    yield
    while World.made:
        World.made.pop().adapter._helper.end()


# -- requests and lookups -----------------------------------------------------------------------


def test_a_request_has_one_context_of_vllms_kind_for_its_whole_life(contract, world):
    request = ReqContext("r", {"a": 1})
    world.link.begin_request(request)
    world.link.state.index.lookup(k(1), request)
    world.state.finish_request(request)
    world.link.flush()
    contexts = [call[-1] for call in world.vllms.calls]
    assert [call[0] for call in world.vllms.calls] == [
        "on_new_request",
        "lookup",
        "on_request_finished",
    ]
    assert all(type(context) is contract.base.ReqContext for context in contexts)
    assert contexts[0] is contexts[1] is contexts[2]
    assert (contexts[0].req_id, contexts[0].kv_transfer_params) == ("r", {"a": 1})


def test_the_hints_of_a_request_reach_a_tier(contract, world):
    given = contract.base.ReqContext("r")
    given.kv_hints = "hints"
    world.link.begin_request(contract.convert.request_of(given))
    assert world.vllms.calls[0][1].kv_hints == "hints"


def test_a_request_of_vllms_is_freed_without_the_garbage_collector(contract, world):
    given = contract.base.ReqContext("r")
    gc.disable()
    try:
        before = sum(type(one) is contract.base.ReqContext for one in gc.get_objects())
        request = contract.convert.request_of(given)
        contract.convert.context_of(request)
        del given, request
        after = sum(type(one) is contract.base.ReqContext for one in gc.get_objects())
    finally:
        gc.enable()
    assert after == before - 1


@pytest.mark.parametrize("policy", ["CHUNK_LEVEL", "REQUEST_LEVEL"])
def test_a_tier_may_want_whole_requests(contract, world, policy):
    world.vllms.do["policy"] = contract.base.OffloadPolicy[policy]
    assert world.link.begin_request(CTX) is (policy == "REQUEST_LEVEL")
    assert world.adapter.on_new_request(CTX).policy is OffloadPolicy[policy]


@pytest.mark.parametrize("name", [member.name for member in LookupResult])
def test_an_answer_keeps_its_name(contract, world, name):
    world.vllms.do["lookup"] = lambda *_: contract.base.LookupResult[name]
    assert world.state.index.lookup(k(1), CTX) is LookupResult[name]
    assert world.vllms.calls[0][1] == k(1)


@pytest.mark.parametrize("answer", [None, True, 2, "HIT", []])
def test_an_answer_that_is_none_is_a_miss_and_costs_the_tier(world, answer, caplog):
    world.vllms.do["lookup"] = lambda *_: answer
    assert world.state.index.lookup(k(1), CTX) is MISS
    assert "tier disk: lookup failed" in caplog.text
    assert world.open_breakers == {"loads"}


def test_uses_and_ends_of_steps_reach_a_tier(contract, world):
    world.state.touch(ks(1, 2), CTX)
    world.link.end_step(ScheduleEndContext(("new",), ("preempted",)))
    world.link.end_step(None)
    ((_, keys, context),) = world.calls("touch")
    assert (list(keys), context) == (ks(1, 2), contract.convert.context_of(CTX))
    first, second = (call[1] for call in world.calls("on_schedule_end"))
    assert first == contract.base.ScheduleEndContext(("new",), ("preempted",))
    assert second == contract.base.ScheduleEndContext((), ())


# -- jobs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_promotion", [True, False])
def test_a_job_keeps_its_keys_and_slots(contract, world, is_promotion):
    world.start(7, (3, 1), is_promotion=is_promotion)
    ((method, job),) = world.calls("submit_load", "submit_store")
    assert method == ("submit_load" if is_promotion else "submit_store")
    assert type(job) is contract.tiering.TransferJob
    assert (job.job_id, list(job.keys), job.chunk_ids.tolist()) == (7, ks(3, 1), [0, 1])
    assert (job.is_promotion, job.submit_time) == (is_promotion, 1.5)
    assert job.req_context is contract.convert.context_of(CTX)


def test_a_result_ends_its_job(contract, world):
    world.start(is_promotion=False)
    (result,) = world.report(
        contract.tiering.JobResult(1, success=True, transfer_time=0.5, transfer_bytes=32)
    )
    assert result == JobResult(1, success=True, transfer_time=0.5, transfer_bytes=32)
    assert world.link.manager.get_released_jobs() == ()


def test_a_partial_result_names_what_was_loaded(contract, world):
    world.start()
    (result,) = world.report(
        contract.tiering.JobResult(1, success=False, successful_keys=[k(2)], transfer_time=0.5)
    )
    assert (result.success, result.successful_keys) == (False, {k(2)})
    assert isinstance(result.error, TierUnavailableError)


@pytest.mark.parametrize(
    "changed",
    [
        {"success": 1},
        {"successful_keys": 5},
        {"successful_keys": [[]]},
        {"successful_keys": [b"another job's"]},
        {"transfer_time": "soon"},
        {"transfer_bytes": -1},
    ],
    ids=str,
)
def test_an_invalid_report_fails_its_job_and_hides_no_other(contract, world, changed, caplog):
    world.start(1)
    world.start(2, (3,))
    bad = contract.tiering.JobResult(**{"job_id": 1, "success": False, **changed})
    results = world.report(bad, contract.tiering.JobResult(2, success=True))
    assert [(one.job_id, one.success) for one in results] == [(1, False), (2, True)]
    assert "tier disk: get_finished_jobs failed" in caplog.text


@pytest.mark.parametrize("what", [None, 5, "done", "unknown job", "twice"])
def test_a_report_of_no_job_is_logged_and_changes_nothing(contract, world, what, caplog):
    make = contract.tiering.JobResult
    world.start()
    rest = {"unknown job": [make(9, success=True)], "twice": [make(1, success=True)] * 2}
    results = world.report(*rest.get(what, [what]))
    assert [one.job_id for one in results] == ([1] if what == "twice" else [])
    assert "tier disk: get_finished_jobs failed" in caplog.text


def test_a_job_that_is_never_reported_is_overdue_after_twice_the_timeout(contract, plain):
    world = World(contract, plain, io_timeout_s=5.0)
    world.start()
    world.now_s = 11.4
    assert world.report() == []
    world.now_s = 11.5
    (result,) = world.report()
    assert (result.success, result.orphaned) == (False, True)
    assert isinstance(result.error, TierTimeoutError)
    assert world.report(contract.tiering.JobResult(1, success=True)) == [], "it has its result"
    assert [record.job.job_id for record in world.state.jobs.take_released()] == [1]


@pytest.mark.parametrize("is_promotion", [True, False])
def test_a_job_that_a_tier_refuses_fails(world, is_promotion):
    def refuse(_job):
        raise MemoryError("no room")

    world.vllms.do["submit_load" if is_promotion else "submit_store"] = refuse
    world.start(is_promotion=is_promotion)
    (result,) = world.ended()
    assert (result.success, "no room" in str(result.error)) == (False, True)


HOOKS = {
    "on_new_request": (lambda link: link.begin_request(CTX), False, set()),
    "lookup": (lambda link: link.state.index.lookup(k(1), CTX), MISS, {"loads"}),
    "touch": (lambda link: (link.state.touch(ks(1), CTX), link.flush())[1], None, set()),
    "on_request_finished": (
        lambda link: (link.begin_request(CTX), link.state.finish_request(CTX), link.flush())[2],
        None,
        set(),
    ),
    "get_finished_jobs": (lambda link: link.pump(), None, {"loads", "stores"}),
    "on_schedule_end": (lambda link: link.end_step(None), None, {"loads", "stores"}),
    "take_events": (lambda link: list(link.take_events()), [], set()),
    "has_pending_work": (lambda link: link.has_pending_work(), False, set()),
    "drain_jobs": (lambda link: link.drain(10.0), False, {"loads", "stores"}),
}


@pytest.mark.parametrize("error", [ValueError("third-party code"), AssertionError(), SystemExit(1)])
@pytest.mark.parametrize("method", HOOKS)
def test_no_error_of_a_tier_leaves_a_hook(world, method, error, caplog):
    def fail(*_arguments):
        raise error

    call, answer, open_breakers = HOOKS[method]
    world.vllms.do[method] = fail
    assert call(world.link) == answer
    assert f"tier disk: {method} failed" in caplog.text
    assert world.open_breakers == open_breakers


def test_a_tier_that_has_work_keeps_the_steps_going(world):
    assert not world.link.has_pending_work()
    world.vllms.do["has_pending_work"] = lambda: 1
    assert world.link.has_pending_work() is True


# -- events -------------------------------------------------------------------------------------


def test_events_keep_their_blocks_and_location(contract, world, caplog):
    base = contract.base
    world.vllms.events = [
        base.OffloadingEvent(ks(1, 2), base.Medium.STORAGE, removed=False, removal_expected=True),
        base.OffloadingEvent(5, base.Medium.CPU, removed=True),
        base.OffloadingEvent(ks(1), "STORAGE", removed=True),
        base.OffloadingEvent([k(3)], base.Medium.CPU, True, base.Locality.REMOTE, "theirs"),
    ]
    stored, removed = world.link.take_events()
    assert (stored.keys, stored.medium, stored.removed) == (tuple(ks(1, 2)), Medium.STORAGE, False)
    assert (stored.locality, stored.ownership, stored.removal_expected) == (None, "disk-2", True)
    assert (removed.keys, removed.medium, removed.removed) == ((k(3),), Medium.CPU, True)
    assert (removed.locality, removed.ownership) == (Locality.REMOTE, "disk-2")
    assert "tier disk: take_events failed" in caplog.text
    world.link.announce_anew()
    assert caplog.text.count("failed") == 1


# -- the calls that wait ------------------------------------------------------------------------


def test_a_drain_ends_when_the_tier_has_drained(contract, world):
    world.start()
    world.vllms.do["drain_jobs"] = lambda: world.vllms.results.append(
        contract.tiering.JobResult(1, success=True)
    )
    assert world.link.drain(10.0)
    assert [result.success for result in world.report()] == [True]


def test_while_a_drain_hangs_the_tier_is_left_alone_and_then_works_again(contract, world, caplog):
    hangs, entered = threading.Event(), threading.Event()
    world.vllms.do["drain_jobs"] = lambda: (entered.set(), hangs.wait(60))
    world.vllms.do["lookup"] = lambda *_: contract.base.LookupResult.HIT
    world.start()
    try:
        assert not world.link.drain(0.0)
        assert entered.wait(60)
        before = list(world.vllms.calls)
        assert world.state.index.lookup(k(1), CTX) is MISS
        world.start(2, (3,))
        (refused,) = world.ended()
        assert (refused.job_id, refused.success) == (2, False)
        assert "drain_jobs has not returned yet" in str(refused.error)
        assert not world.link.drain(10.0), "no second call meanwhile"
        world.link.end_step(None)
        assert world.report() == []
        assert world.vllms.calls == before
    finally:
        hangs.set()
    assert world.adapter._helper.call(bool).result(60) is False, "the hung call has ended"
    assert world.state.index.lookup(k(1), CTX) is HIT
    assert [r.success for r in world.report(contract.tiering.JobResult(1, success=True))] == [True]


def test_draining_and_closing_a_tier_start_no_thread(contract, world, monkeypatch):
    Threadless(monkeypatch, [])
    assert world.link.drain(10.0)
    assert world.link.close(10.0).is_clean
    assert [call[0] for call in world.calls("drain_jobs", "shutdown")][-1] == "shutdown"


def test_a_tier_without_its_thread_is_not_made_and_says_what_to_do(contract, plain, monkeypatch):
    Threadless(monkeypatch, [])
    with pytest.raises(TierUnavailableError, match=r"thread of tier disk cannot.*ulimit -u"):
        World(contract, plain)


def test_a_shutdown_drains_first_and_then_reports_the_last_results(contract, world):
    world.start()
    world.vllms.do["drain_jobs"] = lambda: world.vllms.results.append(
        contract.tiering.JobResult(1, success=True)
    )
    assert world.link.close(10.0).is_clean
    assert [call[0] for call in world.vllms.calls][-3:] == [
        "drain_jobs",
        "get_finished_jobs",
        "shutdown",
    ]
    world.link.pump()
    assert [result.success for result in world.ended()] == [True]
    world.link.pump()
    assert world.adapter.shutdown().is_clean, "idempotent"
    assert world.calls("shutdown") == [("shutdown",)]
    with pytest.raises(ClosedError, match="disk was shut down"):
        world.adapter.lookup(k(1), CTX)


def test_after_a_shutdown_a_tier_has_no_view_of_the_primary(world):
    view = world.vllms._primary_kv_view
    assert view.shape == (4, SLOT_BYTES)
    world.link.close(10.0)
    with pytest.raises(ValueError, match="released"):
        _ = view[0, 0]


@pytest.mark.parametrize("method", ["drain_jobs", "get_finished_jobs", "shutdown"])
def test_a_tier_is_shut_down_even_if_a_step_of_it_fails(world, method):
    view = world.vllms._primary_kv_view

    def fail():
        raise ValueError("third-party code")

    world.vllms.do[method] = fail
    report = world.link.close(10.0)
    assert "third-party code" in str(report.error)
    assert world.calls("shutdown")
    with pytest.raises(ValueError, match="released"):
        _ = view[0, 0]


# The drain before the shutdown has to end in time.
@pytest.mark.parametrize(("method", "timeout_s"), [("drain_jobs", 0.0), ("shutdown", 2.0)])
def test_a_shutdown_that_hangs_keeps_the_view_for_the_copies(world, method, timeout_s):
    hangs = threading.Event()
    world.vllms.do[method] = lambda: hangs.wait(60)
    try:
        assert isinstance(world.link.close(timeout_s).error, TimeoutError | TierTimeoutError)
        assert world.vllms._primary_kv_view[0, 0] == 0
    finally:
        hangs.set()


def test_a_view_that_a_system_call_still_uses_is_left_to_the_primary(world):
    view = ctypes.py_object(world.vllms._primary_kv_view)
    export = ctypes.create_string_buffer(128)  # a Py_buffer, as C code has while it copies
    ctypes.pythonapi.PyObject_GetBuffer(view, export, 0)
    try:
        assert world.link.close(10.0).is_clean
        assert world.vllms._primary_kv_view[0, 0] == 0, "still mapped"
    finally:
        ctypes.pythonapi.PyBuffer_Release(export)


# -- configuration ------------------------------------------------------------------------------


def test_a_tier_gets_its_options_and_vllms_spec(contract, plain):
    world = World(contract, plain, n_threads=3)
    assert world.vllms.given == ("vLLM's spec", "disk", "/kv", 3)
    assert (world.adapter.medium, world.adapter.locality) == (Medium.CPU, Locality.REMOTE)
    assert repr(world.adapter) == "<Plain disk, written for vLLM>"


def test_blocks_are_in_local_storage_unless_a_tier_says_otherwise(contract, plain):
    class Silent(plain):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.medium = None
            del self.locality

    adapter = World(contract, Silent).adapter
    assert (adapter.medium, adapter.locality) == (Medium.STORAGE, Locality.LOCAL)


def test_a_constructor_that_fails_leaves_no_view_of_the_primary(contract, plain):
    views = []

    class Failing(plain):
        def __init__(self, offloading_spec, primary_kv_view, tier_type, root_dir):
            views.append(primary_kv_view)
            raise OSError("no such directory")

    with pytest.raises(OSError, match="no such directory"):
        World(contract, Failing)
    with pytest.raises(ValueError, match="released"):
        _ = views[0][0, 0]


@pytest.fixture
def configured(contract, plain, monkeypatch):
    """Return what checks the configuration of a tier, by the names of class and module."""
    module = ModuleType("somebody_elses")
    module.Plain = plain
    monkeypatch.setitem(sys.modules, "somebody_elses", module)
    monkeypatch.setattr(SecondaryTierFactory, "_adapters", {})
    SecondaryTierFactory.register_adapter(
        contract.tiering.SecondaryTierManager, contract.tier_adapter.adapted
    )

    def check(**options):
        config = {"type": "Plain", "module_path": "somebody_elses", **options}
        SecondaryTierFactory.check_config(config)
        return config

    check.module = module
    return check


def test_without_an_adapter_the_class_is_refused(configured, monkeypatch):
    monkeypatch.setattr(SecondaryTierFactory, "_adapters", {})
    with pytest.raises(ConfigError, match="neither SecondaryTierManager nor AsyncTier"):
        configured(root_dir="/kv")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "root_dir: missing"),
        ({"root_dir": "/kv", "rot_dir": 1}, "unknown key 'rot_dir'.*root_dir"),
        ({"root_dir": "/kv", "min_blocks": 2}, "unknown key 'min_blocks'.*allowed: .*io_timeout_s"),
        ({"root_dir": "/kv", "n_threads": "2"}, "n_threads: '2' is not valid; .* an integer"),
        ({"root_dir": "/kv", "io_timeout_s": -1}, "io_timeout_s: -1"),
    ],
    ids=str,
)
def test_an_option_that_the_class_does_not_take_is_refused(configured, options, message):
    with pytest.raises(ConfigError, match=message):
        configured(**options)


def test_an_options_default_is_that_of_vllms_class_also_through_a_subclass(configured, plain):
    class Derived(plain):
        def __init__(self, *args, colour="red", **options):
            super().__init__(*args, **options)

    configured.module.Plain = Derived
    configured(root_dir="/kv", colour="blue", n_threads=3, io_timeout_s=3, backpressure_cls="ema")
    with pytest.raises(ConfigError, match=r"cls, colour, io_timeout_s, n_threads, \w+, root_dir$"):
        configured(root_dir="/kv", size=1)


def test_a_class_that_serves_other_engines_is_refused(configured, plain):
    class Serving(plain):
        def serve_external_requests(self, parent):
            pass

    configured.module.Plain = Serving
    with pytest.raises(
        ConfigError, match=r"Serving serves blocks .* TieringOffloadingSpec supports; use it"
    ):
        configured(root_dir="/kv")


CONFIG = {"cpu_bytes_to_use": "64KiB", "block_bytes": 4096, "check_invariants": True}


def test_without_vllm_around_it_a_tier_is_refused(configured):
    tier = configured(root_dir="/kv")
    with (
        TieringOffloadingSpec({**CONFIG, "secondary_tiers": [tier]}) as spec,
        pytest.raises(ConfigError, match=r"'Plain' is written for vLLM.*; use it under KVOffload"),
    ):
        spec.get_manager()


def test_blocks_come_back_from_a_tier_that_is_written_for_vllm(configured, contract, plain):
    class Keeping(plain):
        rows = {}  # noqa: RUF012 - the only object

        def submit_store(self, job_metadata):
            for key, slot in zip(job_metadata.keys, job_metadata.chunk_ids, strict=True):
                self.rows[key] = bytes(self._primary_kv_view.cast("B")[slot * 4096 :][:4096])
            self.results.append(contract.tiering.JobResult(job_metadata.job_id, success=True))

        def submit_load(self, job_metadata):
            for key, slot in zip(job_metadata.keys, job_metadata.chunk_ids, strict=True):
                self._primary_kv_view.cast("B")[slot * 4096 :][:4096] = self.rows[key]
            self.results.append(contract.tiering.JobResult(job_metadata.job_id, success=True))

        def lookup(self, key, req_context):
            answers = contract.base.LookupResult
            return answers.HIT if key in self.rows else answers.MISS

    class Spec(TieringOffloadingSpec):
        outer = "vLLM's spec"

    configured.module.Plain = Keeping
    tier = configured(root_dir="/kv", backpressure_cls="ema", io_timeout_s=5.0)
    with Spec({**CONFIG, "secondary_tiers": [tier]}) as spec:
        manager = spec.get_manager()
        (adapter,) = manager.secondary_tiers
        assert adapter.io_timeout_s == 5.0
        assert manager.planner.tiers[0].backpressure is not None
        view = manager.planner.primary
        ctx = ReqContext("r")
        manager.on_new_request(ctx)
        slots = manager.prepare_store(ks(1, 2), ctx).store_spec.block_ids
        rows = spec.get_manager().get_primary_kv_view().cast("B")
        for number, slot in enumerate(slots.tolist(), 1):
            rows[slot * 4096 : (slot + 1) * 4096] = bytes([number]) * 4096
        manager.complete_store(ks(1, 2), ctx)
        manager.on_schedule_end()
        manager.reset_cache()
        manager.on_reset_flushed()
        rows[:] = bytes(len(rows))
        assert manager.lookup_many(ks(1, 2, 3), ctx) == [PENDING, PENDING, MISS]
        manager.on_schedule_end()
        assert manager.lookup_many(ks(1, 2), ctx) == [HIT, HIT]
        slots = manager.prepare_load(ks(1, 2), ctx).block_ids.tolist()
        assert [set(rows[slot * 4096 : (slot + 1) * 4096]) for slot in slots] == [{1}, {2}]
        rows.release()
        manager.complete_load(ks(1, 2), ctx)
        manager.on_request_finished(ctx)
        manager.on_schedule_end()
        assert not manager.has_pending_work()
        assert view.num_slots == 16
