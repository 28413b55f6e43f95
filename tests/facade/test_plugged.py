"""`PluggedTiers`: tiers under a host's threads, one result for each call, rest before reuse."""

import os
import signal
import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from facade import gated_tiers
from facade.gated_tiers import DEADLINE_S, new_gates
from sealed_names import key_file

from kvoffload_async.abc.tier import CloseReport
from kvoffload_async.errors import (
    BlockMissingError,
    ConfigError,
    StateError,
    TierBusyError,
    TierClosedError,
    TierTimeoutError,
    TierUnavailableError,
)
from kvoffload_async.facade.plugged import MOST_LOOKUPS, PluggedTiers
from kvoffload_async.facade.tier_factory import check_tiers
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers._sealed_names import NameKeys, read_name_keys
from kvoffload_async.types import as_block_ids

SLOTS, SLOT_BYTES = 64, 4096
GATED = {"type": "GatedTier", "module_path": "facade.gated_tiers"}
PROBED = {"type": "ProbedTier", "module_path": "facade.gated_tiers"}
OTHER = {"type": "example"}


@pytest.fixture(autouse=True)
def gates(monkeypatch):
    with new_gates(monkeypatch) as gates:
        yield gates


@pytest.fixture
def rows():
    buffer = PrimaryBuffer(SLOTS, SLOT_BYTES)
    yield np.asarray(buffer.view)
    buffer.release()


@pytest.fixture
def plug(rows):
    made = []

    def make(*tiers, **options):
        made.append(PluggedTiers(tiers, memoryview(rows), **options))
        return made[-1]

    yield make
    for plugged in made:
        plugged.close(5.0)


def ks(*numbers):
    return [key_of(number) for number in numbers]


def fill(rows, *numbers):
    for number in numbers:
        rows[number] = np.resize(np.frombuffer(key_of(number), np.uint8), SLOT_BYTES)


def has(rows, row, number):
    return bytes(rows[row]) == bytes(np.resize(np.frombuffer(key_of(number), np.uint8), SLOT_BYTES))


def stored(plugged, rows, *numbers):
    """Store numbered blocks from the rows of the same numbers."""
    fill(rows, *numbers)
    transfer = plugged.store(ks(*numbers), as_block_ids(numbers))
    ended = transfer.ended.result(DEADLINE_S)
    transfer.at_rest.result(DEADLINE_S)
    assert ended == (frozenset(ks(*numbers)), None)


def result(future):
    return future.result(DEADLINE_S)


def test_blocks_come_back_from_any_thread(plug, rows):
    plugged = plug(OTHER)
    failures = []

    def work(first):
        try:
            numbers = range(first, first + 8)
            stored(plugged, rows, *numbers)
            transfer = plugged.load(ks(*numbers), as_block_ids([n + 32 for n in numbers]))
            assert result(transfer.ended).keys == frozenset(ks(*numbers))
            assert all(has(rows, n + 32, n) for n in numbers)
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 8, 16, 24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not failures
    (stats,) = plugged.stats()
    assert (stats.finished_jobs, stats.finished_loads) == (8, 4)


def test_a_callback_wakes_whoever_waits_and_may_call_again(plug, rows):
    plugged = plug(OTHER)
    fill(rows, 1)
    loaded, found = threading.Event(), []

    def look(ended):
        found.append((ended.result().keys, plugged.lookup(ks(1, 2), 5.0).result(DEADLINE_S)))
        loaded.set()

    plugged.store(ks(1), as_block_ids([1])).ended.add_done_callback(look)
    assert loaded.wait(DEADLINE_S)
    assert found == [(frozenset(ks(1)), [True, False])]


def test_tiers_are_looked_up_and_loaded_from_in_order(plug, rows, gates):
    plugged = plug(GATED, PROBED, OTHER)
    stored(plugged, rows, 0, 1, 2)
    blocks = [manager.tier._blocks for manager in plugged.managers]
    assert [len(block) for block in blocks] == [3, 3, 3]
    for tier, number in ((0, 1), (0, 2), (1, 2)):
        del blocks[tier][key_of(number)]
    plugged.managers[0].tier._env.blocks_evicted(ks(1, 2))
    stored(plugged, rows, 5)  # so that the removal was taken in
    assert result(plugged.lookup(ks(0, 1, 2, 3), 5.0)) == [True, True, True, False]
    counts = [(tier.lookups, tier.hits, tier.misses) for tier in plugged.stats()]
    assert counts == [(4, 1, 3), (3, 1, 2), (2, 1, 1)]
    transfer = plugged.load(ks(0, 1, 2, 3), as_block_ids([10, 11, 12, 13]))
    ended = result(transfer.ended)
    assert ended.keys == frozenset(ks(0, 1, 2))
    assert isinstance(ended.error, BlockMissingError)
    assert [has(rows, 10 + n, n) for n in range(4)] == [True, True, True, False]


def test_an_overdue_load_ends_in_time_and_rests_only_with_its_copy(plug, rows, gates):
    plugged = plug({**GATED, "io_timeout_s": 0.05}, OTHER)
    stored(plugged, rows, 1)
    gates[0].shut()
    gates[0].content = 7
    transfer = plugged.load(ks(1), as_block_ids([9]))
    ended = result(transfer.ended)
    assert ended.keys == frozenset()
    assert isinstance(ended.error, TierTimeoutError)
    assert not transfer.at_rest.done()
    rows[8] = 3  # another row is free
    gates[0].open()
    transfer.at_rest.result(DEADLINE_S)
    assert has(rows, 9, 1)  # the late copy wrote here, and nowhere else
    assert (rows[8] == 3).all()


def test_a_hung_tier_holds_up_neither_lookups_nor_other_tiers(plug, rows, gates):
    plugged = plug({**PROBED, "probe_timeout_s": 0.05}, OTHER)
    stored(plugged, rows, 1)
    gates[1].shut()
    assert result(plugged.lookup(ks(1, 2), 30.0)) == [True, False]
    gates[1].open()


def test_a_lookup_is_answered_at_its_deadline(plug, rows, gates):
    plugged = plug({**PROBED, "probe_timeout_s": 50.0})
    gates[1].shut()
    assert result(plugged.lookup(ks(1), 0.05)) == [False]
    assert not plugged._lookups
    gates[1].open()


def test_lookups_beyond_the_bound_are_answered_at_once(plug, gates, monkeypatch):
    monkeypatch.setattr("kvoffload_async.facade.plugged.MOST_LOOKUPS", 1)
    assert MOST_LOOKUPS == 1024
    plugged = plug({**PROBED, "probe_timeout_s": 50.0})
    gates[1].shut()
    waiting = plugged.lookup(ks(1), 50.0)
    assert plugged.lookup(ks(2), 50.0).result(0) == [False]
    assert not waiting.done()
    gates[1].open()
    assert result(waiting) == [False]


def test_a_failing_tier_is_suspended_and_then_misses(plug, rows, gates):
    plugged = plug({**GATED, "io_timeout_s": 0.02})
    stored(plugged, rows, 1)
    assert result(plugged.lookup(ks(1), 5.0)) == [True]
    gates[0].shut()
    transfers = [plugged.load(ks(1), as_block_ids([row])) for row in range(2, 5)]
    assert all(isinstance(result(t.ended).error, TierTimeoutError) for t in transfers)
    assert result(plugged.lookup(ks(1), 5.0)) == [False]
    assert plugged.stats()[0].skipped_lookups["suspended"] == 1
    refused = plugged.load(ks(1), as_block_ids([9]))
    assert isinstance(refused.ended.result(0).error, TierUnavailableError)
    assert refused.at_rest.done()
    gates[0].open()
    for transfer in transfers:
        transfer.at_rest.result(DEADLINE_S)
    assert plugged.managers[0].tier_state.promotion_slots == 0


def test_stores_are_refused_while_the_tier_is_slow(plug, rows, gates):
    settings = {"high_water_s_per_mib": 1e-8, "low_water_s_per_mib": 1e-9}
    plugged = plug({**GATED, "backpressure_cls": "ema", "backpressure": settings})
    stored(plugged, rows, 1)
    outcomes = [result(plugged.store(ks(n), as_block_ids([n])).ended).error for n in range(2, 40)]
    assert any(isinstance(error, TierBusyError) for error in outcomes)


class Seen:
    """What a tier is asked to pin, unpin and discard."""

    def __init__(self, plugged, monkeypatch):
        self.calls, self.changed = [], threading.Condition()
        (manager,) = plugged.managers
        for name in ("pin", "unpin", "discard"):
            monkeypatch.setattr(manager.tier, name, partial(self._note, name))

    def _note(self, name, keys):
        with self.changed:
            self.calls.append((name, *keys))
            self.changed.notify_all()

    def wait_for(self, *calls):
        with self.changed:
            assert self.changed.wait_for(lambda: self.calls == [*calls], DEADLINE_S), self.calls


def test_pins_are_counted_and_expire(plug, rows, monkeypatch):
    capable = replace(gated_tiers.GatedTier.capabilities, pins=True, discards=True)
    monkeypatch.setattr(gated_tiers.GatedTier, "capabilities", capable)
    plugged = plug(GATED)
    seen = Seen(plugged, monkeypatch)
    one, two, three = ks(1, 2, 3)
    plugged.pin([one, two], 60.0)
    plugged.pin([two], 60.0)
    plugged.unpin([one, two, three, one])
    seen.wait_for(("pin", one, two), ("pin", two), ("unpin", one, two))
    assert plugged.discard([one]) == []
    plugged.unpin([two])
    plugged.pin([one, three], 0.01)
    with seen.changed:
        assert seen.changed.wait_for(lambda: len(seen.calls) == 7, DEADLINE_S)
    assert seen.calls[3:6] == [("discard", one), ("unpin", two), ("pin", one, three)]
    assert (seen.calls[6][0], {*seen.calls[6][1:]}) == ("unpin", {one, three})
    assert not plugged._pins_of
    assert not plugged._pins


def test_pins_reach_a_tier_under_sealed_names(plug, tmp_path, monkeypatch):
    capable = replace(gated_tiers.GatedTier.capabilities, pins=True, discards=True)
    monkeypatch.setattr(gated_tiers.GatedTier, "capabilities", capable)
    path = key_file(tmp_path)
    plugged = plug({**GATED, "name_key_file": path})
    seen = Seen(plugged, monkeypatch)
    (one,) = ks(1)
    (name,) = NameKeys(read_name_keys([path])).sealed(0, [one])
    plugged.pin([one], 60.0)
    plugged.unpin([one])
    assert not plugged.discard([one])
    seen.wait_for(("pin", name), ("unpin", name), ("discard", name))


def test_a_tier_without_pins_is_not_asked(plug, monkeypatch):
    plugged = plug(GATED)
    seen = Seen(plugged, monkeypatch)
    plugged.pin(ks(1), 60.0)
    plugged.unpin(ks(1))
    assert plugged.discard(ks(1)) == ["GatedTier"]
    plugged.close(5.0)
    assert seen.calls == []


def test_nothing_fails_and_nothing_is_found_after_the_loop_has_ended(plug, rows, monkeypatch):
    capable = replace(gated_tiers.GatedTier.capabilities, pins=True)
    monkeypatch.setattr(gated_tiers.GatedTier, "capabilities", capable)
    plugged = plug(GATED)
    stored(plugged, rows, 1)
    plugged._bridge.close()
    plugged.pin(ks(1), 1.0)
    plugged.unpin(ks(1))
    assert not plugged.store(ks(2), as_block_ids([2])).at_rest.done()  # fails at the next call
    assert result(plugged.lookup(ks(1), 0.01)) == [False]
    plugged.close(1.0)


def test_closing_ends_every_call_and_says_what_still_runs(plug, rows, gates):
    plugged = plug({**GATED, "io_timeout_s": 50.0}, {**PROBED, "probe_timeout_s": 50.0})
    stored(plugged, rows, 1)
    for gate in gates:
        gate.shut()
    transfer = plugged.load(ks(1), as_block_ids([9]))
    lookup = plugged.lookup(ks(5), 50.0)
    assert gates[0].entered.wait(DEADLINE_S)
    assert gates[1].entered.wait(DEADLINE_S)
    report = plugged.close(0.05)
    assert len(report.unfinished_jobs) == 1
    assert isinstance(transfer.ended.result(0).error, TierClosedError)
    assert not transfer.at_rest.done()
    assert lookup.result(0) == [False]
    assert plugged.close(0.05) == report
    late = plugged.store(ks(2), as_block_ids([2]))
    assert isinstance(late.ended.result(0).error, TierClosedError)
    assert isinstance(plugged.load(ks(1), as_block_ids([2])).ended.result(0).error, TierClosedError)
    assert plugged.lookup(ks(1), 5.0).result(0) == [False]
    assert len(plugged.stats()) == 2


def test_events_are_passed_on_and_an_error_there_holds_up_nothing(plug, rows, caplog):
    seen = []

    def take(manager, events):
        assert manager.tier_type == "example"
        seen.extend((event.removed, *event.keys) for event in events)
        raise ValueError("the host's own")

    plugged = plug({**OTHER, "enable_kv_events": True}, on_events=take)
    stored(plugged, rows, 1)
    stored(plugged, rows, 2)
    plugged.close(5.0)
    assert seen == [(False, key_of(1)), (False, key_of(2))]
    assert "the host's own" in caplog.text
    caplog.clear()


@pytest.mark.parametrize(
    ("tier", "message"),
    [
        ({}, r"^tier\[1\]: .*must include 'type'"),
        ({"type": "slap"}, r"^tier\[1\]: .*slab"),
        ({"type": "example", "custom_parm": 1}, r"^tier\[1\]: .*custom_param"),
        ({"type": "fs", "root_dir": "/nowhere"}, r"^tier\[1\]: model: missing"),
    ],
)
def test_a_wrong_configuration_is_named_before_anything_starts(plug, tier, message, threads_left):
    with pytest.raises(ConfigError, match=message):
        check_tiers([OTHER, tier], key="tier")
    with pytest.raises(ConfigError, match=message):
        plug(OTHER, tier)
    assert not threads_left()


def test_two_tiers_cannot_share_a_directory(tmp_path):
    tier = {"type": "fs", "model": "m", "root_dir": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"tier\[1\]: root_dir.* is where tier\[0\] keeps"):
        check_tiers([tier, tier], key="tier")


def test_a_manager_that_only_a_planner_can_drive_is_refused(plug, threads_left, module):
    tier = {"type": "OwnManager", "module_path": "facade.gated_tiers"}
    with pytest.raises(ConfigError, match="OwnManager overrides methods"):
        plug(tier)
    assert not threads_left()


# -- closing ------------------------------------------------------------------------------------


def test_every_closer_waits_for_the_running_copy_and_gets_the_same_report(plug, rows, gates):
    plugged, reports = plug(GATED), []
    fill(rows, 1)
    gates[0].shut()
    plugged.store(ks(1), as_block_ids([1]))
    assert gates[0].entered.wait(DEADLINE_S)
    closers = [
        threading.Thread(target=lambda: reports.append(plugged.close(DEADLINE_S))) for _ in range(3)
    ]
    for closer in closers:
        closer.start()
    assert not reports, "a copy runs"
    gates[0].open()
    for closer in closers:
        closer.join(DEADLINE_S)
    assert reports == [CloseReport()] * 3
    assert reports[0] is reports[1] is reports[2]


def test_a_close_out_of_a_callback_is_refused_and_changes_nothing(plug, rows):
    plugged, raised, called = plug(OTHER), [], threading.Event()
    fill(rows, 1)

    def close(_ended):
        try:
            plugged.close(DEADLINE_S)
        except StateError as error:
            raised.append(error)
        called.set()

    plugged.lookup(ks(9), 0.01)
    plugged.store(ks(1), as_block_ids([1])).ended.add_done_callback(close)
    assert called.wait(DEADLINE_S)
    (error,) = raised
    assert "call it on another thread" in str(error)
    stored(plugged, rows, 2)
    with pytest.raises(StateError, match="loop's own thread"):
        plugged._runner.run(_closing(plugged.managers[0]), DEADLINE_S)
    stored(plugged, rows, 3)


async def _closing(manager):
    manager.shutdown()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_close_in_a_forked_child_returns_at_once_although_a_thread_closes_in_the_parent(
    plug, rows, gates
):
    plugged = plug(GATED)
    fill(rows, 1)
    gates[0].shut()
    plugged.store(ks(1), as_block_ids([1]))
    assert gates[0].entered.wait(DEADLINE_S)
    closer = threading.Thread(target=plugged.close, args=(DEADLINE_S,))
    closer.start()
    with plugged._lock:  # is held in the child for ever
        child = os.fork()
        if not child:
            signal.alarm(int(DEADLINE_S))
            os._exit(plugged.close(DEADLINE_S) != CloseReport())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    gates[0].open()
    closer.join(DEADLINE_S)
    assert plugged.close(0.0) == CloseReport()
