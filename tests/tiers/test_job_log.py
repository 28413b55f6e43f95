"""What the log says of jobs: each once, and in enough words."""

import asyncio
import logging

import pytest
from facade.worlds import k
from tiers.actors import IO_TIMEOUT_S

from kvoffload_async import SecondaryTierFactory
from kvoffload_async.errors import (
    CallTimeoutError,
    CorruptBlockError,
    JobCancelledError,
    TierFullError,
    TierTimeoutError,
    TierUnavailableError,
)
from kvoffload_async.testing.harness import make_job
from kvoffload_async.tiers._actor import JobLog


@pytest.fixture(autouse=True)
def every_level(caplog):
    caplog.set_level(logging.DEBUG, "kvoffload_async.tiers._actor")


def logged(caplog):
    return [
        (record.levelname, record.getMessage())
        for record in caplog.records
        if record.name.endswith("_actor")
    ]


def test_a_job_that_ends_well_is_told_for_debugging(worlds, caplog):
    world = worlds()
    world.start(7, (1, 2))
    world.finish_job()
    (line,) = logged(caplog)
    text = "tier t: store of 2 blocks for request r7 (job 7) ended after 0.0000 s"
    assert line == ("DEBUG", text)


def test_an_overdue_job_is_an_error_once_however_its_copy_ends(worlds, caplog):
    world = worlds()
    world.start(7)
    world.runner.run(asyncio.sleep(IO_TIMEOUT_S + 1), IO_TIMEOUT_S + 2)
    world.finish_job(0, error=TierUnavailableError("down"))
    (first, text), (second, end) = logged(caplog)
    assert (first, second) == ("ERROR", "DEBUG")
    assert f"timed out after {IO_TIMEOUT_S} s; its copy continues" in text
    assert text.endswith("(check its storage; if it is only slow, raise io_timeout_s)")
    assert end.endswith(f"failed after {IO_TIMEOUT_S + 1:.4f} s: down")


def test_a_job_whose_time_is_over_before_it_began_is_an_error(worlds, caplog):
    world = worlds(concurrent_stores=1, concurrent_blocks=0)
    world.start(1)
    world.start(2)
    world.runner.run(asyncio.sleep(IO_TIMEOUT_S + 1), IO_TIMEOUT_S + 2)
    overdue, late = logged(caplog)
    assert [level for level, _ in (overdue, late)] == ["ERROR", "ERROR"]
    assert "(job 2) timed out" in late[1]


@pytest.mark.parametrize("closes", [False, True])
def test_back_pressure_and_the_shutdown_are_no_errors(worlds, caplog, closes):
    world = worlds(queued_jobs=0)
    if closes:
        world.actor._closing = True
    world.start(1)
    assert [level for level, _ in logged(caplog)] == ["DEBUG"]


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (TierUnavailableError("EIO"), "continues without these blocks; fix the cause above"),
        (CorruptBlockError("xxh3"), "check the storage)"),
        (TierFullError("no room"), "enlarge its storage)"),
        (JobCancelledError("cancelled"), "cancelled"),
    ],
)
def test_a_job_that_fails_is_one_line_with_a_remedy(worlds, caplog, error, remedy):
    world = worlds()
    world.start(7, (1, 2))
    world.finish_job(0, error=error)
    ((level, text),) = logged(caplog)
    assert level == "ERROR"
    assert text.startswith("tier t: store of 2 blocks for request r7 (job 7) failed after 0.0000 s")
    assert str(error) in text
    assert remedy in text


@pytest.mark.parametrize(
    ("tier_type", "error", "remedy"),
    [
        ("valkey", CallTimeoutError("no answer"), "raise call_timeout_s)"),
        ("valkey", TierTimeoutError("deadline"), "raise io_timeout_s)"),
        ("slab", CorruptBlockError("xxh3"), "check the disk: kvoffload store verify)"),
        ("valkey", CorruptBlockError("xxh3"), "check the memory of the server)"),
    ],
)
def test_the_remedy_is_that_of_the_tiers_type(caplog, tier_type, error, remedy):
    remedies = SecondaryTierFactory.get_tier_class(tier_type).tier_class.remedies
    JobLog(tier_type, remedies).ended(
        make_job(7, [k(1)], [0], is_promotion=True), {0: error}, None, seconds=1.0, now_s=0.0
    )
    ((_, text),) = logged(caplog)
    assert text.endswith(remedy)
