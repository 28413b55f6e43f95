"""A server that stalls for ever, under a whole manager, in virtual time: what it costs whom."""

import pytest
from facade.worlds import HIT, MISS, PENDING, RETRY, World
from remote.fake_store import FakeClient, FakeTier, LibraryError

from kvoffload_async.core.health import BreakerSettings
from kvoffload_async.tiers.remote.settings import RemoteSettings

PROBE_S, RETRY_S, THRESHOLD = 2.0, 5.0, 3
STEP_S = 0.125
BLOCKS = range(1, 9)


class StallingTier(FakeTier):
    """Over a client in memory; what `World` asks of scripted tiers besides."""

    parked = ()

    def __init__(self, client, **options):
        settings = RemoteSettings(
            probe_timeout_s=PROBE_S, positive_cache_ttl_s=0.0, negative_cache_ttl_s=0.0, **options
        )
        super().__init__(client, settings)

    def finish_all(self):
        """Nothing is parked."""


class Fleet:
    """Requests of one prompt over such a tier, whose waits are noted."""

    def __init__(self, *, answers_many=True, portion=4, **options):
        self.client = FakeClient(answers_many=answers_many, portion=portion)
        options = {"call_timeout_s": 1.0, "job_timeout_s": 4.0} | options
        self.world = World(
            StallingTier(self.client, **options),
            num_slots=64,
            io_timeout_s=options["job_timeout_s"] + 2.0,
            breaker=BreakerSettings(THRESHOLD, RETRY_S),
        )
        self.runner = self.world.runner
        self._number = 0

    def step(self):
        """One step of the scheduler; no hook lets time pass."""
        before_s = self.runner.now_s()
        self.world.step()
        assert self.runner.now_s() == before_s
        self.runner.advance(STEP_S)

    def rest(self):
        while self.world.manager.has_pending_work():
            self.step()

    def fill(self):
        self.world.begin("filler")
        self.world.store(*BLOCKS, req_id="filler")
        self.world.finish("filler")
        self.forget()

    def forget(self):
        """Empty the primary."""
        self.rest()
        self.world.manager.reset_cache()
        self.world.manager.on_reset_flushed()

    def request(self):
        """Look the prompt up until there is an answer; return hits and the seconds it took."""
        self._number += 1
        name = f"r{self._number}"
        began_s = self.runner.now_s()
        self.world.begin(name)
        while True:
            answers = [self.world.lookup(number, name) for number in BLOCKS]
            if not {PENDING, RETRY}.intersection(answers):
                break
            self.step()
        assert set(answers) <= {HIT, MISS}
        self.world.finish(name)
        return answers.count(HIT), self.runner.now_s() - began_s


@pytest.fixture(params=[True, False], ids=["one call a probe", "a call a key"])
def fleet(request):
    fleet = Fleet(answers_many=request.param)
    fleet.fill()
    yield fleet
    fleet.client.is_stalled = False
    fleet.world.end()


def test_a_stall_costs_a_probe_deadline_until_the_breaker_opens_and_then_nothing(fleet):
    assert fleet.request()[0] == len(BLOCKS)
    fleet.forget()
    fleet.client.is_stalled = True
    waits = [fleet.request() for _ in range(THRESHOLD)]
    assert all(hits == 0 for hits, _ in waits)
    assert all(seconds <= PROBE_S + STEP_S for _, seconds in waits)
    begun = fleet.client.calls.total()
    until_s = fleet.runner.now_s() + 10 * RETRY_S
    waits.clear()
    while fleet.runner.now_s() < until_s:
        waits.append(fleet.request()[1])
        fleet.step()
    assert len(waits) > 300
    assert max(waits) <= STEP_S, "nobody waits for the probe that finds out"
    calls_a_probe = 1 if fleet.client.answers_many else len(BLOCKS)
    most = 2 * 10 * calls_a_probe
    assert fleet.client.calls.total() - begun <= most, (
        "one probe in each breaker_retry_s, tried twice"
    )


def test_hits_come_back_soon_after_the_server_has(fleet):
    fleet.client.is_stalled = True
    for _ in range(20):
        fleet.request()
        fleet.step()
    fleet.client.is_stalled = False
    back_s = fleet.runner.now_s()
    while fleet.request()[0] < len(BLOCKS):
        assert fleet.runner.now_s() - back_s <= 2 * RETRY_S
        fleet.step()


LONG = {"call_timeout_s": 5.0, "job_timeout_s": 30.0, "max_retries": 2}


def load_begun(fleet):
    """Begin a request that loads the prompt; return how long its loads take from here."""
    fleet.world.begin("r")
    while PENDING not in {fleet.world.lookup(number, "r") for number in BLOCKS}:
        fleet.step()
    began_s = fleet.runner.now_s()

    def ended():
        while {PENDING, RETRY} & {fleet.world.lookup(number, "r") for number in BLOCKS}:
            fleet.step()
        fleet.world.finish("r")
        return fleet.runner.now_s() - began_s

    return ended


@pytest.mark.parametrize("options", [{}, {"portion": 1, "connections": 1}])
def test_a_load_waits_for_a_server_that_hangs_no_longer_than_a_probe_does(options, caplog):
    fleet = Fleet(**LONG, **options)  # with one connection, all but one portion are queued
    fleet.fill()
    ended = load_begun(fleet)
    fleet.client.is_stalled = True
    assert ended() <= PROBE_S + 2 * STEP_S
    assert "raise probe_timeout_s" in caplog.text
    fleet.client.is_stalled = False
    assert fleet.request()[0] == len(BLOCKS)
    fleet.world.end()


def test_a_load_that_is_only_slow_ends_by_itself():
    fleet = Fleet(**LONG)
    fleet.fill()
    fleet.client.read_s = 2.2 * PROBE_S
    ended = load_begun(fleet)
    assert ended() >= fleet.client.read_s
    fleet.client.read_s = 0.0
    assert fleet.world.tiers[0].gauges()["failed"] == 0
    assert fleet.request()[0] == len(BLOCKS)
    fleet.world.end()


def test_a_check_that_fails_beside_a_slow_load_is_no_hang():
    fleet = Fleet(**LONG)
    fleet.fill()
    fleet.client.read_s = 2.2 * PROBE_S
    ended = load_begun(fleet)
    fleet.step()
    fleet.client.failures = [LibraryError()]
    ended()
    assert not fleet.client.failures, "the check has failed"
    assert fleet.world.tiers[0].gauges()["failed"] == 0
    fleet.world.end()


def test_a_shutdown_ends_the_check_beside_a_slow_load():
    fleet = Fleet(**LONG)
    fleet.fill()
    fleet.client.calls.clear()
    load_begun(fleet)
    fleet.client.is_stalled = True
    for _ in range(int(0.75 * PROBE_S / STEP_S)):
        fleet.step()
    assert fleet.client.calls["check"] == 1
    began_s = fleet.runner.now_s()
    fleet.world.manager.shutdown(0.5)
    assert fleet.runner.now_s() - began_s <= 0.5 + STEP_S
    fleet.client.is_stalled = False
    fleet.world.end()


def test_what_was_under_way_when_it_stalled_ends_at_the_jobs_deadline(fleet):
    world = fleet.world
    world.begin("r")
    while (answers := {world.lookup(number) for number in BLOCKS}) != {PENDING}:
        assert answers <= {PENDING, RETRY}
        fleet.step()
    fleet.client.is_stalled = True
    began_s = fleet.runner.now_s()
    while PENDING in {world.lookup(number) for number in BLOCKS}:
        fleet.step()
    assert fleet.runner.now_s() - began_s <= 4.0 + 2 * STEP_S
    world.finish("r")
    fleet.rest()
    assert world.counts["pinned"] == 0
    assert world.tiers[0].gauges()["bytes_in_flight"] == 0


def test_a_shutdown_beside_a_stalled_server_keeps_its_deadline(fleet):
    world = fleet.world
    fleet.client.is_stalled = True
    world.begin("s")
    world.store(*range(20, 30), req_id="s")
    world.begin("r")
    for number in BLOCKS:
        world.lookup(number)
    fleet.step()
    began_s = fleet.runner.now_s()
    world.manager.shutdown(3.0)
    assert fleet.runner.now_s() - began_s <= 3.0 + STEP_S
    counters = world.manager.planner.counters
    assert counters.jobs_submitted == counters.job_results


def test_a_stall_is_counted_where_a_call_may_take_longer_than_the_probe():
    fleet = Fleet(call_timeout_s=10.0)
    fleet.fill()
    fleet.client.is_stalled = True
    assert fleet.request() == (0, pytest.approx(PROBE_S, abs=STEP_S))
    gauges = fleet.world.tiers[0].gauges()
    assert gauges["timeouts"] == gauges["failed"] == 1
    fleet.client.is_stalled = False
    assert fleet.request()[0] == len(BLOCKS)
    fleet.world.end()
