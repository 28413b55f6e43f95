"""`TieringOffloadingManager` when things go wrong: failures, deadlines, resets, shutdown.

A number at the end of a test's name is the vLLM issue or pull request whose fault it replays.
"""

import asyncio
import logging

import numpy as np
import pytest
from facade.worlds import (
    EXCLUSIVE,
    HIT,
    MISS,
    PENDING,
    PROBED,
    RETRY,
    Refusing,
    filled,
    k,
    ks,
    scripted,
)
from scripted_tier import Operation, ScriptedTier

from kvoffload_async.abc.tier import CloseReport
from kvoffload_async.core.health import BreakerSettings
from kvoffload_async.errors import (
    BlockMissingError,
    ClosedError,
    CorruptBlockError,
    OffloadError,
    TierUnavailableError,
)
from kvoffload_async.facade.primary import CPUPrimaryTierOffloadingManager
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.facade.tiering import TieringOffloadingManager
from kvoffload_async.types import ReqContext

NO_BREAKER = BreakerSettings(fault_threshold=1_000)


# -- failures -----------------------------------------------------------------------------------


def test_a_load_that_fails_is_not_tried_for_ever_49176_49328(worlds):
    world = worlds(EXCLUSIVE, breaker=NO_BREAKER)
    filled(world, 1)
    world.begin("r")
    assert world.lookup(1) is PENDING
    world.step()
    world.finish_job(error=OSError(5, "truncated"))
    assert world.lookup(1) is MISS, "the request recomputes it"
    world.step()
    assert not world.parked()
    world.begin("later")
    assert world.lookup(1, "later") is PENDING, "the next request may try again"


@pytest.mark.parametrize("error", [CorruptBlockError("bad"), BlockMissingError("gone")])
def test_one_bad_block_of_a_promotion_leaves_the_others_hit_50321(worlds, error):
    world = worlds()
    filled(world, 1, 2, 3)
    world.begin("r")
    for number in (1, 2, 3):
        world.lookup(number)
    world.step()
    world.finish_job(failures={2: error})
    assert [world.lookup(n) for n in (1, 2, 3)] == [HIT, HIT, MISS]
    world.load(1, 2)


def test_a_failed_cascade_unpins_its_blocks_and_they_stay_hit(worlds):
    world = worlds()
    world.begin("r")
    world.store(1)
    world.step()
    world.finish_job(error=OSError(28, "disk full"))
    world.poll()
    assert world.counts["pinned"] == 0
    assert world.lookup(1) is HIT


def test_a_tier_that_never_answers_defers_a_request_for_a_bounded_time_49829(worlds):
    world = worlds(EXCLUSIVE, io_timeout_s=1e6, deferral_timeout_s=10.0)
    filled(world, 1)
    world.begin("r")
    answers = []
    for _ in range(8):
        answers.append(world.lookup(1))
        world.step()
        world.runner.advance(2.0)
    assert answers == [PENDING] * 5 + [MISS] * 3


def test_a_tier_that_fails_again_and_again_does_not_reset_the_deferral_49850_53087(worlds):
    world = worlds(PROBED, deferral_timeout_s=10.0, breaker=NO_BREAKER)
    world.begin("r")
    answers = []
    for number in range(8):
        for tier in world.tiers:
            tier.blocks[k(number)] = np.zeros(32, np.uint8)
        answers.append(world.lookup(number))
        world.step()
        world.finish_all()
        world.runner.advance(2.0)
    assert answers[:5] == [RETRY] * 5
    assert set(answers[5:]) == {MISS}


def test_waiting_requests_leave_room_for_stores_49902(worlds):
    world = worlds(num_slots=8)
    filled(world, *range(8))
    answers = []
    for number in range(8):
        world.begin(f"w{number}")
        answers.append(world.lookup(number, f"w{number}"))
    assert answers == [PENDING] * 8
    world.step()
    assert world.counts["writing"] == 7
    world.begin("s")
    assert world.prepare_store(20, 21, req_id="s").keys_left_out == [k(21)]


def test_a_promoted_block_is_not_evicted_before_it_is_read_50014(worlds):
    world = worlds(num_slots=4)
    filled(world, 1, 2)
    world.begin("r")
    world.lookup(1)
    world.step()
    world.finish_job()
    world.poll()
    world.begin("s")
    granted = world.prepare_store(10, 11, 12, 13, req_id="s")
    assert granted.keys_left_out == [k(13)]
    assert world.lookup(1) is HIT
    world.load(1)


def test_a_slow_tier_has_a_bounded_share_of_the_primary_in_flight_50031(worlds):
    world = worlds(num_slots=8, copies_each=4)
    world.begin("r")
    world.store(*range(8))
    assert world.counts["pinned"] == 4
    assert world.manager.planner.cascades.queues[0].count == 4


def test_an_exception_out_of_submit_store_becomes_a_failed_result_and_leaks_no_pin(worlds):
    world = worlds(manager_class=Refusing)
    world.begin("r")
    world.secondaries[0].refuses = True
    world.store(1)
    world.step()
    counters = world.manager.planner.counters
    assert (counters.jobs_submitted, counters.job_results, counters.job_failures) == (1, 1, 1)
    assert world.counts["pinned"] == 0
    assert world.manager.planner.cascades.queues[0].count == 1, "it is tried again"


def test_an_exception_out_of_submit_load_becomes_a_miss_and_leaks_no_slot(worlds):
    world = worlds(manager_class=Refusing)
    filled(world, 1)
    world.begin("r")
    assert world.lookup(1) is PENDING
    world.secondaries[0].refuses = True
    world.step()
    assert world.lookup(1) is MISS
    assert world.counts["writing"] == 0
    assert not world.manager.planner.jobs


def test_a_job_past_its_deadline_frees_its_slot_only_when_its_copy_has_ended(worlds):
    world = worlds(EXCLUSIVE, io_timeout_s=5.0)
    filled(world, 1)
    world.begin("r")
    world.lookup(1)
    world.step()
    world.runner.advance(5.0)
    assert world.lookup(1) is MISS
    assert world.counts["held"] == 1
    world.finish_job()
    world.poll()
    assert world.counts["held"] == 0
    assert world.lookup(1) is MISS, "what comes late has not landed"


def test_a_cascade_past_its_deadline_stays_pinned_until_its_copy_has_ended(worlds):
    world = worlds(EXCLUSIVE, io_timeout_s=5.0, num_slots=2)
    world.begin("r")
    world.store(1, 2)
    world.step()
    world.runner.advance(5.0)
    world.poll()
    assert world.counts["pinned"] == 2
    assert world.prepare_store(3) is None, "nobody may have the slots under the copy"
    world.finish_job()
    world.poll()
    assert bytes(world.tiers[0].blocks[k(1)]) == bytes(world.rows[0])
    assert world.prepare_store(3) is not None


# -- reset --------------------------------------------------------------------------------------


def test_a_reset_waits_for_a_promotion_in_mid_copy_44541(worlds):
    world = worlds()
    filled(world, 1)
    world.begin("r")
    world.lookup(1)
    world.step()
    world.runner.loop.call_later(3.0, world.tiers[0].finish_all)
    world.manager.reset_cache()
    assert world.runner.now_s() >= 3.0
    assert world.counts["free"] == 8


def test_a_reset_with_a_hung_tier_is_bounded_and_keeps_the_slots_of_its_copies(worlds):
    world = worlds(EXCLUSIVE, drain_timeout_s=4.0)
    filled(world, 1)
    world.begin("r")
    world.lookup(1)
    world.step()
    world.store(2)
    world.step()
    before_s = world.runner.now_s()
    world.manager.reset_cache()
    assert world.runner.now_s() - before_s == pytest.approx(4.0)
    assert world.counts["held"] == 2
    assert not world.manager.planner.jobs
    world.manager.on_reset_flushed()
    world.begin("s")
    output = world.prepare_store(*range(10, 16), req_id="s")
    touched = {s for late in world.manager.planner.orphaned.values() for s in late.job.block_ids}
    assert not touched & set(output.store_spec.block_ids.tolist())
    world.complete_store(*range(10, 16), req_id="s")
    world.finish_all()
    world.rest()
    assert world.counts["held"] == 0


def test_promotions_are_held_after_a_reset_until_the_device_has_flushed(worlds):
    world = worlds()
    filled(world, 1)
    world.manager.reset_cache()
    world.begin("r")
    assert world.lookup(1) is MISS
    world.manager.on_reset_flushed()
    assert world.lookup(1) is PENDING, "the tier has kept its blocks"


def test_a_reset_discards_promotions_that_were_not_submitted_yet(worlds):
    world = worlds()
    filled(world, 1)
    world.begin("r")
    world.lookup(1)
    world.manager.reset_cache()
    world.manager.on_reset_flushed()
    world.step()
    assert not world.parked()
    assert world.counts["free"] == 8


# -- shutdown -----------------------------------------------------------------------------------


def test_shutdown_gives_every_tier_its_chance_and_keeps_the_memory_when_one_raises_52290(worlds):
    class Raising(SecondaryTierManager):
        raises = True

        def shutdown(self, timeout=None):
            if self.raises and self.tier_type == "tier0":
                raise RuntimeError("first tier")
            return super().shutdown(timeout)

    world = worlds(EXCLUSIVE, EXCLUSIVE, manager_class=Raising)
    world.begin("r")
    world.store(1)
    world.step()
    with pytest.raises(OffloadError, match="first tier"):
        world.manager.shutdown(1.0)
    assert world.tiers[1].parked, "the second one was asked to end its copy"
    assert world.rows[0].any(), "the memory is still there"
    assert not world.manager.planner.jobs
    counters = world.manager.planner.counters
    assert counters.jobs_submitted == counters.job_results == 2
    world.manager.shutdown(1.0)
    world.finish_all()
    Raising.raises = False
    world.secondaries[0].shutdown(1.0)
    world.primary.shutdown()


def test_shutdown_with_a_failing_close_names_the_tier_and_gives_the_memory_back(worlds):
    world = worlds(scripted(close_error=OSError("umount")), EXCLUSIVE)
    with pytest.raises(OffloadError, match="umount"):
        world.manager.shutdown(1.0)
    assert world.tiers[1].close_count == 1
    with pytest.raises(ClosedError):
        world.primary.get_primary_kv_view()


def test_an_error_of_a_close_that_has_no_text_is_still_one_of_ours(worlds):
    class Unspeakable(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    world = worlds(scripted(close_error=Unspeakable()), EXCLUSIVE)
    with pytest.raises(OffloadError, match="tiers did not shut down: Unspeakable"):
        world.manager.shutdown(1.0)
    assert world.tiers[1].close_count == 1


@pytest.mark.parametrize(
    "report",
    [
        CloseReport(unfinished_jobs=None),
        CloseReport(unfinished_jobs=(None,)),
        CloseReport(error="no"),
    ],
)
def test_a_report_of_a_close_that_makes_no_sense_is_a_failed_close(worlds, report):
    class Odd(SecondaryTierManager):
        def shutdown(self, timeout=None):
            super().shutdown(timeout)
            return report

    world = worlds(EXCLUSIVE, manager_class=Odd)
    with pytest.raises(OffloadError, match="the tier broke its contract with a CloseReport"):
        world.manager.shutdown(1.0)


@pytest.mark.parametrize("manager_class", [SecondaryTierManager, Refusing])
def test_each_copy_that_hangs_at_the_shutdown_is_reported_once(worlds, manager_class, caplog):
    world = worlds(EXCLUSIVE, EXCLUSIVE, manager_class=manager_class)
    world.begin("r")
    world.store(1)
    world.step()
    world.finish_job(1)
    world.manager.shutdown(0.1)
    assert "copies of 1 jobs still run" in caplog.text


@pytest.mark.parametrize("manager_class", [SecondaryTierManager, Refusing])
def test_what_closing_ends_is_no_fault_of_the_tier(worlds, manager_class, caplog):
    class Endless(ScriptedTier):
        async def store(self, job):
            await asyncio.sleep(3600)

        async def contains(self, keys):
            await asyncio.sleep(3600)

    breaker = BreakerSettings(fault_threshold=1)
    world = worlds(
        Endless(PROBED), manager_class=manager_class, breaker=breaker, io_timeout_s=600.0
    )
    world.begin("r")
    world.store(1)
    assert world.lookup(2) is RETRY
    world.step()
    world.store(3)
    caplog.clear()
    world.manager.shutdown(0.1)
    (tier,) = world.manager.stats().tiers
    assert tier.failed_jobs_by_error == {"TierClosedError": 2}
    assert tier.breaker_openings == {"load": 0, "store": 0}
    said = [r.getMessage() for r in caplog.records if not r.name.endswith("buffer")]
    assert all("have been lost" in line for line in said)


def test_a_tier_that_fails_while_the_engine_closes_is_not_said_to_be_tried_again(worlds, caplog):
    breaker = BreakerSettings(fault_threshold=1)
    world = worlds(EXCLUSIVE, breaker=breaker)
    world.begin("r")
    world.store(1)
    world.step()
    (parked,) = world.parked()
    world.runner.loop.call_later(0.01, lambda: world.tiers[0].finish(parked, error=OSError("gone")))
    world.manager.shutdown(1.0)
    assert "OSError: gone" in caplog.text
    assert "tried again" not in caplog.text


@pytest.mark.parametrize("direction", ["load", "store"])
def test_what_the_device_has_not_ended_to_copy_keeps_its_bytes_beyond_the_shutdown(
    worlds, direction
):
    world = worlds()
    world.begin("r")
    world.store(1)
    world.step()
    world.finish_all()
    world.step()
    if direction == "load":
        world.manager.prepare_load(ks(1), world.contexts["r"])
    else:
        world.prepare_store(2)
    world.manager.shutdown(1.0)
    assert world.rows.any()


def test_what_nobody_copies_is_given_back_at_the_shutdown(worlds):
    world = worlds()
    world.begin("r")
    world.store(1)
    world.step()
    world.finish_all()
    world.step()
    world.manager.shutdown(1.0)
    assert not world.rows.any()


def test_shutdown_with_hung_tiers_is_bounded_and_every_job_has_one_result(worlds):
    world = worlds(EXCLUSIVE, EXCLUSIVE, EXCLUSIVE)
    world.begin("r")
    world.store(1, 2)
    world.step()
    before_s = world.runner.now_s()
    world.manager.shutdown(1.0)
    assert world.runner.now_s() - before_s < 2.0, "the timeout is shared by all tiers"
    counters = world.manager.planner.counters
    assert counters.jobs_submitted == counters.job_results == 3
    assert world.counts["pinned"] == 2, "the copies still run"
    assert world.primary.get_primary_kv_view() is not None


def test_shutdown_ends_jobs_that_were_never_handed_over(worlds):
    world = worlds()
    world.begin("r")
    world.store(1)
    world.manager.shutdown(1.0)
    counters = world.manager.planner.counters
    assert counters.jobs_submitted == counters.job_results == 1
    assert world.counts["pinned"] == 0


def test_a_shut_down_manager_refuses_new_work_and_lets_the_old_end(worlds, caplog):
    caplog.set_level(logging.WARNING)
    world = worlds()
    world.begin("r")
    ctx = world.contexts["r"]
    world.store(1)
    world.manager.prepare_load(ks(1), ctx)
    world.prepare_store(2)
    world.rows = None
    world.manager.shutdown(1.0)
    world.manager.shutdown(1.0)
    for call in (
        lambda: world.begin("new"),
        lambda: world.manager.lookup(k(1), ctx),
        lambda: world.manager.prepare_store(ks(3), ctx),
        world.manager.reset_cache,
        world.manager.get_primary_kv_view,
    ):
        with pytest.raises(ClosedError):
            call()
    world.manager.complete_load(ks(1), ctx)
    world.manager.complete_store(ks(2), ctx)
    world.manager.on_request_finished(ctx)
    world.manager.on_schedule_end()
    assert not world.manager.has_pending_work()
    world.runner.close()
    (record,) = caplog.records
    assert "1 blocks have been lost" in record.message, "the store had not been handed over"


def test_the_jobs_of_a_tier_without_a_shared_bridge_are_handed_over_too(worlds):
    world = worlds()
    manager = TieringOffloadingManager(
        CPUPrimaryTierOffloadingManager(4), world.secondaries, clock=world.runner.now_s
    )
    ctx = ReqContext("r")
    manager.on_new_request(ctx)
    manager.prepare_store(ks(1), ctx)
    manager.complete_store(ks(1), ctx)
    manager.on_schedule_end()
    world.runner.run_ready()
    assert world.parked()
    manager.shutdown(1.0)


def test_a_probe_under_way_is_pending_work_but_no_job(worlds):
    world = worlds(PROBED)
    world.begin("r")
    world.lookup(1)
    world.step()
    assert world.parked()[0].kind is Operation.CONTAINS
    assert world.manager.has_pending_work()
    assert not world.manager.planner.has_pending_work
    world.finish_job(error=TierUnavailableError("no"))
    assert world.lookup(1) is MISS


def test_a_shutdown_that_failed_at_any_step_does_the_rest_when_it_is_repeated(worlds, monkeypatch):
    for step in ("end_tickets", "close"):
        world = worlds()
        with monkeypatch.context() as patch:
            patch.setattr(world.manager.planner, step, _interrupt)
            with pytest.raises(KeyboardInterrupt):
                world.manager.shutdown(1.0)
        world.manager.shutdown(1.0)
        assert not any(tier.is_open for tier in world.tiers)
        world.manager.shutdown(1.0)


def _interrupt():
    raise KeyboardInterrupt
