"""Both drivers, from the device to the tiers and back."""

import contextlib
import itertools
import json
import os
import random
import threading

import pytest
from laboratory.fleet.plan import UnboundedCache
from simulated_cuda.device import Progress, Schedule, SimulatedCuda, SimulatedStream

from kvoffload_async.abc.tier import Direction
from kvoffload_async.async_engine.surface import OffloadEngine
from kvoffload_async.cli.settings import ReplayFlags, ScratchFolder, resolve
from kvoffload_async.errors import ConfigError, StalledError, TransportError
from kvoffload_async.facade.spec import TieringOffloadingSpec
from kvoffload_async.facade.tiering import TieringOffloadingManager
from kvoffload_async.replay import run
from kvoffload_async.replay.drivers import ReplayOptions
from kvoffload_async.replay.run import replay
from kvoffload_async.replay.source import NUM_REQUESTS, ChatWorkload, TraceFile
from kvoffload_async.runtime.machine import Limit
from kvoffload_async.transport.host import HostTransport

ENGINES = ["sync", "async"]
SMALL = ("--limit", 60, "--primary-blocks", 96)
"""Few requests of the built-in workload, and a primary that is too small for them."""
both = pytest.mark.parametrize("engine", ENGINES)


def assert_sound(report):
    assert report["jobs_submitted"] == report["job_results"]
    assert report["corrupt_blocks"] == report["leaked_pins"] == 0


def test_without_verification_nothing_counts_as_verified():
    spec = resolve(ReplayFlags(tiers=["example"], primary_blocks=96), ScratchFolder())
    report = replay(spec, ChatWorkload(limit=60), ReplayOptions(verify=False))
    assert report.verified_blocks == report.corrupt_blocks == 0
    assert report.hits["primary"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["--primary-blocks", 150, "--limit", 100],
        ["--tier", "example", "--limit", 100],
        ["--tier", "example", "--policy", "arc", "--limit", 100],
        ["--tier", "example", "--tier", "example", "--limit", 100],
        ["--tier", "example", "--device-blocks", 120, "--limit", 100],
        ["--block-bytes", 100, "--limit", 50, "--tier", "example"],
    ],
)
def test_both_engines_have_the_same_figures(command, arguments):
    first, second = (command.figures(*arguments, "--engine", engine) for engine in ENGINES)
    assert first["hit_ratio"] == second["hit_ratio"] > 0
    assert first["bytes_from_device"] == second["bytes_from_device"]
    if "arc" not in arguments:  # which counts the uses of a request in another order
        assert first["hits"] == second["hits"]
    assert_sound(first)
    assert_sound(second)
    assert [first["engine"], second["engine"]] == ENGINES


@both
def test_many_requests_at_once(command, engine):
    report = command.figures(
        *("--tier", "example", "--concurrency", 16, "--device-blocks", 400, "--engine", engine)
    )
    assert report["requests"] == NUM_REQUESTS
    assert report["hit_ratio"] == pytest.approx(0.7976, abs=0.01)
    assert report["hits"]["device"] > 500
    assert report["verified_blocks"] >= sum(report["hits"].values())
    assert_sound(report)


@both
def test_a_device_that_keeps_everything_has_all_the_hits(command, engine):
    hits = UnboundedCache.over(ChatWorkload(100)).hits
    arguments = ("--primary-blocks", 100, "--limit", 100, "--engine", engine)
    report = command.figures(*arguments, "--tier", "example", "--device-blocks", 5000)
    assert set(report["hits"].items()) == {("device", hits), ("primary", 0), ("example", 0)}
    assert report["device_blocks"] == 5000
    assert report["bytes_to_device"] == report["bytes_loaded"] == 0


@both
def test_a_device_that_keeps_nothing_has_no_hits_and_room_for_all(command, engine):
    trace = command.trace([[1, 2, 3], [1, 2, 3, 4]])
    report = command.figures(trace, "--engine", engine, "--concurrency", 3)
    assert "device" not in report["hits"]
    assert report["device_blocks"] == 12
    assert report["layers"] == 2


def test_bytes_are_counted_both_ways(command):
    report = command.figures(command.trace([[1, 2], [1, 2, 3]]), "--block-bytes", 6000)
    assert report["bytes_from_device"] == 3 * 6000
    assert report["bytes_to_device"] == 2 * 6000


def test_a_request_that_is_preempted_counts_once(command):
    requests = [list(range(first, first + 40)) for first in range(0, 400, 40)] * 2
    report = command.figures(
        command.trace(requests), "--concurrency", 4, "--device-blocks", 60, "--primary-blocks", 900
    )
    assert report["preemptions"] > 0
    assert report["requests"] == 20
    assert report["block_refs"] == 800
    assert report["hits"]["primary"] + report["hits"]["device"] == 400
    assert_sound(report)


def test_preemption_while_others_load(command):
    requests = [[*range(30), *range(100 * i, 100 * i + 40)] for i in range(1, 9)] * 3
    report = command.figures(
        *(command.trace(requests), "--concurrency", 8, "--device-blocks", 80),
        *("--primary-blocks", 120, "--tier", "example"),
    )
    assert report["requests"] == 24
    assert report["preemptions"] > 0
    assert_sound(report)


def test_async_requests_wait_for_room(command):
    requests = [list(range(first, first + 40)) for first in range(0, 400, 40)]
    report = command.figures(
        *(command.trace(requests), "--concurrency", 4, "--device-blocks", 60, "--engine", "async")
    )
    assert (report["requests"], report["preemptions"]) == (10, 0)
    assert_sound(report)


def test_blocks_that_a_load_left_out_are_computed(command, monkeypatch):
    load = OffloadEngine.load

    async def load_half(engine, request, blocks, *args):
        return await load(engine, request, list(blocks)[: len(blocks) // 2], *args)

    whole = command.figures(*SMALL, "--tier", "example", "--engine", "async")
    monkeypatch.setattr(OffloadEngine, "load", load_half)
    halves = command.figures(*SMALL, "--tier", "example", "--engine", "async")
    assert 0 < halves["bytes_loaded"] < whole["bytes_loaded"]
    assert_sound(halves)


def test_a_request_whose_blocks_find_no_room_stays_and_offers_them_again(command, monkeypatch):
    prepare_store, offers = TieringOffloadingManager.prepare_store, []

    def refuse_once(manager, keys, ctx, *, is_last=False):
        is_first = all(req_id != ctx.req_id for req_id, _ in offers)
        offers.append((ctx.req_id, is_last))
        if is_first:
            return None
        return prepare_store(manager, keys, ctx, is_last=is_last)

    reads = itertools.count(0, 1000)
    monkeypatch.setattr(TieringOffloadingManager, "prepare_store", refuse_once)
    monkeypatch.setattr(TieringOffloadingManager, "room_made", property(lambda _: next(reads)))
    trace = command.trace([range(10), range(10, 20), range(20)])
    report = command.figures(trace)
    assert [is_last for _, is_last in offers] == [False] * 6
    assert report["stores_refused"] == 0
    assert_sound(report)


@both
def test_a_request_larger_than_the_device_is_one_line(command, engine):
    trace = command.trace([[1], [1, 2, 3]])
    line = command.refusal("replay", trace, "--device-blocks", 2, "--engine", engine)
    assert "request-1 has 3 blocks, and the device room for 2" in line


@both
def test_bytes_that_do_not_arrive_are_found_out(command, engine, monkeypatch):
    perform = HostTransport._perform

    def copy_wrongly(self, direction, transfer):
        perform(self, direction, transfer)
        if direction is Direction.LOAD:
            pages = self._layout.groups[0][1].pages.numpy()
            pages[transfer.parts[0].blocks[-1], 3] ^= 1

    monkeypatch.setattr(HostTransport, "_perform", copy_wrongly)
    arguments = ("--tier", "example", "--engine", engine, "--json", "-")
    result = command.run("replay", *arguments, *SMALL)
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    assert report["corrupt_blocks"] > 0
    assert "loaded blocks had wrong bytes" in result.stderr


@both
@pytest.mark.parametrize("direction", [Direction.LOAD, Direction.STORE])
def test_copies_that_fail_cost_hits_and_nothing_else(command, engine, direction, monkeypatch):
    perform = HostTransport._perform

    def perform_or_fail(self, at, transfer):
        if at is direction:
            raise TransportError("pulled out")
        perform(self, at, transfer)

    monkeypatch.setattr(HostTransport, "_perform", perform_or_fail)
    report = command.figures("--tier", "example", "--engine", engine, "--limit", 40)
    assert report["requests"] == 40
    assert report["hit_ratio"] == 0
    assert report["bytes_to_device"] == 0
    assert_sound(report)


@pytest.mark.parametrize("keys", [{"num_workers": 2}, {"blocks_per_chunk": 4}])
def test_several_workers_and_several_device_blocks(command, keys):
    plain = command.figures("--tier", "example", "--limit", 60)
    config = command.config(**keys)
    report = command.figures("--tier", "example", "--limit", 60, "--config", config)
    assert report["hits"] == plain["hits"]
    assert report["bytes_to_device"] == plain["bytes_to_device"] * keys.get("num_workers", 1)
    assert_sound(report)


def test_async_with_several_device_blocks(command):
    config = command.config(blocks_per_chunk=4)
    report = command.figures("--limit", 60, "--config", config, "--engine", "async")
    assert report["hit_ratio"] > 0
    assert_sound(report)


def test_async_has_one_worker(command):
    config = command.config(num_workers=2)
    assert "one worker" in command.refusal("replay", "--config", config, "--engine", "async")


@pytest.mark.parametrize("option", ["--engine", "--device"])
def test_what_is_no_engine_and_no_device(command, option):
    assert f"{option} warp: expected" in command.refusal("replay", option, "warp")


@both
def test_a_device_that_is_not_there(command, engine, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    line = command.refusal("replay", "--device", "cuda", "--engine", engine)
    assert "there is no CUDA device; give cpu" in line


@both
def test_blocks_that_the_host_cannot_hold_are_refused_before_any_is_allocated(
    command, engine, monkeypatch
):
    monkeypatch.setattr(run, "memory_limit", lambda: Limit(1 << 20, "this machine's memory"))
    monkeypatch.setattr("kvoffload_async.transport.paged.PagedMemory", None)
    options = ("--device-blocks", 64, "--engine", engine)
    line = command.refusal("replay", *options, "--block-bytes", "16KiB")
    assert "--device-blocks: 64 blocks of 16384 bytes" in line
    assert "it has 1048576" in line


def simulated_device(**options):
    """A device whose streams run in a random order."""
    numbers = random.Random(20)
    schedule = Schedule(Progress.RANDOM, [numbers.randrange(12) for _ in range(9973)])
    return SimulatedCuda(schedule, **options)


def replayed(source, runtime, *, primary_blocks=None, **options):
    """Replay with the built-in workload's tier on a device, None being the host."""
    flags = ReplayFlags(block_bytes="1KiB", primary_blocks=primary_blocks)
    with ScratchFolder() as scratch:
        spec = resolve(flags, scratch)
        return replay(spec, source, ReplayOptions(runtime=runtime, **options)).to_dict()


@both
def test_blocks_that_a_device_cannot_hold_are_refused_before_any_is_allocated(engine, monkeypatch):
    monkeypatch.setattr("kvoffload_async.transport.paged.PagedMemory", None)
    device = simulated_device(memory_bytes=1 << 16)
    with pytest.raises(ConfigError, match=r"--device-blocks: 64 blocks .* it has 65536"):
        replayed(ChatWorkload(1), device, engine=engine, device_blocks=64)


@pytest.mark.slow
@both
def test_a_simulated_device_finds_what_the_host_finds(engine):
    plain = replayed(ChatWorkload(40), None, engine=engine)
    report = replayed(ChatWorkload(40), simulated_device(), engine=engine)
    for figure in ("hits", "verified_blocks", "bytes_to_device"):
        assert report[figure] == plain[figure]
    assert_sound(report)


def test_a_simulated_device_preempts_requests(command):
    trace = command.trace([range(at, at + 20) for at in range(0, 200, 10)])
    options = {"device_blocks": 30, "concurrency": 4, "primary_blocks": 60}
    with contextlib.closing(TraceFile(trace)) as source:
        report = replayed(source, simulated_device(), **options)
    assert report["preemptions"] > 0
    assert report["verified_blocks"] > 0
    assert_sound(report)


@pytest.mark.slow
@both
def test_a_simulated_device_shows_a_transport_that_waits_for_nothing(engine, monkeypatch):
    monkeypatch.setattr(SimulatedStream, "wait_event", lambda *_: None)
    report = replayed(ChatWorkload(60), simulated_device(), engine=engine)
    assert report["corrupt_blocks"] > 0


@both
def test_a_pipe_is_replayed_although_nobody_knows_how_large_requests_are(command, engine):
    pipe = command.directory / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=('{"hash_ids": [1, 2]}\n' * 3,))
    writer.start()
    report = command.figures(pipe, "--engine", engine, "--block-bytes", "1KiB")
    writer.join(60)
    assert (report["requests"], report["hits"]["primary"]) == (3, 4)


class TestAsync:
    """What the synchronous driver's tests ask of it, asked of the other one."""

    @pytest.mark.parametrize("tier", ["BitFlip", "Swapped", "Stale"])
    def test_a_tier_that_hands_back_wrong_bytes(self, command, faulty_tiers, tier):
        spec = f"{tier}:module_path={faulty_tiers}"
        report = command.figures("--tier", spec, "--engine", "async", *SMALL, exit_code=1)
        assert report["corrupt_blocks"] > 0

    def test_a_tier_that_fails(self, command, faulty_tiers):
        spec = f"Unplugged:module_path={faulty_tiers}"
        report = command.figures("--tier", spec, "--engine", "async", "--limit", 100)
        assert report["job_failures"] > 0
        assert report["hits"]["Unplugged"] == 0
        assert_sound(report)

    def test_a_tier_that_cannot_be_opened(self, command, faulty_tiers):
        spec = f"Closed:module_path={faulty_tiers}"
        assert "nobody there" in command.refusal("replay", "--tier", spec, "--engine", "async")

    def test_a_tier_that_cannot_be_closed(self, command, faulty_tiers):
        spec = f"Jammed:module_path={faulty_tiers}"
        result = command.run("replay", "--tier", spec, "--engine", "async", "--limit", 5)
        assert result.exit_code == 1
        assert "jammed" in result.stderr

    def test_a_request_larger_than_the_primary(self, command, monkeypatch):
        monkeypatch.setattr("kvoffload_async.replay.drivers.asynchronous.ROOM_S", 0.01)
        trace = command.trace([range(10), range(10)])
        report = command.figures(trace, "--primary-blocks", 4, "--engine", "async")
        assert report["hits"] == {"primary": 4}
        assert report["stores_refused"] == 1  # the second: the primary is full of its own head

    def test_no_room_for_anything(self, command, monkeypatch):
        monkeypatch.setattr("kvoffload_async.replay.drivers.asynchronous.ROOM_S", 0.01)
        monkeypatch.setattr(TieringOffloadingSpec, "accepts_prefixes", False)
        trace = command.trace([range(10)])
        report = command.figures(trace, "--primary-blocks", 4, "--engine", "async")
        assert report["stores_refused"] == 1
        assert_sound(report)

    @pytest.mark.usefixtures("interrupted_workload")
    def test_ctrl_c(self, command):
        report = command.figures("--engine", "async", "--concurrency", 2, exit_code=130)
        assert report["interrupted"]
        assert 0 < report["requests"] < 10
        assert_sound(report)

    def test_ctrl_c_while_requests_wait(self, faulty_tiers, monkeypatch):
        monkeypatch.setattr("kvoffload_async.replay.run._bounded", lambda _spec, _options: 0.3)
        spec = resolve(ReplayFlags(tiers=[f"Stuck:module_path={faulty_tiers}"]), ScratchFolder())
        stops = threading.Event()
        timer = threading.Timer(0.3, stops.set)
        timer.start()
        options = ReplayOptions(engine="async", should_stop=stops.is_set)
        report = replay(spec, ChatWorkload(limit=3), options)
        timer.join()
        assert report.interrupted
        assert report.jobs_submitted == report.job_results == 1

    def test_work_that_never_ends_is_given_up(self, faulty_tiers, monkeypatch):
        monkeypatch.setattr("kvoffload_async.replay.run.stall_timeout_s", lambda _spec: 0.2)
        config = {"type": "Stuck", "module_path": faulty_tiers}
        spec = resolve(
            ReplayFlags(tiers=[f"Stuck:module_path={config['module_path']}"]), ScratchFolder()
        )
        monkeypatch.setattr("kvoffload_async.replay.run._bounded", lambda _spec, _options: 0.3)
        with pytest.raises(StalledError, match="1 jobs have no result"):
            replay(spec, ChatWorkload(limit=3), ReplayOptions(engine="async"))
