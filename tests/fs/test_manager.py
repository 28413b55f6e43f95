import asyncio
import errno
import os
import threading
from collections.abc import Iterable

import pytest
from faulty_files import FaultyFileOps, Hang, is_block, is_temp
from fs.directories import BLOCK, FsDirectory

from kvoffload_async import (
    CorruptBlockError,
    LookupResult,
    ReqContext,
    TieringOffloadingSpec,
    make_offload_key,
)
from kvoffload_async.errors import BlockMissingError, TierTimeoutError
from kvoffload_async.facade.secondary import FileSystemTierManager, SecondaryTierManager
from kvoffload_async.testing.harness import ManagerHarness, key_of

DEADLINE_S = 60.0
K = [key_of(number) for number in range(40)]

HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY


@pytest.fixture
def ops():
    ops = FaultyFileOps()
    yield ops
    ops.heal()


def ask(harness: ManagerHarness, ctx: ReqContext, *keys) -> list[LookupResult]:
    """Look up, and end the step."""
    answers = [harness.manager.lookup(key, ctx) for key in keys]
    harness.manager.on_schedule_end()
    return answers


def answers(harness: ManagerHarness, ctx: ReqContext, *keys) -> list[LookupResult]:
    """Look up until all is known."""
    harness.wait(lambda: RETRY not in ask(harness, ctx, *keys))
    return ask(harness, ctx, *keys)


def test_nothing_touches_the_disk_on_the_owners_thread(directory, ops):
    with directory.manage(ops, capacity_bytes=1 << 20) as harness:
        ctx = ReqContext("r")
        harness.submit_store(K[:4], range(4))
        harness.wait()
        assert answers(harness, ctx, *K[:6]) == [HIT] * 4 + [MISS] * 2
        harness.submit_load(K[:4], range(10, 14))
        harness.wait()
        harness.manager.touch(K[:4], ctx)
        harness.manager.on_schedule_end()
    assert ops.calls
    assert threading.get_ident() not in ops.thread_ids


def test_all_keys_of_a_step_are_one_probe(directory, ops):
    with directory.manage(ops) as harness:
        directory.put(K[1])
        ctx = ReqContext("r")
        before = len(ops.calls)
        assert ask(harness, ctx, *K[:5]) == [RETRY] * 5
        assert answers(harness, ctx, *K[:5]) == [MISS, HIT, MISS, MISS, MISS]
        assert ops.counts(before) == {"stat": 5}
        answers(harness, ctx, *K[:5])
        assert ops.counts(before) == {"stat": 5}, "a verdict is asked for once a request"


def test_a_hung_probe_delays_nobody_elses(directory, ops):
    """Regressions 44193, 45765."""
    with directory.manage(ops) as harness:
        directory.put(K[1])
        hang = ops.hang(on="stat", when=lambda c: c.path == str(directory.path(K[0])))
        first, second = ReqContext("first"), ReqContext("second")
        assert ask(harness, first, K[0]) == [RETRY]
        assert hang.entered.wait(DEADLINE_S)
        assert answers(harness, second, K[1], K[2]) == [HIT, MISS]
        assert ask(harness, first, K[0]) == [RETRY]
        hang.release()
        assert answers(harness, first, K[0]) == [MISS]


def test_a_verdict_is_not_applied_to_a_later_probe_of_the_same_key(directory, ops):
    """Regression 54872: finish A, start B, deliver A."""
    with directory.manage(ops) as harness:
        hang = ops.hang(on="stat", when=lambda c: c.path == str(directory.path(K[0])), times=1)
        first = ReqContext("first")
        assert ask(harness, first, K[0]) == [RETRY]
        assert hang.entered.wait(DEADLINE_S)
        # The probe's deadline passes: it is answered, and the request ends.
        harness.on_loop(lambda: _expire_probes(harness.manager))
        harness.wait(lambda: ask(harness, first, K[0]) != [RETRY])
        harness.manager.on_request_finished(first)
        second = ReqContext("second")
        assert answers(harness, second, K[0]) == [MISS]
        directory.put(K[0])  # so that the late verdict is another one
        hang.release()
        actor = harness.manager.link.actor
        harness.run(_ended(actor.probes.tasks))
        harness.collect()
        assert ask(harness, second, K[0]) == [MISS]
        harness.manager.on_request_finished(second)
        assert answers(harness, ReqContext("third"), K[0]) == [HIT]


async def _ended(tasks: Iterable) -> None:
    await asyncio.wait([*tasks, asyncio.get_running_loop().create_task(asyncio.sleep(0))])
    await asyncio.sleep(0)


def _expire_probes(manager: SecondaryTierManager) -> None:
    probes = manager.link.actor.probes
    for generation in list(probes._unanswered):
        probes._answer(generation, frozenset(), None)


def test_a_newcomer_shares_a_probe_in_flight(directory, ops):
    """Regression 55823."""
    directory.put(K[0])
    with directory.manage(ops) as harness:
        hang = ops.hang(on="stat", when=lambda c: c.path == str(directory.path(K[0])))
        first, second = ReqContext("first"), ReqContext("second")
        assert ask(harness, first, K[0]) == [RETRY]
        assert hang.entered.wait(DEADLINE_S)
        harness.manager.on_request_finished(first)
        assert ask(harness, second, K[0]) == [RETRY]
        hang.release()
        assert answers(harness, second, K[0]) == [HIT]
        probes = [c for c in ops.calls if c.name == "stat" and c.path == str(directory.path(K[0]))]
        assert len(probes) == 1


@pytest.mark.parametrize("damage", ["truncated", "flipped", "removed", "unreadable"])
def test_a_failed_load_flips_the_verdict_to_absent(directory, ops, damage):
    """Regressions 49176, 49328: a failed load was promoted again for ever."""
    with directory.manage(ops) as harness:
        harness.submit_store(K[:2], range(2))
        harness.wait()
        ctx = ReqContext("r")
        assert answers(harness, ctx, *K[:2]) == [HIT, HIT]
        path = directory.path(K[0])
        if damage == "truncated":
            os.truncate(path, 100)
        elif damage == "flipped":
            path.write_bytes(bytes(BLOCK))
        elif damage == "removed":
            path.unlink()
        else:
            ops.fail(errno.EIO, on="preadv", when=lambda c: c.path == str(path))
        job = harness.submit_load(K[:2], [10, 11])
        harness.wait()
        result = harness.result_of(job)
        assert not result.success
        assert result.successful_keys == frozenset(K[1:2])
        assert harness.holds(K[1], 11)
        assert ask(harness, ctx, *K[:2]) == [MISS, HIT]
        assert path.exists() == (damage == "unreadable")


def test_a_corrupt_block_is_stored_again_by_the_next_request(directory):
    with directory.manage() as harness:
        harness.submit_store(K[:1], [0])
        harness.wait()
        directory.path(K[0]).write_bytes(bytes(BLOCK))
        job = harness.submit_load(K[:1], [10])
        harness.wait()
        assert isinstance(harness.result_of(job).error, CorruptBlockError)
        harness.submit_store(K[:1], [0])
        harness.wait()
        assert harness.result_of(harness_load(harness, K[0])).success


def harness_load(harness: ManagerHarness, key):
    job = harness.submit_load([key], [20])
    harness.wait()
    return job


# -- deadlines ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("call", "is_load"), [("preadv", True), ("pwritev", False)])
def test_a_job_past_its_deadline_is_reported_and_keeps_its_slots(directory, ops, call, is_load):
    with directory.manage() as harness:
        harness.submit_store(K[:1], [0])
        harness.wait()
    with directory.manage(ops, io_timeout_s=0.1) as harness:
        hang = ops.hang(on=call, when=is_block if is_load else is_temp)
        submit = harness.submit_load if is_load else harness.submit_store
        job = submit(K[:1] if is_load else K[1:2], [5])
        harness.wait()
        result = harness.result_of(job)
        assert isinstance(result.error, TierTimeoutError)
        assert result.orphaned
        assert hang.entered.is_set()
        harness.collect()
        assert harness.released == [], "its slot was given back while the call was running"
        if is_load:
            assert harness.is_untouched(5)
        hang.release()
        harness.wait_released({job.job_id})
        assert len(harness.results) == 1
        if is_load:
            assert harness.holds(K[0], 5)


def test_a_pipe_in_a_blocks_place_hangs_nothing_and_is_replaced(directory):
    path = directory.path(K[0])
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    with directory.manage(io_timeout_s=30.0) as harness:
        job = harness.submit_load([K[0]], [10])
        harness.wait()
        assert isinstance(harness.result_of(job).error, BlockMissingError)
        job = harness.submit_store([K[0]], [0])
        harness.wait()
        assert harness.result_of(job).success
        job = harness.submit_load([K[0]], [11])
        harness.wait()
        assert harness.holds(K[0], 11)


# -- shutdown -----------------------------------------------------------------------------------


def hung_manager(
    directory: FsDirectory, ops: FaultyFileOps, view, **options
) -> FileSystemTierManager:
    return FileSystemTierManager(
        None, view, root_dir=str(directory.root), model="test", ops=ops, **options
    )


def hang_everything(ops: FaultyFileOps) -> Hang:
    """From now on every system call hangs: what a dead mount does."""
    return ops.hang()


def test_shutdown_on_a_hung_mount_is_bounded_with_one_result_a_job(directory, ops):
    harness = directory.manage(ops)
    hang = hang_everything(ops)
    jobs = [harness.submit_store([key], [slot]) for slot, key in enumerate(K[:12])]
    jobs += [harness.submit_load([key], [20 + slot]) for slot, key in enumerate(K[:6])]
    ctx = ReqContext("r")
    ask(harness, ctx, *K[20:24])
    assert hang.entered.wait(DEADLINE_S)
    report = harness.manager.shutdown(timeout=0.1)
    harness.collect()
    assert sorted(r.job_id for r in harness.results) == sorted(j.job_id for j in jobs)
    assert not any(result.success for result in harness.results)
    assert report.unfinished_jobs, "their memory must not be released"
    assert not report.is_clean
    hang.release()
    _end(harness)


def test_shutdown_on_a_hung_mount_without_jobs_is_bounded(directory, ops):
    harness = directory.manage(ops)
    hang = hang_everything(ops)
    report = harness.manager.shutdown(timeout=0.1)
    hang.release()
    assert report.error is not None
    assert not report.unfinished_jobs
    _end(harness)


def _end(harness: ManagerHarness) -> None:
    """End what a hung shutdown has left behind."""
    for thread in threading.enumerate():
        if thread.name.startswith("kvoffload-io"):
            thread.join(DEADLINE_S)
    harness.bridge.close()


def tiering(directory: FsDirectory, ops: FaultyFileOps, **options):
    """A spec with two tiers: `fs` on a mount that will hang, and `example`."""
    spec = TieringOffloadingSpec(
        {
            "cpu_bytes_to_use": 64 * BLOCK,
            "block_bytes": BLOCK,
            "model": "test",
            "secondary_tiers": [
                {"type": "fs", "root_dir": str(directory.root), "ops": ops, **options},
                {"type": "example"},
            ],
        }
    )
    return spec, spec.get_manager()


def test_a_hung_tier_keeps_neither_the_owner_nor_another_tier_waiting(directory, ops):
    spec, manager = tiering(directory, ops, io_timeout_s=0.2)
    hang = hang_everything(ops)
    calls_before = len(ops.calls)
    owner = threading.get_ident()
    steps = 0
    keys = [make_offload_key(n.to_bytes(32, "big")) for n in range(1, 200)]
    stored = 0
    example = manager.secondary_tiers[1]
    while stored < 60:
        ctx = ReqContext(f"r{steps}")
        manager.on_new_request(ctx)
        key = keys[stored]
        manager.lookup(key, ctx)
        output = manager.prepare_store([key], ctx)
        if output is not None:
            manager.complete_store([key], ctx)
            stored += 1
        manager.on_request_finished(ctx)
        manager.on_schedule_end()
        steps += 1
        manager.wait_for_progress(0.02)
    assert hang.entered.is_set()
    num_blocks = example.get_num_blocks()
    spec.shutdown(timeout=0.1)
    hang.release()
    for thread in threading.enumerate():
        if thread.name.startswith("kvoffload-io"):
            thread.join(DEADLINE_S)
    assert num_blocks >= 50, "the other tier did not go on"
    assert owner not in {c.thread_id for c in ops.calls[calls_before:]}


def test_the_deadline_of_a_hung_tier_lets_lookups_go_on(directory, ops):
    spec, manager = tiering(directory, ops, io_timeout_s=0.2, probe_timeout_s=0.2)
    hang = ops.hang(on="stat open")
    ctx = ReqContext("r")
    key = make_offload_key(bytes(32))
    manager.on_new_request(ctx)
    for _ in range(100):
        answer = manager.lookup(key, ctx)
        manager.on_schedule_end()
        if answer is not RETRY:
            break
        manager.wait_for_progress(1.0)
    assert answer is MISS
    hang.release()
    spec.shutdown(timeout=DEADLINE_S)
