"""One replay as a library call: how it is stopped, given up, and what it complains of."""

import json
import threading
from dataclasses import replace

import pytest

from kvoffload_async import TieringOffloadingSpec
from kvoffload_async.cli.settings import ReplayFlags, ScratchFolder, resolve
from kvoffload_async.core.prefetch import Prefetch
from kvoffload_async.errors import StalledError
from kvoffload_async.replay.device import FramePool
from kvoffload_async.replay.drivers import Arrivals, ReplayOptions
from kvoffload_async.replay.drivers.stepwise import StepwiseDriver
from kvoffload_async.replay.drivers.workers import Workers
from kvoffload_async.replay.report import Tally
from kvoffload_async.replay.run import replay, stall_timeout_s, unique_names
from kvoffload_async.replay.source import NUM_REQUESTS, ChatWorkload, TraceFile
from kvoffload_async.transport.paged import PagedMemory


class TestStop:
    def test_stopping_ends_the_requests_in_flight(self, command):
        answers = iter([False] * 50)
        spec = resolve(ReplayFlags(primary_blocks=100, tiers=["example"]), ScratchFolder())
        options = ReplayOptions(concurrency=4, should_stop=lambda: next(answers, True))
        report = replay(spec, ChatWorkload(), options)
        assert report.interrupted
        assert 0 < report.requests < NUM_REQUESTS
        assert report.complaints == []

    def test_work_that_never_ends_is_given_up_at_the_deadline(self, faulty_tiers):
        spec = resolve(ReplayFlags(tiers=[f"Stuck:module_path={faulty_tiers}"]), ScratchFolder())
        manager = spec.get_manager()
        tally = Tally.of_tiers(["Stuck"], device_keeps=False)
        workers = Workers(spec, [PagedMemory(2, 16 * 1024)], tally)
        pool = FramePool(2, keeps_contents=False)
        driver = StepwiseDriver(
            manager, workers, pool, tally, ReplayOptions(), stall_timeout_s=0.25
        )
        with pytest.raises(StalledError, match="0 requests wait and 1 jobs have no result"):
            driver.run(Arrivals.at_once([[1, 2]]))
        assert not driver.drain(0.05)
        workers.shutdown(5)
        spec.shutdown(0.2)
        assert manager.planner.counters.job_results == 1

    def test_the_stall_deadline_is_behind_the_engines_own(self):
        tiers = [{"type": "example", "io_timeout_s": 70}, {"type": "example"}]
        config = {"cpu_bytes_to_use": 4096, "block_bytes": 1}
        assert stall_timeout_s(TieringOffloadingSpec(config)) > 30
        spec = TieringOffloadingSpec({**config, "secondary_tiers": tiers})
        assert stall_timeout_s(spec) > 70


@pytest.mark.parametrize("has_samples", [False, True])
@pytest.mark.parametrize("engine", ["sync", "async"])
def test_every_step_is_reported(engine, has_samples):
    steps = []
    spec = resolve(ReplayFlags(tiers=["example"]), ScratchFolder())
    options = ReplayOptions(
        engine=engine, has_samples=has_samples, on_step=lambda: steps.append(None)
    )
    assert replay(spec, ChatWorkload(limit=3), options).requests == 3
    assert len(steps) >= 3


def timed(command, requests):
    """Write a trace whose requests arrive a second apart."""
    lines = ({"timestamp": 1000 * n, "hash_ids": list(ids)} for n, ids in enumerate(requests))
    return command.file("\n".join(map(json.dumps, lines)), "timed.jsonl")


@pytest.mark.parametrize("engine", ["sync", "async"])
@pytest.mark.parametrize("device_blocks", [(), ("--device-blocks", 200)])
def test_requests_that_wait_are_prefetched(command, engine, device_blocks):
    trace = timed(command, ChatWorkload(60))
    options = ("--tier", f"fs:root_dir={command.directory}", "--primary-blocks", 150)
    options += ("--engine", engine, "--passes", 2, "--concurrency", 4, *device_blocks)
    report = command.figures(trace, *options, "--arrivals", 1_000_000)
    assert report["requests"] == report["warm"]["requests"] == 60
    assert report["warm"]["hit_ratio"] > 0.95
    assert report["queued_s"]["max"] > 0
    counts = report["warm"]["tiers"]["fs"]
    assert 0 <= counts["unused_prefetched_blocks"] < counts["prefetched_blocks"]
    if not device_blocks:  # else the device may have them when their turn comes
        used = counts["loaded_blocks"] - counts["unused_prefetched_blocks"]
        assert used * 0.9 <= report["warm"]["hits"]["fs"] <= counts["loaded_blocks"] * 1.2
    assert report["jobs_submitted"] == report["job_results"]
    assert report["corrupt_blocks"] == report["leaked_pins"] == 0
    without = command.figures(trace, *options, "--arrivals", 1_000_000, "--no-prefetch")
    assert without["warm"]["tiers"]["fs"]["prefetched_blocks"] == 0
    assert without["warm"]["hit_ratio"] > 0.95


@pytest.mark.parametrize("engine", ["sync", "async"])
def test_requests_far_apart_do_not_wait(command, engine):
    trace = timed(command, [[1, 2], [1, 2], [3]])
    options = ("--engine", engine, "--tier", "example", "--arrivals", 20)
    report = command.figures(trace, *options)
    assert report["requests"] == 3
    assert report["hits"]["primary"] == 2
    assert report["tiers"]["example"]["prefetched_blocks"] == 0


@pytest.mark.parametrize("engine", ["sync", "async"])
def test_stopping_ends_the_requests_that_wait(command, engine, monkeypatch):
    tier, trace = f"fs:root_dir={command.directory}", timed(command, ChatWorkload(60))
    command.figures(trace, "--tier", tier)
    landed, waiting = Prefetch.landed, threading.Event()

    def note(prefetch, tier, request, keys):
        landed(prefetch, tier, request, keys)
        if request in prefetch._room.early:
            waiting.set()

    monkeypatch.setattr(Prefetch, "landed", note)
    spec = resolve(ReplayFlags(primary_blocks=100, tiers=[tier]), ScratchFolder())
    options = ReplayOptions(engine=engine, arrivals=1e6, concurrency=2, should_stop=waiting.is_set)
    source = TraceFile(trace)
    report = replay(spec, source, options)
    source.close()
    assert report.interrupted
    assert report.requests < 60
    assert report.complaints == []


class TestReport:
    def test_complains_of_what_must_never_happen(self):
        spec = resolve(ReplayFlags(tiers=["example"]), ScratchFolder())
        good = replay(spec, ChatWorkload(limit=3), ReplayOptions())
        assert good.complaints == []
        bad = replace(good, corrupt_blocks=1, leaked_pins=2, job_results=good.job_results - 3)
        assert bad.complaints == [
            "1 loaded blocks had wrong bytes",
            "2 slots were never given back",
            "3 jobs got no result",
        ]


def test_no_deferral_expires_although_many_requests_wait_for_a_small_primary():
    """Healthy: the tier is a dictionary. Of 48 requests at once, some waited 30 s for others."""
    spec = resolve(ReplayFlags(primary_blocks=64, tiers=["example"]), ScratchFolder())
    report = replay(spec, ChatWorkload(limit=200), ReplayOptions(concurrency=48))
    assert report.complaints == []
    assert report.deferrals_expired == 0


def test_names_of_tiers_are_unique():
    assert unique_names(["fs", "primary", "fs", "device"]) == [
        "fs",
        "primary#2",
        "fs#2",
        "device#2",
    ]
