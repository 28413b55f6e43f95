"""Owners of threads and memory: what a forked child is told, and what nobody closed."""

import asyncio
import gc
import os
import threading
import traceback
import weakref

import pytest

from kvoffload_async import OffloadEngine, StateError, TieringOffloadingSpec
from kvoffload_async.errors import TierTimeoutError
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.runtime import lifetime
from kvoffload_async.runtime.bridge import Bridge
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.runtime.lifetime import Closing
from kvoffload_async.runtime.loop import LoopThread
from kvoffload_async.runtime.process_folder import ProcessFolder
from kvoffload_async.testing.harness import make_job
from kvoffload_async.tiers.example import ExampleTier
from kvoffload_async.types import ReqContext, make_offload_key

CONFIG = {
    "cpu_bytes_to_use": 4 * 4096,
    "block_bytes": 64,
    "model": "test",
    "secondary_tiers": [{"type": "example"}],
}
KEY = make_offload_key(b"k" * 32)
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
PASSED, FAILED = 0, 1
DEADLINE_S = 60.0


class Transport:
    def close(self, timeout_s):
        return True


def in_child(check):
    """Fork, and let the child check; its traceback is on the test's output if it fails."""
    pid = os.fork()
    if not pid:
        code = FAILED
        try:
            check()
            code = PASSED
        except BaseException:  # noqa: BLE001 - a child must not go on as a test run
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == PASSED


def refuses(call, *args):
    with pytest.raises(StateError, match=r"before this process was forked.*spawn"):
        call(*args)


def forget(kept):
    kept.clear()
    gc.collect()


# -- closing --------------------------------------------------------------------------------------


class Door:
    """Is closed at its own pace, by whoever closes it first.

    Attributes:
        attempts: The threads that have closed it.
    """

    def __init__(self, outcomes):
        self.closing = Closing()
        self.outcomes = list(outcomes)
        self.attempts = []
        self.entered, self.goes_on = threading.Event(), threading.Event()

    def close(self, timeout_s=DEADLINE_S):
        return self.closing.run(self._close, timeout_s)

    def _close(self, timeout_s):
        self.attempts.append((threading.get_ident(), timeout_s))
        self.entered.set()
        assert self.goes_on.wait(DEADLINE_S)
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def closed_by(door, callers, meanwhile):
    """Have threads close a door, of which the first waits within; return what each got."""
    got = []

    def call():
        try:
            got.append(door.close())
        except Exception as error:  # noqa: BLE001 - compared by the test
            got.append(error)

    first, *later = [threading.Thread(target=call) for _ in range(callers)]
    first.start()
    assert door.entered.wait(DEADLINE_S)
    for thread in later:
        thread.start()
    meanwhile(got)
    door.goes_on.set()
    for thread in (first, *later):
        thread.join(DEADLINE_S)
    return got


@pytest.mark.parametrize("outcome", ["report", ValueError("no")])
def test_later_callers_wait_for_the_first_and_get_its_outcome(outcome):
    door = Door([outcome])
    got = closed_by(door, 4, list)
    assert got == [outcome] * 4
    assert len(door.attempts) == 1


def test_nobody_returns_before_it_is_closed():
    door, seen = Door(["report"]), []
    closed_by(door, 3, seen.extend)
    assert not seen


def test_a_closed_object_keeps_its_outcome_and_one_that_failed_is_closed_again():
    door = Door([ValueError("no"), "report"])
    door.goes_on.set()
    with pytest.raises(ValueError, match="no"):
        door.close()
    assert [door.close(), door.close()] == ["report", "report"]
    assert len(door.attempts) == 2


def test_closing_out_of_itself_is_refused():
    door, refused = Door(["report"]), []

    def close_again(timeout_s):
        with pytest.raises(StateError, match="runs on this thread already"):
            door.close()
        refused.append(timeout_s)
        return "report"

    assert door.closing.run(close_again, 3.0) == "report"
    assert refused == [3.0]


def test_a_caller_waits_no_longer_than_the_first_may_take(monkeypatch):
    monkeypatch.setattr(lifetime, "_GRACE_S", 0.0)
    door = Door(["report"])
    first = threading.Thread(target=door.close, args=(0.0,))
    first.start()
    assert door.entered.wait(DEADLINE_S)
    with pytest.raises(TierTimeoutError, match="must stay allocated"):
        door.close()
    door.goes_on.set()
    first.join(DEADLINE_S)
    assert door.close() == "report"


# -- forks ----------------------------------------------------------------------------------------


def test_in_a_forked_child_every_call_of_a_manager_and_its_spec_says_so():
    ctx = ReqContext("r")
    with TieringOffloadingSpec(CONFIG) as spec:
        manager = spec.get_manager()
        manager.on_new_request(ctx)
        manager.lookup(KEY, ctx)

        def check():
            refuses(manager.lookup, KEY, ctx)
            refuses(manager.prepare_store, [KEY], ctx)
            refuses(manager.complete_store, [KEY], ctx)
            refuses(manager.on_request_finished, ctx)
            refuses(manager.on_schedule_end)
            refuses(manager.invalidate, 1)
            refuses(spec.get_manager)
            manager.shutdown()
            spec.shutdown()
            with TieringOffloadingSpec(CONFIG) as own:
                own.get_manager().on_new_request(ctx)

        in_child(check)
        assert manager.prepare_store([KEY], ctx) is not None, "the parent goes on"
        manager.complete_store([KEY], ctx)
        manager.on_request_finished(ctx)


def test_in_a_forked_child_every_call_of_an_engine_says_so():
    async def use():
        async with (
            OffloadEngine(CONFIG, lambda _view: Transport()) as engine,
            engine.request("r", [b"k" * 32]) as request,
        ):

            def check():
                refuses(engine.request, "s", [])
                refuses(engine.lookup, request)
                refuses(engine.store, request, [0])
                refuses(engine.reset)
                refuses(engine.events)
                with pytest.raises(StopIteration):
                    engine.close().send(None)

            in_child(check)
            assert await engine.lookup(request) == 0

    asyncio.run(use())


@pytest.mark.parametrize("is_shared", [False, True])
def test_in_a_forked_child_every_call_of_a_tiers_manager_says_so(is_shared):
    buffer = PrimaryBuffer(4, 4096)
    bridge = Bridge(LoopThread())
    shared = {"runtime": bridge} if is_shared else {}
    manager = SecondaryTierManager(None, buffer.view, "t", ExampleTier(), **shared)
    ctx, job = ReqContext("r"), make_job(1, [KEY], [0], is_promotion=False)
    asked = []

    def check():
        refuses(manager.submit_store, job)
        refuses(manager.submit_load, job)
        refuses(manager.lookup, KEY, ctx)
        refuses(manager.get_finished_jobs)
        refuses(manager.on_schedule_end)
        refuses(manager.drain_jobs)
        refuses(manager.stats)
        manager.link.bridge.runner.run = asked.append
        assert manager.shutdown().is_clean
        assert not asked, "it would wait for the parent's threads"
        own = SecondaryTierManager(None, PrimaryBuffer(4, 4096).view, "t", ExampleTier())
        own.submit_store(job)
        assert own.drain_jobs(60.0)
        own.shutdown()

    in_child(check)
    manager.submit_store(job)
    assert manager.drain_jobs(60.0), "the parent goes on"
    assert [result.success for result in manager.get_finished_jobs()] == [True]
    assert manager.shutdown().is_clean
    bridge.close()


def test_a_forked_child_does_not_remove_its_parents_folder(tmp_path):
    folder = ProcessFolder(str(tmp_path))

    def check():
        folder.close()
        assert list(tmp_path.iterdir())

    in_child(check)
    folder.close()
    assert not list(tmp_path.iterdir())


def test_a_spec_that_was_never_shut_down_warns_and_is_not_kept_alive():
    spec = TieringOffloadingSpec(CONFIG)
    manager = spec.get_manager()
    seen = weakref.ref(spec)
    with pytest.warns(ResourceWarning, match=r"TieringOffloadingSpec was never.*shutdown\(\)"):
        del spec  # no cycle keeps it
    assert seen() is None
    loop_thread = manager._bridge.runner
    manager.shutdown()
    loop_thread.close()


def test_a_manager_that_was_never_shut_down_warns():
    with TieringOffloadingSpec(CONFIG) as spec:
        tier = spec.get_manager().secondary_tiers[0]
        seen = weakref.ref(spec._driver)
        with pytest.warns(ResourceWarning, match=r"TieringOffloadingManager was never"):
            spec._driver = None
        assert seen() is None
        assert tier.shutdown().is_clean


def test_an_engine_that_was_never_closed_warns():
    async def leave_open():
        kept = [await OffloadEngine(CONFIG, lambda _view: Transport()).__aenter__()]
        spec, seen = kept[0]._spec, weakref.ref(kept[0])
        with pytest.warns(ResourceWarning, match=r"OffloadEngine was never closed.*close\(\)"):
            forget(kept)
        assert seen() is None
        await asyncio.to_thread(spec.shutdown)

    asyncio.run(leave_open())


def test_what_was_closed_or_never_opened_does_not_warn(recwarn):
    TieringOffloadingSpec(CONFIG)
    OffloadEngine(CONFIG, lambda _view: Transport())
    with TieringOffloadingSpec(CONFIG) as spec:
        spec.get_manager()
    del spec
    with pytest.raises(Exception, match="cpu_bytes_to_use"):
        OffloadEngine({"model": "m"}, lambda _view: Transport())
    gc.collect()
    assert not recwarn.list
