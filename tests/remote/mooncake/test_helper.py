"""What becomes of the tier when its helper process hangs, aborts, lies or is killed.

The library is made up (`fake_library.py`); the process is the real one.
"""

import asyncio
import gc
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from remote.mooncake.fakes import K, children, helper_of, is_running, restart
from servers.process import READY_S, wait_until

from kvoffload_async.abc.tier import KVIdentity
from kvoffload_async.errors import (
    ConfigError,
    ServerHangError,
    TierError,
    TierFullError,
    TierTimeoutError,
    TierUnavailableError,
    drop_tracebacks,
)
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.runtime.io_pool import IoPool
from kvoffload_async.testing.harness import TierHarness, content_of
from kvoffload_async.tiers._environment import ActorEnvironment
from kvoffload_async.tiers.files.digests import IntegrityKey
from kvoffload_async.tiers.mooncake import helper as helper_module
from kvoffload_async.tiers.mooncake import process as process_module
from kvoffload_async.tiers.mooncake.cells import Geometry, SharedCells

SLOT_BYTES = 4096
PATIENCE_S = 100.0


def opened(tier, num_slots=64):
    return TierHarness(tier, num_slots, SLOT_BYTES, PATIENCE_S)


def begun(harness, coroutine):
    """Begin on the harness's loop; return its future."""
    return asyncio.run_coroutine_threadsafe(coroutine, harness.bridge.runner._loop)


def given_up_probe(fake, harness, how="wait-in-exist"):
    """Ask, and give up once the helper hangs with it."""
    (fake.faults / "reached").unlink(missing_ok=True)
    fake.fail(how)
    asked = begun(harness, harness.tier.contains(K[:2]))
    fake.wait_for_fault()
    asked.cancel()


def why_failed(future):
    """Return what a coroutine has raised, without what it was working on."""
    error = future.exception(PATIENCE_S)
    drop_tracebacks(error)
    return error


def open_files():
    gc.collect()  # a mapping has one, and an error may hold the mapping
    return len(list(Path("/proc/self/fd").iterdir()))


def wait_for_end(pid):
    """Wait until a process has ended that need not be a child."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([process], [], [], READY_S)[0], f"{pid} goes on"
    finally:
        os.close(process)


# -- opening ------------------------------------------------------------------------------------


def test_a_library_that_hangs_while_it_joins_costs_the_opening_its_deadline(fake):
    fake.fail("hang-in-setup")
    buffer = PrimaryBuffer(4, SLOT_BYTES)
    before = children()
    with pytest.raises(TierTimeoutError, match=r"did not open within 0\.3 s"):
        SecondaryTierManager(None, buffer.view, "mooncake", fake.tier(), open_timeout_s=0.3)
    wait_until(lambda: children() == before)  # killed, and perhaps not waited for yet
    assert buffer.release()


def test_an_opening_that_is_given_up_ends_a_helper_that_hangs(fake):
    fake.fail("hang-in-setup")
    tier, before = fake.tier(), children()
    buffer, pool = PrimaryBuffer(4, SLOT_BYTES), IoPool(1, 1, 1)
    env = ActorEnvironment(buffer.view, pool, lambda _event: None, KVIdentity())

    async def give_up():
        opening = asyncio.get_running_loop().create_task(tier.open(env))
        await asyncio.to_thread(fake.wait_for_fault)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await tier.close()

    asyncio.run(give_up())
    assert children() == before
    assert pool.close(PATIENCE_S) == 0
    env.kv_view.release()
    assert buffer.release()


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        ("no-setup", TierUnavailableError, r"cannot be joined \(status -1\)"),
        ("no-register", ConfigError, r"buffer_bytes: registering .* failed \(status -600\)"),
    ],
)
def test_a_helper_that_cannot_join_says_why_and_is_gone(fake, fault, error, text):
    fake.fail(fault)
    before = children()
    with pytest.raises(error, match=text):
        opened(fake.tier())
    assert children() == before


def test_a_master_that_is_not_there_is_unavailable_in_a_moment(fake):
    fake.close()
    with pytest.raises(TierUnavailableError, match=r"cannot be reached \(.*refused"):
        opened(fake.tier())


def test_a_library_that_cannot_be_loaded_is_named(fake):
    without_packages = (sys.executable, "-I", "-S", helper_module.__file__)
    with pytest.raises(ConfigError, match=r"cannot load its library .* libibverbs1"):
        opened(fake.tier(command=without_packages))


def test_a_helper_that_cannot_be_started_leaves_nothing(fake):
    before = open_files()
    with pytest.raises(TierUnavailableError, match="cannot start a helper"):
        opened(fake.tier(command=(str(fake.folder / "nothing"),)))
    assert open_files() == before


def test_a_tier_that_was_closed_leaves_no_process_and_no_descriptor(fake):
    before, files = children(), open_files()
    for _ in range(2):
        with opened(fake.tier()) as harness:
            assert harness.store(K[:2]) == {}
    assert children() == before
    assert open_files() == files


# -- while it is open ---------------------------------------------------------------------------


def test_a_helper_that_aborts_in_the_middle_of_a_put_fails_that_job_and_another_is_started(fake):
    with opened(fake.tier()) as harness:
        assert harness.store(K[:2]) == {}
        first = helper_of(harness.tier).pid
        fake.fail("abort-in-put")
        with pytest.raises(TierUnavailableError, match="the process has ended"):
            harness.store(K[2:4])
        fake.mend()
        restart(harness)
        assert harness.store(K[2:4]) == harness.load(K[:4]) == {}
        assert all(harness.holds(key, slot) for slot, key in enumerate(K[:4]))
        gauges = harness.tier.gauges()
        assert (gauges["helper_starts"], gauges["helper_ends"]) == (2, 1)
        assert not is_running(first)


def test_a_helper_that_is_killed_fails_what_it_was_asked_and_another_is_started(fake):
    with opened(fake.tier()) as harness:
        harness.store(K[:2])
        fake.fail("wait-in-exist")
        asked = begun(harness, harness.tier.contains(K[:2]))
        fake.wait_for_fault()
        os.kill(helper_of(harness.tier).pid, signal.SIGKILL)
        error = why_failed(asked)
        del asked  # its task has the frames still
        assert isinstance(error, TierUnavailableError)
        assert "the process has ended" in str(error)
        fake.mend()
        restart(harness)
        assert harness.contains(K[:3]) == frozenset(K[:2])


@pytest.mark.parametrize("call", ["put", "get"])
def test_a_call_that_hangs_ends_with_its_helper_at_its_deadline(fake, call):
    fake.fail(f"hang-in-{call}")
    with opened(fake.tier(call_timeout_s=0.2)) as harness:
        pid = helper_of(harness.tier).pid
        move = harness.store if call == "put" else harness.load
        with pytest.raises(TierUnavailableError, match=r"no reply within 0\.2 s"):
            move(K[:3])
        wait_for_end(pid)


@pytest.mark.parametrize("call", ["put", "get"])
def test_a_store_that_hangs_costs_a_transfer_the_response_timeout(fake, call):
    fake.fail(f"hang-in-{call}")
    with opened(fake.tier(response_timeout_s=0.2)) as harness:
        pid = helper_of(harness.tier).pid
        move = harness.store if call == "put" else harness.load
        with pytest.raises(ServerHangError, match="the store hangs"):
            move(K[:3])
        wait_for_end(pid)


def test_a_call_that_is_only_slow_goes_on_while_the_store_answers_checks(fake):
    with opened(fake.tier()) as harness:
        fake.fail("wait-in-put")
        storing = begun(harness, harness.tier.store(harness.job(K[:1], [0], is_promotion=False)))
        fake.wait_for_fault()
        helper = helper_of(harness.tier)
        (number,) = helper._calls
        harness.on_loop(lambda: helper._hangs._is_slow(None, asyncio.timeout(None)))
        wait_until((fake.folder / "checks").exists)
        wait_until(lambda: list(helper._calls) == [number])
        assert not storing.done()
        assert not helper.why_ended
        harness.on_loop(lambda: helper.end("the test has seen enough"))
        assert "seen enough" in str(why_failed(storing))
        del storing  # its task has the frames still


def test_the_loop_goes_on_while_the_helper_hangs(fake):
    with opened(fake.tier()) as harness:
        fake.fail("hang-in-get")
        loading = begun(harness, harness.tier.load(harness.job(K[:1], [0], is_promotion=True)))
        fake.wait_for_fault()

        async def turn():
            for _ in range(1000):
                await asyncio.sleep(0)

        harness.run(turn())
        assert not loading.done()
        harness.on_loop(lambda: helper_of(harness.tier).end("the test has seen enough"))
        assert "seen enough" in str(why_failed(loading))
        del loading  # its task has the frames still


def test_a_probe_that_nobody_waits_for_any_more_stops_no_transfer(fake):
    with opened(fake.tier()) as harness:
        for _ in range(2):  # as many as an actor has at once
            given_up_probe(fake, harness)
        assert harness.store(K[:2]) == harness.load(K[:2]) == {}


def test_no_more_probes_are_at_a_helper_that_hangs_than_it_has_threads_for(fake):
    with opened(fake.tier()) as harness:
        for _ in range(4):
            given_up_probe(fake, harness)
        asked, helper = begun(harness, harness.tier.contains(K[:2])), helper_of(harness.tier)

        async def turn():
            for _ in range(10):
                await asyncio.sleep(0)
            return len(helper._calls)

        assert harness.run(turn()) == 4
        harness.on_loop(lambda: helper.end("the test has seen enough"))
        assert "seen enough" in str(why_failed(asked))
        del asked  # its task has the frames still


def test_a_transfer_that_is_given_up_ends_the_helper_that_may_still_use_its_memory(fake):
    with opened(fake.tier()) as harness:
        fake.fail("hang-in-get")
        loading = begun(harness, harness.tier.load(harness.job(K[:1], [0], is_promotion=True)))
        fake.wait_for_fault()
        helper = helper_of(harness.tier)
        loading.cancel()
        del loading  # its task has the frames still
        wait_for_end(helper.pid)
        assert helper.why_ended == "a transfer was cancelled"


def test_an_error_of_the_librarys_fails_the_call_and_not_the_helper(fake):
    with opened(fake.tier()) as harness:
        fake.fail("raise-in-put")
        with pytest.raises(TierUnavailableError, match="RuntimeError: so it says"):
            harness.store(K[:2])
        fake.mend()
        assert harness.store(K[:2]) == {}
        assert harness.tier.gauges()["helper_starts"] == 1


def test_a_helper_that_loses_a_thread_ends_and_is_replaced(fake):
    with opened(fake.tier()) as harness:
        fake.fail("exit-in-put")
        with pytest.raises(TierUnavailableError, match="the process has ended"):
            harness.store(K[:2])
        fake.mend()
        restart(harness)
        assert harness.store(K[:2]) == {}
        assert harness.tier.gauges()["helper_starts"] == 2


def test_a_helper_that_cannot_be_started_is_started_again_after_a_pause(fake, monkeypatch, caplog):
    def refuse(*_):
        raise OSError("no descriptors")

    with opened(fake.tier()) as harness:
        supervisor = harness.tier._supervisor
        monkeypatch.setattr(process_module, "SharedCells", refuse)
        harness.on_loop(lambda: helper_of(harness.tier).end("killed"))
        with pytest.raises(TierUnavailableError, match="no helper process"):
            harness.store(K[:1])
        wait_until(lambda: supervisor._pause_s)
        assert "starting a helper failed: OSError: no descriptors" in caplog.text


def framed(message):
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    return struct.pack("<I", len(body)) + body


@pytest.mark.parametrize(
    "garbage",
    [
        struct.pack("<I", 1 << 30),
        framed(b"{"),
        framed(b"\xff\xff"),
        framed(b"[" * 50_000),
        framed(b"1" * 50_000),
        framed([]),
        framed({}),
        framed({"id": []}),
        framed({"id": 7, "statuses": [0]}),
        framed({"id": 1}),
        framed({"id": 1, "error": 1}),
        framed({"id": 1, "statuses": [0, 0]}),
        framed({"id": 1, "statuses": "0"}),
        framed({"id": 1, "statuses": [0.5]}),
        framed({"id": 1, "statuses": [True]}),
        framed({"id": 1, "statuses": [0]}) * 2,
    ],
    ids=range(16),
)
def test_a_helper_that_sends_what_is_no_answer_is_killed(fake, garbage):
    fake.fail("garbage-in-put", garbage)
    with opened(fake.tier()) as harness:
        pid = helper_of(harness.tier).pid
        try:
            assert harness.store(K[:1]) == {}
            assert len(garbage) == len(framed({"id": 1, "statuses": [0]})) * 2  # then it was one
        except TierUnavailableError as error:
            assert "invalid reply" in str(error)  # noqa: PT017 - one of both
        wait_for_end(pid)
        fake.mend()
        restart(harness)
        assert harness.store(K[:1]) == harness.load(K[:1]) == {}


def test_a_text_of_the_helpers_is_cut(fake):
    async def store(harness):
        return await harness.tier.store(harness.job(K[:1], [0], is_promotion=False))

    text = "x" * 50_000
    fake.fail("garbage-in-put", framed({"id": 1, "error": text, "is_config": True}))
    with opened(fake.tier()) as harness:
        error = why_failed(begun(harness, store(harness)))
        assert type(error) is TierUnavailableError
        assert len(str(error)) < 1000


def test_helpers_that_cannot_join_are_started_at_growing_intervals(fake):
    with opened(fake.tier()) as harness:
        fake.fail("no-setup")
        os.kill(helper_of(harness.tier).pid, signal.SIGKILL)
        wait_until(lambda: helper_of(harness.tier).why_ended)
        restart(harness)
        supervisor = harness.tier._supervisor
        first_s = supervisor._pause_s
        supervisor._next_start_s = 0.0  # as if it had passed
        restart(harness)
        assert supervisor._pause_s == 2 * first_s > 0
        for _ in range(3):
            with pytest.raises(TierUnavailableError, match="cannot be joined"):
                harness.contains(K[:1])
        assert supervisor.starts == 3
        assert supervisor._starting is None


def test_a_tier_is_closed_while_the_next_helper_hangs_in_its_start(fake):
    before = children()
    with opened(fake.tier()) as harness:
        os.kill(helper_of(harness.tier).pid, signal.SIGKILL)
        wait_until(lambda: helper_of(harness.tier).why_ended)
        fake.fail("hang-in-setup")
        with pytest.raises(TierUnavailableError, match="no helper process"):
            harness.contains(K[:1])
        fake.wait_for_fault()
    assert children() == before


@pytest.mark.parametrize(
    ("fault", "leave_timeout_s"), [("hang-in-close", 0.2), ("hang-in-exist", 300.0)]
)
def test_a_helper_that_hangs_when_the_tier_closes_is_killed(fake, fault, leave_timeout_s):
    before = children()
    with opened(fake.tier(leave_timeout_s=leave_timeout_s)) as harness:
        fake.fail(fault)
        if fault == "hang-in-exist":
            given_up_probe(fake, harness, fault)
    assert children() == before


# -- the memory ---------------------------------------------------------------------------------


class Scribbler(IntegrityKey):
    """A key whose every checksum finds the shared memory changed right before it is made."""

    tier = None

    def mac(self, person, digest_bytes):
        return _ScribblingMac(super().mac(person, digest_bytes))


class _ScribblingMac:
    def __init__(self, mac):
        self._mac = mac

    def copy(self):
        if Scribbler.tier is not None:
            helper_of(Scribbler.tier).cells._cells[:] ^= 0xFF
        return _ScribblingMac(self._mac.copy())

    def __getattr__(self, name):
        return getattr(self._mac, name)


def test_what_is_verified_and_what_is_stored_is_the_primarys_not_the_shared_memorys(fake):
    key = Scribbler(bytes(range(32)))
    with opened(fake.tier(integrity_key=key)) as harness:
        Scribbler.tier = harness.tier
        try:
            for key in K[:3]:
                assert harness.store([key]) == {}
            for slot, key in enumerate(K[:3]):
                assert harness.load([key], [slot]) == {}
        finally:
            Scribbler.tier = None
        assert all(harness.holds(key, slot) for slot, key in enumerate(K[:3]))
        for key in K[:3]:
            value = fake.value_of(harness.tier, key).read_bytes()
            assert value.endswith(content_of(key, SLOT_BYTES).tobytes())


def test_a_value_that_was_changed_in_the_store_is_no_block(fake):
    with opened(fake.tier()) as harness:
        harness.store(K[:3])
        fake.damage(harness.tier, K[1])
        assert list(harness.load(K[:3])) == [1]
        gauges = harness.tier.gauges()
        assert gauges["read_again"] == gauges["corrupt"] == gauges["removed"] == 1
        assert harness.store(K[:3]) == harness.load(K[:3]) == {}


def test_a_job_that_is_larger_than_the_memory_goes_through_it_in_portions(fake):
    tier = fake.tier(buffer_bytes=4 * 2 * 3 * (SLOT_BYTES + 256))
    with opened(tier) as harness:
        assert helper_of(tier).cells.geometry[1:] == (3, 4)
        long = type(K[0])(bytes(300))
        failures = harness.store([*K[:20], long, *K[20:]])
        assert list(failures) == [20]
        assert type(failures[20]) is TierError
        assert harness.load(K) == {}
        assert all(harness.holds(key, slot) for slot, key in enumerate(K))
        assert tier.gauges()["requests"] == 2 * -(-len(K) // 3)


def test_a_block_for_which_the_store_has_no_room_is_not_a_fault_of_the_store(fake):
    answer = framed({"id": 1, "statuses": [0, -200]})
    fake.fail("garbage-in-put", answer)
    with opened(fake.tier()) as harness:
        failures = harness.store(K[:2])
        assert {i: type(error) for i, error in failures.items()} == {1: TierFullError}


def test_memory_that_is_too_small_for_two_blocks_is_refused():
    Geometry.of(2 * (SLOT_BYTES + 256), SLOT_BYTES)
    with pytest.raises(ConfigError, match=r"buffer_bytes: 8703 .* need 8704: give at least"):
        Geometry.of(2 * (SLOT_BYTES + 256) - 1, SLOT_BYTES)


def test_memory_that_the_system_does_not_have_is_refused():
    with pytest.raises(ConfigError, match=r"buffer_bytes: .* cannot be allocated"):
        SharedCells(Geometry(1 << 57, 4, 4), SLOT_BYTES)


def test_a_helper_cannot_take_the_memory_away():
    cells = SharedCells(Geometry.of(1 << 16, SLOT_BYTES), SLOT_BYTES)
    with pytest.raises(PermissionError):
        os.ftruncate(cells.file, 0)
    assert not cells.value(0, 64).any()
    assert len(cells.value(0, 64)) == 64 + SLOT_BYTES
    cells.close_file()
    cells.close_file()


# -- the process itself -------------------------------------------------------------------------

_PARENT = """
import json, os, socket, struct, subprocess, sys
ours, theirs = socket.socketpair()
memory = os.memfd_create("cells")
os.ftruncate(memory, 1 << 16)
helper = subprocess.Popen([*sys.argv[2:], str(os.getpid()), str(theirs.fileno())],
                          pass_fds=(theirs.fileno(), memory))
print(helper.pid, flush=True)
how = json.loads(sys.argv[1]) | {"buffer_fd": memory}
body = json.dumps(how).encode()
ours.sendall(struct.pack("<I", len(body)) + body)
sys.stdin.read()
"""


def joining(fake):
    return {
        "master": fake.master,
        "metadata_url": "http://127.0.0.1/metadata",
        "host": "127.0.0.1",
        "segment_bytes": 0,
        "protocol": "tcp",
        "rdma_devices": "",
        "replicas": 1,
        "buffer_bytes": 1 << 16,
        "calls": 2,
    }


def test_a_helper_that_hangs_dies_with_its_parent(fake):
    fake.fail("hang-in-setup")
    command = [sys.executable, "-I", "-S", "-c", _PARENT, json.dumps(joining(fake)), *fake.command]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        fake.wait_for_fault()
        assert is_running(pid)
        parent.kill()
    wait_for_end(pid)


@pytest.mark.parametrize("has_joined", [False, True])
def test_a_helper_ends_when_its_socket_is_closed(fake, has_joined):
    ours, theirs = socket.socketpair()
    memory = os.memfd_create("cells")
    os.ftruncate(memory, 1 << 16)
    with ours, theirs:
        command = [*fake.command, str(os.getpid()), str(theirs.fileno())]
        with subprocess.Popen(command, pass_fds=(theirs.fileno(), memory)) as process:
            theirs.close()
            ours.settimeout(READY_S)
            if has_joined:
                ours.sendall(helper_module.frame(joining(fake) | {"buffer_fd": memory}))
                assert helper_module.receive(ours.makefile("rb")) == {"id": 0, "statuses": []}
            ours.close()
            assert process.wait(READY_S) == 0
    os.close(memory)


def test_a_helper_whose_parent_has_ended_before_it_began_ends():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-I", "-S", helper_module.__file__, "1", str(theirs.fileno())]
        subprocess.run(command, check=True, pass_fds=(theirs.fileno(),), timeout=READY_S)


def test_a_helper_leaves_no_core_dump_which_would_have_blocks_in_it(fake):
    with opened(fake.tier()) as harness:
        limits = Path(f"/proc/{helper_of(harness.tier).pid}/limits").read_text()
        assert "Max core file size 1 1 bytes" in " ".join(limits.split())


def test_a_helper_moves_nothing_outside_of_its_memory(fake):
    with opened(fake.tier()) as harness:
        helper = helper_of(harness.tier)
        for at, size in [(-1, 64), (helper.cells.num_bytes, 64), (0, 1 << 40)]:
            with pytest.raises(TierUnavailableError, match="outside the buffer"):
                harness.run(helper.move("get", ["name"], [at], [size]))


def test_the_helper_needs_only_the_standard_library():
    code = f"import runpy, sys; runpy.run_path({helper_module.__file__!r}); print(*sys.modules)"
    command = [sys.executable, "-I", "-S", "-c", code]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert not {"numpy", "torch", "kvoffload_async", "asyncio"} & set(loaded)
