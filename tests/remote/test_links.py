"""Links that are slow, far or shared, in virtual time: a healthy server is never called dead."""

import asyncio
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from remote.fake_store import SLOT_BYTES, FakeClient, FakeTier, LibraryError, World
from virtual_runner import VirtualRunner

from kvoffload_async.abc.events import JobFinished, JobOverdue
from kvoffload_async.errors import (
    JobNotStartedError,
    ServerHangError,
    SlowDownError,
    TierTimeoutError,
)
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.testing import InlineIo
from kvoffload_async.testing.harness import content_of, key_of, make_job
from kvoffload_async.tiers._actor import TierActor
from kvoffload_async.tiers._environment import ActorEnvironment
from kvoffload_async.tiers.remote.settings import RemoteSettings

BLOCK_MIB = 5
"""A block of `SLOT_BYTES` stands for one of so many MiB."""
HEADER_BYTES = 128
PROMPT = 312
MOST_PROMPTS = 10
K = [key_of(number) for number in range(PROMPT)]
OPTIONS = {"call_timeout_s": 5.0, "connections": 256, "negative_cache_ttl_s": 1e6}


class LinkClient(FakeClient):
    """Behind a link whose two directions are queues, which every connection shares.

    Attributes:
        mib_per_s: What each direction carries; None: it carries nothing any more.
        rtt_s: How long an answer takes at least.
        busy_s: How long the server takes for each call with payload, at any load.
        most_queued_s: The longest time for which a byte has waited for a direction.
    """

    def __init__(self, mib_per_s, rtt_s, busy_s=0.0, block_mib=BLOCK_MIB, portion=1):
        super().__init__(portion=portion)
        self.mib_per_s, self.rtt_s, self.busy_s = mib_per_s, rtt_s, busy_s
        self.mib = (SLOT_BYTES + HEADER_BYTES) / block_mib
        self.most_queued_s = 0.0
        self._free_s = Counter()

    async def _begin(self, name, keys=()):
        await super()._begin(name, keys)
        if name not in ("put", "get"):
            await self._pass("up", 0)
            await self._pass("down", 0)

    async def put(self, keys, values):
        await self._pass("up", sum(part.nbytes for value in values for part in value))
        return await super().put(keys, values)

    async def get(self, keys, targets):
        found = await super().get(keys, targets)
        await self._pass("down", sum(len(value.data) for value in found if value))
        return found

    async def _pass(self, direction, num_bytes):
        """Wait until these bytes, and all before them, have passed."""
        if self.mib_per_s is None:
            await asyncio.get_running_loop().create_future()
        now_s = asyncio.get_running_loop().time()
        begin_s = max(now_s, self._free_s[direction])
        self.most_queued_s = max(self.most_queued_s, begin_s - now_s)
        self._free_s[direction] = end_s = begin_s + num_bytes / (self.mib_per_s * self.mib)
        await asyncio.sleep(end_s - now_s + self.rtt_s / 2 + (self.busy_s if num_bytes else 0.0))


class SharedLinkClient(LinkClient):
    """Behind a link whose directions are shared equally by the calls in flight."""

    _STEP_S = 0.1

    def __init__(self, mib_per_s, rtt_s):
        super().__init__(mib_per_s, rtt_s)
        self._in_flight = Counter()

    async def _pass(self, direction, num_bytes):
        left = num_bytes
        self._in_flight[direction] += 1
        try:
            while left > 0:
                await asyncio.sleep(self._STEP_S)
                left -= self.mib_per_s * self.mib * self._STEP_S / self._in_flight[direction]
        finally:
            self._in_flight[direction] -= 1


class Host:
    """A tier over a link, under its actor, with memory for ten prompts."""

    def __init__(self, client, *, runner=None, **options):
        self.client, self.runner, self._owns_runner = client, runner or VirtualRunner(), not runner
        self.buffer = PrimaryBuffer(MOST_PROMPTS * PROMPT, SLOT_BYTES)
        self.events = []
        settings = RemoteSettings(**(OPTIONS | options))
        self.tier = FakeTier(client, settings, int(8 * client.mib))
        env = ActorEnvironment(self.buffer.view, InlineIo(), self.events.append)
        self.actor = TierActor(
            "t",
            self.tier,
            env,
            io_timeout_s=settings.job_timeout_s,
            probe_timeout_s=settings.probe_timeout_s,
            clock=self.runner.now_s,
        )
        self._job_id = 0

    def __enter__(self):
        self.runner.run(self.actor.open(), 10.0)
        wrap = self.tier._envelopes.wrap
        for key in K:
            self.client.values[key] = wrap(key, content_of(key, SLOT_BYTES)).tobytes()
        return self

    def __exit__(self, *_):
        self.runner.run(self.actor.close(1.0), 10.0)
        if self._owns_runner:
            self.runner.close()

    def start(self, keys, place=0, *, is_promotion=True):
        """Start a job on the slots of one of the ten prompts."""
        self._job_id += 1
        slots = range(place * PROMPT, place * PROMPT + len(keys))
        job = make_job(self._job_id, keys, slots, is_promotion=is_promotion)
        self.actor.start_job(job)

    def ended(self):
        """Wait for the jobs; return the errors of blocks and jobs, and the seconds."""
        began_s = self.runner.now_s()
        jobs = [event for event in self.events if isinstance(event, JobFinished)]
        assert self.runner.wait_until(lambda: len(self.finished()) == self._job_id, 1e5)
        errors = []
        for event in self.finished()[len(jobs) :]:
            errors += [*event.failures.values(), *filter(None, [event.job_error])]
        return errors, self.runner.now_s() - began_s

    def finished(self):
        return [event for event in self.events if isinstance(event, JobFinished)]

    def load(self, count=1, num_blocks=PROMPT):
        """Load prompts, all at once."""
        for place in range(count):
            self.start(K[:num_blocks], place)
        return self.ended()

    def store(self, num_blocks=PROMPT):
        """Store a prompt of which the server has nothing."""
        self.client.values.clear()
        self.tier._memory.vanished(K)
        self.start(K[:num_blocks], is_promotion=False)
        return self.ended()

    def gauge(self, name):
        return self.tier.gauges()[name]


FAR_AND_NEAR = pytest.mark.parametrize("rtt_s", [0.001, 0.005, 0.155])
SLOW_AND_FAST = pytest.mark.parametrize("mib_per_s", [5, 20, 40, 400])


@FAR_AND_NEAR
@SLOW_AND_FAST
def test_a_prompt_takes_what_the_bandwidth_allows(mib_per_s, rtt_s):
    with Host(LinkClient(mib_per_s, rtt_s)) as host:
        for _ in range(2):
            errors, seconds = host.load()
            assert errors == []
            assert seconds <= 1.3 * PROMPT * BLOCK_MIB / mib_per_s
        assert host.gauge("failed") == 0
        assert not any(isinstance(event, JobOverdue) for event in host.events)
        rows = np.asarray(host.buffer.view)
        assert all((rows[i] == content_of(K[i], SLOT_BYTES)).all() for i in range(PROMPT))


@FAR_AND_NEAR
@SLOW_AND_FAST
@pytest.mark.parametrize("count", [8, 10])
def test_prompts_at_once_take_what_the_bandwidth_allows_or_are_not_started(mib_per_s, rtt_s, count):
    blocks = PROMPT if mib_per_s == 400 else 40
    with Host(LinkClient(mib_per_s, rtt_s)) as host:
        errors, seconds = host.load(count, blocks)
        assert {type(error) for error in errors} <= {JobNotStartedError}
        assert seconds <= 1.3 * count * blocks * BLOCK_MIB / mib_per_s
        assert count * blocks * BLOCK_MIB / mib_per_s > 27 or not errors
        assert host.gauge("failed") == 0


@given(
    mib_per_s=st.floats(5.0, 400.0),
    rtt_s=st.floats(0.0005, 0.2),
    block_mib=st.floats(0.0625, 5.0),
    blocks=st.integers(1, 60),
)
def test_any_fifo_link_is_used_and_its_server_is_never_called_dead(
    mib_per_s, rtt_s, block_mib, blocks
):
    client = LinkClient(mib_per_s, rtt_s, block_mib=block_mib)
    with Host(client) as host:
        for _ in range(2):
            for errors, seconds in (host.load(1, blocks), host.store(blocks)):
                assert errors == []
                assert seconds <= 1.3 * blocks * block_mib / mib_per_s + 6 * rtt_s
        assert host.gauge("failed") == 0


@FAR_AND_NEAR
@SLOW_AND_FAST
def test_both_directions_at_once_leave_room_for_a_check(mib_per_s, rtt_s):
    client = LinkClient(mib_per_s, rtt_s)
    with Host(client, max_retries=0) as host:
        for _ in range(2):
            host.start(K[:100])
            host.start([key_of(number) for number in range(1000, 1100)], 1, is_promotion=False)
            errors, _ = host.ended()
            assert errors == []
            assert client.most_queued_s <= max(1.0, 2.1 * BLOCK_MIB / mib_per_s)
            client.values = {key: client.values[key] for key in K}
            host.tier._memory.vanished([key_of(number) for number in range(1000, 1100)])
        assert host.gauge("failed") == 0


@pytest.mark.parametrize("count", [1, 10])
def test_a_far_store_without_a_bound_of_its_own_gets_as_many_calls_as_memory_allows(count):
    client = LinkClient(1e6, 0.155)
    with Host(client) as host:
        host.load(count)
        errors, seconds = host.load(count)
        assert errors == []
        in_flight = min(256, MOST_PROMPTS * PROMPT // 8)
        assert seconds <= (math.ceil(count * PROMPT / in_flight) + 1) * 0.156


def test_small_blocks_are_not_bound_by_a_few_connections():
    with Host(LinkClient(400, 0.1, block_mib=1 / 16)) as host:
        errors, seconds = host.load(1, 16)
        assert errors == []
        assert seconds <= 0.151
        assert host.client.calls["get"] == 16


@pytest.mark.parametrize("busy_s", [0.1, 0.6, 2.0])
def test_a_store_that_takes_long_for_each_call_gets_many_at_once(busy_s):
    client = LinkClient(4000, 0.005, busy_s)
    with Host(client, call_timeout_s=30.0) as host:
        for _ in range(3):
            errors, seconds = host.load()
            assert errors == []
        assert seconds <= (math.ceil(PROMPT / 256) + 1) * (busy_s + 0.5)


def test_a_store_gets_its_calls_back_after_a_slow_phase():
    client = LinkClient(4000, 0.005, 0.1)
    with Host(client, call_timeout_s=30.0) as host:
        host.load()
        _, usual_s = host.load()
        client.busy_s = 5.0
        host.load(1, 64)
        client.busy_s = 0.1
        host.load()
        assert host.load()[1] <= 1.1 * usual_s


def test_a_prompt_on_a_slow_link_outlasts_its_deadline_as_long_as_it_moves():
    with Host(LinkClient(5, 0.005)) as host:
        errors, seconds = host.load()
        assert errors == []
        assert 312 <= seconds <= 320


def test_progress_renews_a_deadline_within_a_bound():
    with Host(LinkClient(5, 0.005), job_timeout_s=18.0) as host:
        errors, seconds = host.load()
        assert {type(error) for error in errors} == {JobNotStartedError}
        assert 15 * 18 <= seconds <= 16 * 18
        assert len(errors) == host.gauge("unstarted_blocks") <= PROMPT - 15 * 18
        assert not any(isinstance(event, JobOverdue) for event in host.events)


def test_jobs_that_queue_behind_others_that_move_are_not_started_and_no_fault():
    with Host(LinkClient(5, 0.005)) as host:
        errors, _ = host.load(10, 60)
        jobs = host.finished()
        failed = [event for event in jobs if event.job_error is not None]
        assert {type(event.job_error) for event in failed} == {JobNotStartedError}
        assert len(failed) == 6, "four run at once, and the others end in the queue"
        assert all(not event.failures for event in jobs if event not in failed)
        assert len(errors) == 6


@pytest.mark.parametrize("rtt_s", [0.005, 0.155])
def test_a_shared_slow_link_never_lets_the_check_fail(rtt_s):
    client = SharedLinkClient(20, rtt_s)
    with Host(client, max_retries=0) as host:
        for _ in range(12):
            errors, _ = host.load(2, 24)
            assert errors == []
        assert host.gauge("failed") == 0


def test_calls_that_a_link_is_too_slow_for_all_at_once_become_fewer():
    client = SharedLinkClient(400, 0.005)
    with Host(client, max_retries=0) as host:
        assert host.load()[0] == []
        client.mib_per_s = 5  # what is in flight takes longer than a call may
        host.load(1, 64)
        assert host.load(1, 64)[0] == []


class ThrottlingClient(LinkClient):
    """Refuses calls beyond a rate, as object stores do."""

    def __init__(self, calls_per_s):
        super().__init__(4000, 0.02)
        self._pause_s = 1 / calls_per_s
        self._due_s = 0.0

    async def get(self, keys, most_bytes):
        now_s = asyncio.get_running_loop().time()
        if self._due_s > now_s + 0.25:  # what a burst may have
            raise LibraryError(SlowDownError, "503 SlowDown")
        self._due_s = max(self._due_s, now_s) + self._pause_s
        return await super().get(keys, most_bytes)


@pytest.mark.parametrize("calls_per_s", [60, 200])
def test_a_store_that_says_slow_down_gets_fewer_calls_and_every_block(calls_per_s):
    client = ThrottlingClient(calls_per_s)
    with Host(client, max_retries=0) as host:
        errors, seconds = host.load(2, 150)
        assert errors == []
        assert seconds <= 1.5 * 300 / calls_per_s + 1
        refused = host.gauge("slow_downs")
        assert 0 < refused == host.gauge("failed")
        assert refused <= 150
        assert host.gauge("health_checks") == 0, "nobody doubts it"


def test_a_store_that_says_slow_down_for_ever_is_no_fault():
    client = LinkClient(400, 0.005)
    with Host(client) as host:

        async def refuse(*_):
            raise LibraryError(SlowDownError, "503 SlowDown")

        client.get = refuse
        errors, seconds = host.load(1, 4)
        assert {type(error) for error in errors} == {SlowDownError, JobNotStartedError}
        assert seconds <= 30


def test_a_link_that_dies_under_transfers_is_found_out_as_soon_as_before():
    client = LinkClient(20, 0.005)
    with Host(client, call_timeout_s=30.0) as host:
        host.start(K)
        host.runner.advance(4.0)
        client.mib_per_s = None
        errors, seconds = host.ended()
        assert {type(error) for error in errors} == {ServerHangError}
        assert seconds <= 2.01 + BLOCK_MIB / 20


@pytest.mark.parametrize("after_s", [0.0, 0.3, 2.0])
def test_a_load_that_is_cancelled_releases_what_it_had_in_flight(after_s):
    client = LinkClient(20, 0.1)
    with World(client, num_slots=PROMPT, first_bytes=2 * SLOT_BYTES) as world:
        wrap = world.tier._envelopes.wrap
        client.values = {key: wrap(key, content_of(key, SLOT_BYTES)).tobytes() for key in K}

        async def cancelled():
            load = world.tier.load(world.job(K, is_promotion=True))
            task = asyncio.get_running_loop().create_task(load)
            await asyncio.sleep(after_s)
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled()

        world.run(cancelled())
        assert world.gauge("bytes_in_flight") == 0
        assert world.load(K[:8]) == {}


CALLS_THAT_LAST = {"call_timeout_s": 5.0, "job_timeout_s": 30.0}


def test_what_waits_for_a_server_that_never_answers_is_its_fault():
    client = FakeClient(portion=1)
    with World(client, connections=1, call_timeout_s=1.0, job_timeout_s=5.0) as world:
        client.is_stalled = True
        failures = world.load(K[:8])
        assert not any(isinstance(error, JobNotStartedError) for error in failures.values())
        assert isinstance(failures[7], TierTimeoutError)
        assert math.isclose(world.runner.loop.time(), 5.0, abs_tol=1.0)


def test_a_check_that_is_not_answered_is_no_hang_while_other_calls_are():
    client = FakeClient(portion=1)
    with World(client, connections=1, **CALLS_THAT_LAST) as world:
        world.store(K[:8])
        client.read_s = 1.2  # of which each is slow, and checked
        client.check = lambda: asyncio.get_running_loop().create_future()
        assert world.load(K[:8]) == {}
        client.is_stalled = True
        failures = world.load(K[:1])
        assert isinstance(failures[0], ServerHangError), "nothing is answered any more"
