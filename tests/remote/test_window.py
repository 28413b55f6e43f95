"""The control law of what is in flight, by itself: its branches, and hosts that share a link.

Time and links are simulated here; nothing runs on a loop.
"""

import heapq
import itertools
import math
import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload_async.tiers.remote.window import FIRST_BYTES, Window

MIB = 1 << 20
BLOCK = 5 * MIB
MOST = 1 << 30
QUEUE_S = 0.5


class Link:
    """A queue that carries bytes one after another."""

    def __init__(self, bytes_per_s):
        self.bytes_per_s, self.free_s = bytes_per_s, 0.0

    def carried_s(self, now_s, num_bytes):
        self.free_s = max(now_s, self.free_s) + num_bytes / self.bytes_per_s
        return self.free_s


class Host:
    """Loads as many blocks at once as its window allows.

    Attributes:
        seconds: How long each transfer took.
        ended_s: When the last block arrived.
        most_in_flight: In bytes.
        most_served: Number of transfers beyond which the server says "slow down".
        refused: How often it did.
    """

    def __init__(self, simulation, link, rtt_s, *, most=MOST, delay_s=lambda: 0.0, block=BLOCK):
        self.simulation, self.link, self.rtt_s, self.delay_s = simulation, link, rtt_s, delay_s
        self.block = block
        self.window = Window(most, QUEUE_S)
        self.in_flight = self.most_in_flight = self.ended_s = 0
        self.seconds, self.queue = [], deque()
        self.served, self.most_served, self.refused = 0, math.inf, 0

    def load(self, num_blocks):
        self.queue.extend(range(num_blocks))
        self._start()

    def _start(self):
        now_s = self.simulation.now_s
        while self.queue and (
            not self.in_flight or self.in_flight + self.block <= self.window.limit_bytes
        ):
            self.queue.popleft()
            self.in_flight += self.block
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            departure = self.window.departs(now_s, is_alone=self.in_flight <= self.block)
            served_s = now_s + self.rtt_s / 2 + self.delay_s()
            self.simulation.at(served_s, self._serve, departure)

    def _serve(self, departure):
        now_s = self.simulation.now_s
        if self.served >= self.most_served:
            self.refused += 1
            self.window.back_off(now_s - self.rtt_s / 2, now_s)
            self.simulation.at(now_s + 0.1, self._serve, departure)
            return
        self.served += 1
        arrived_s = self.link.carried_s(now_s, self.block) + self.rtt_s / 2
        self.simulation.at(arrived_s, self._arrive, departure)

    def _arrive(self, departure):
        now_s = self.ended_s = self.simulation.now_s
        self.served -= 1
        self.seconds.append(now_s - departure.began_s)
        if self.link.free_s - now_s > 1.0:  # as a check would find
            self.window.back_off(departure.began_s, now_s)
        self.window.arrives(departure, self.block, self.in_flight, now_s)
        self.in_flight -= self.block
        self._start()


class Simulation:
    def __init__(self):
        self.now_s, self._events, self._numbers = 0.0, [], itertools.count()

    def at(self, time_s, call, *args):
        heapq.heappush(self._events, (time_s, next(self._numbers), call, args))

    def run(self):
        while self._events:
            self.now_s, _, call, args = heapq.heappop(self._events)
            call(*args)


def loaded(host, num_blocks):
    """Load blocks; return how long it took."""
    began_s = host.simulation.now_s
    host.simulation.at(began_s, host.load, num_blocks)
    host.simulation.run()
    return host.ended_s - began_s


@given(
    mib_per_s=st.floats(5.0, 400.0),
    rtt_s=st.sampled_from([0.001, 0.005, 0.155]),
    seed=st.integers(),
)
def test_a_prompt_takes_what_a_fifo_link_allows_and_little_more_is_in_flight(
    mib_per_s, rtt_s, seed
):
    rng = random.Random(seed)
    host = Host(Simulation(), Link(mib_per_s * MIB), rtt_s)
    for _ in range(3):
        num_blocks = rng.choice([1, 16, 312])
        seconds = loaded(host, num_blocks)
        assert seconds <= 1.3 * num_blocks * BLOCK / (mib_per_s * MIB) + 4 * rtt_s
    alone_s = rtt_s + BLOCK / (mib_per_s * MIB)
    queue_s = min(QUEUE_S, max(2 * alone_s, QUEUE_S / 8))
    allowed = mib_per_s * MIB * (alone_s + queue_s)
    assert host.most_in_flight <= max(FIRST_BYTES, 1.7 * allowed + 2 * BLOCK)


@pytest.mark.parametrize("rtt_s", [0.001, 0.005, 0.155])
@pytest.mark.parametrize("mib_per_s", [20, 400])
def test_a_hundred_hosts_on_one_link_use_it_fully_and_keep_its_queue_short(mib_per_s, rtt_s):
    simulation, rng = Simulation(), random.Random(mib_per_s)
    link = Link(100 * mib_per_s * MIB)
    hosts = [Host(simulation, link, rtt_s) for _ in range(100)]
    for host in hosts:
        simulation.at(rng.uniform(0.0, 10.0), host.load, 312)
    simulation.run()
    allowed_s = 100 * 312 * BLOCK / link.bytes_per_s
    assert simulation.now_s <= max(10.0 + 312 * BLOCK / (mib_per_s * MIB), 1.1 * allowed_s)
    seconds = sorted(second for host in hosts for second in host.seconds)
    assert seconds[-1] < 5.0, "no call times out"
    assert seconds[len(seconds) // 2] <= 1.0 + rtt_s


def test_a_store_whose_latency_is_noise_gets_as_many_calls_as_it_serves():
    rng = random.Random(1)
    host = Host(
        Simulation(), Link(4000 * MIB), 0.001, delay_s=lambda: 0.03 + rng.lognormvariate(-2.3, 0.7)
    )
    loaded(host, 3120)
    assert loaded(host, 3120) <= 1.5 * 3120 * BLOCK / (4000 * MIB)


@pytest.mark.parametrize("delay_s", [0.1, 0.6])
def test_a_store_with_a_latency_alone_gets_all_that_memory_allows(delay_s):
    host = Host(Simulation(), Link(1e15), 0.001, delay_s=lambda: delay_s)
    loaded(host, 3120)
    assert host.most_in_flight == MOST // BLOCK * BLOCK
    assert loaded(host, 3120) <= (3120 / (MOST // BLOCK) + 1) * (delay_s + 0.001)


def test_a_server_that_says_slow_down_gets_about_as_many_calls_as_it_serves():
    host = Host(Simulation(), Link(1e12), 0.1)
    host.most_served = 20
    seconds = loaded(host, 3000)
    assert 0 < host.refused <= 0.2 * 3000
    assert seconds <= 3 * 3000 / 20 * 0.05


# -- branches -----------------------------------------------------------------------------------


def begun(window, now_s, *, is_alone=False):
    return window.departs(now_s, is_alone=is_alone)


def test_it_starts_with_its_first_bytes_or_its_maximum():
    assert Window(MOST, QUEUE_S).limit_bytes == FIRST_BYTES
    assert Window(MIB, QUEUE_S).limit_bytes == MIB
    assert Window(MOST, QUEUE_S, 7).limit_bytes == 7


def test_a_rate_that_allows_more_counts_at_once():
    window = Window(MOST, QUEUE_S)
    window.arrives(begun(window, 0.0, is_alone=True), 4 * MIB, 4 * MIB, 0.1)
    assert window.limit_bytes == pytest.approx(40 * MIB * (0.1 + 0.2))


def test_arrivals_that_were_delayed_together_show_no_higher_rate():
    window = Window(MOST, QUEUE_S)
    window.arrives(begun(window, 0.0, is_alone=True), MIB, MIB, 0.1)
    departures = [begun(window, 0.1, is_alone=not n) for n in range(8)]
    late = begun(window, 1.09)
    for departure in departures:
        window.arrives(departure, MIB, 8 * MIB, 1.1)
    window.arrives(late, MIB, MIB, 1.101)
    assert window.limit_bytes <= 9 * MIB * 0.3 / 0.1


def test_a_transfer_of_more_bytes_is_expected_to_take_longer():
    window = Window(MOST, QUEUE_S)
    window.arrives(begun(window, 0.0, is_alone=True), MIB, MIB, 0.1)
    assert window._alone_s == pytest.approx(0.1)
    window.arrives(begun(window, 1.0), 2 * MIB, 4 * MIB, 1.15)
    assert window._alone_s == pytest.approx(0.15)
    window.arrives(begun(window, 2.0), MIB, 4 * MIB, 2.05)
    assert window._alone_s == pytest.approx(0.1), "twice as long as half of it"


def test_a_store_that_has_become_slower_is_measured_by_transfers_that_are_alone():
    window = Window(MOST, QUEUE_S)
    window.arrives(begun(window, 0.0, is_alone=True), MIB, MIB, 0.1)
    first = begun(window, 1.0, is_alone=True)
    begun(window, 1.1)  # which joins it
    window.arrives(first, MIB, 2 * MIB, 3.0)
    assert window._alone_s == pytest.approx(0.1)
    window.arrives(begun(window, 4.0, is_alone=True), MIB, MIB, 6.0)
    assert window._alone_s == pytest.approx(2.0)


def rounds(window, seconds, *, count, in_flight, now_s):
    """Let as many rounds pass, of transfers that take so long; return the time."""
    for _ in range(count):
        for _ in range(2):
            departure = begun(window, now_s)
            now_s += seconds
            window.arrives(departure, in_flight, in_flight, now_s)
    return now_s


def test_it_shrinks_to_the_rate_when_calls_queue():
    window = Window(MOST, QUEUE_S)
    window.arrives(begun(window, 0.0, is_alone=True), 8 * MIB, 8 * MIB, 0.1)
    assert window.limit_bytes == pytest.approx(24 * MIB)
    rounds(window, 2.0, count=2, in_flight=8 * MIB, now_s=1.0)
    assert window.limit_bytes == pytest.approx(4 * MIB * 0.3)


def test_it_grows_while_it_is_full_and_no_calls_queue_but_not_soon_after_they_did():
    window = Window(MOST, QUEUE_S)
    window.arrives(begun(window, 0.0, is_alone=True), MIB, MIB, 2.0)
    now_s = rounds(window, 2.0, count=2, in_flight=MIB, now_s=3.0)
    assert window.limit_bytes == FIRST_BYTES, "it was not full"
    now_s = rounds(window, 2.0, count=1, in_flight=FIRST_BYTES, now_s=now_s)
    assert window.limit_bytes == 10 * MIB + FIRST_BYTES, "its rate, and one transfer more"
    now_s = rounds(window, 9.0, count=2, in_flight=FIRST_BYTES, now_s=now_s)
    limit = window.limit_bytes
    assert limit < FIRST_BYTES
    now_s = rounds(window, 2.4, count=2, in_flight=FIRST_BYTES, now_s=now_s)
    assert window.limit_bytes == pytest.approx(FIRST_BYTES * 2.5 / 2.4), "by its rate alone"
    rounds(window, 2.4, count=1, in_flight=FIRST_BYTES, now_s=now_s + 60.0)
    assert window.limit_bytes >= 2 * FIRST_BYTES


def test_backing_off_halves_it_once_for_all_calls_of_one_time_and_ends_step_by_step():
    window = Window(MOST, QUEUE_S)
    window.arrives(begun(window, 0.0, is_alone=True), 4 * MIB, 4 * MIB, 0.1)
    limit = window.limit_bytes
    window.back_off(0.2, 0.3)
    window.back_off(0.25, 0.35)
    assert window.limit_bytes == limit // 2
    window.back_off(0.4, 0.5)
    assert window.limit_bytes == limit // 4
    now_s = rounds(window, 0.1, count=1, in_flight=4 * MIB, now_s=1.0)
    assert window.limit_bytes == limit // 4 + 4 * MIB
    rounds(window, 0.1, count=1, in_flight=4 * MIB, now_s=now_s + 60.0)
    assert window.limit_bytes >= limit


def test_a_round_of_calls_that_began_before_backing_off_does_not_end_it():
    window = Window(MOST, QUEUE_S)
    window.arrives(begun(window, 0.0, is_alone=True), 4 * MIB, 4 * MIB, 0.1)
    window.arrives(begun(window, 0.1), 4 * MIB, 4 * MIB, 0.2)
    before = begun(window, 0.25)
    window.back_off(0.25, 0.3)
    limit = window.limit_bytes
    window.arrives(before, 4 * MIB, 4 * MIB, 0.35)
    assert window.limit_bytes == limit


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["departs", "arrives", "back_off"]),
            st.integers(0, 9),
            st.floats(0.0, 100.0),
            st.integers(1, 64 * MIB),
        )
    )
)
def test_no_order_of_events_leaves_its_bounds(events):
    window, now_s, flying = Window(32 * MIB, QUEUE_S), 0.0, []
    for kind, which, seconds, num_bytes in events:
        now_s += seconds
        if kind == "departs":
            flying.append(window.departs(now_s, is_alone=not flying))
        elif kind == "back_off":
            window.back_off(now_s - which, now_s)
        elif flying:
            window.arrives(flying.pop(which % len(flying)), num_bytes, num_bytes, now_s)
        assert 0 <= window.limit_bytes <= 32 * MIB
        assert math.isfinite(window.limit_bytes)
