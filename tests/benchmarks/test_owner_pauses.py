"""How long the scheduler's thread stands still at most, with few and with many blocks.

Method: a full primary without tiers, whose blocks are only accounted for. A step is one request,
which stores 64 new blocks, for which 64 others have to go. The processor time of each of 2,000
steps is taken, three times over; printed is the longest step of the best run, with its time on the
clock beside it, and how much of it the garbage collector had. What the process had allocated before
is frozen first: walking it is not the cache's doing. The longest step while the primary was filled,
in which the tables grow, is printed too. Nothing is asserted about time.

The second test does the same for the policies alone, with blocks that were in use when room was
needed: all blocks of one request are skipped, and then released in slot order, in jobs that end in
any order, or at random. A step releases 64 blocks and evicts none.

The third test takes out a block that all others follow: in one prompt, or each in a prompt of its
own. The steps after it evict 64 blocks each.

    pytest tests/benchmarks/test_owner_pauses.py --benchmark-enable

Without the option it only shows that it works, with few blocks.
"""

import gc
import random
import time
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from kvoffload_async import CPUPrimaryTierOffloadingManager
from kvoffload_async.registry import create_policy
from kvoffload_async.types import ReqContext, make_offload_key

pytestmark = pytest.mark.bench

KEYS_A_STEP = 64
MEASURED_SIZES, MEASURED_STEPS, MEASURED_RUNS = (20_000, 1_000_000), 2_000, 3
PLAIN_SIZES, PLAIN_STEPS, PLAIN_RUNS = (2_000, 20_000), 50, 1


@dataclass(order=True)
class Pause:
    """One step: seconds of processor time, on the clock, and of the collector."""

    thread_s: float
    wall_s: float
    collector_s: float

    def __str__(self):
        milliseconds = (1e3 * s for s in (self.thread_s, self.wall_s, self.collector_s))
        return "{:.2f} ms ({:.2f} on the clock, {:.2f} the collector's)".format(*milliseconds)


ORDERS = ["slots", "jobs", "random"]
MEASURED_RELEASES, PLAIN_RELEASES = (1_024, 8_192, 131_072, 1_000_000), (1_024,)


class Owner:
    """A full primary, and what stores into it."""

    def __init__(self, num_blocks, policy):
        self.manager = CPUPrimaryTierOffloadingManager(num_blocks, cache_policy=policy)
        self.source = random.Random(1)
        self.num_steps = 0
        self.collector_s = self.collector_total_s = 0.0
        self.began_s = 0.0

    def on_collection(self, phase, _info):
        if phase == "start":
            self.began_s = time.thread_time()
        else:
            self.collector_s += time.thread_time() - self.began_s
            self.collector_total_s += time.thread_time() - self.began_s

    def step(self):
        hashes = self.source.randbytes(32 * KEYS_A_STEP)
        keys = [make_offload_key(hashes[i : i + 32]) for i in range(0, len(hashes), 32)]
        ctx = ReqContext(f"r{self.num_steps}")
        self.num_steps += 1
        self.collector_s = 0.0
        wall_s, thread_s = time.perf_counter(), time.thread_time()
        self.manager.on_new_request(ctx)
        self.manager.lookup(keys[0], ctx)
        granted = self.manager.prepare_store(keys, ctx)
        self.manager.complete_store(granted.keys_to_store, ctx)
        self.manager.on_request_finished(ctx)
        self.manager.on_schedule_end()
        thread_s, wall_s = time.thread_time() - thread_s, time.perf_counter() - wall_s
        return Pause(thread_s, wall_s, self.collector_s)


def tell(text):
    print(text)  # noqa: T201 - what a benchmark is for


@contextmanager
def owner_of(num_blocks, policy):
    gc.collect()
    gc.freeze()
    owner = Owner(num_blocks, policy)
    gc.callbacks.append(owner.on_collection)
    try:
        yield owner
    finally:
        gc.callbacks.remove(owner.on_collection)
        gc.unfreeze()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "arc", "hd"])
def test_the_longest_step_with_few_and_with_many_blocks(policy, capsys, benchmark, request):
    sizes, steps, runs = PLAIN_SIZES, PLAIN_STEPS, PLAIN_RUNS
    if request.config.getoption("benchmark_enable"):
        sizes, steps, runs = MEASURED_SIZES, MEASURED_STEPS, MEASURED_RUNS
    longest = benchmark.pedantic(longest_steps, (policy, capsys, sizes, steps, runs))
    few, many = longest.values()
    with capsys.disabled():
        tell(f"{policy}: {many.thread_s / few.thread_s:.1f} times as long")


def longest_steps(policy, capsys, sizes, steps, runs):
    """Return the longest step of each size; print them."""
    longest = {}
    for num_blocks in sizes:
        with owner_of(num_blocks, policy) as owner:
            filling = max(owner.step() for _ in range(num_blocks // KEYS_A_STEP))
            longest[num_blocks] = min(max(owner.step() for _ in range(steps)) for _ in range(runs))
            collector_s = owner.collector_total_s
            assert owner.manager.core.counts["idle"] > num_blocks - KEYS_A_STEP
        with capsys.disabled():
            tell(f"\n{policy}, {num_blocks} blocks: the longest step {longest[num_blocks]}")
            tell(f"    while it was filled: {filling}")
            tell(f"    the collector's in all: {1e3 * collector_s:.1f} ms")
    return longest


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("policy", ["lru", "arc", "hd"])
def test_the_longest_step_that_releases_blocks(policy, order, capsys, benchmark, request):
    is_measured = request.config.getoption("benchmark_enable")
    sizes = MEASURED_RELEASES if is_measured else PLAIN_RELEASES
    benchmark.pedantic(longest_releases, (policy, order, capsys, sizes))


def longest_releases(policy, order, capsys, sizes):
    """Print the longest step of each size."""
    for num_blocks in sizes:
        skipped = skipped_blocks(policy, num_blocks)
        longest_s = 0.0
        for slots in released_slots(order, num_blocks):
            began_s = time.thread_time()
            skipped.released(slots)
            longest_s = max(longest_s, time.thread_time() - began_s)
        assert not list(skipped.skipped())
        with capsys.disabled():
            tell(f"\n{policy}, {num_blocks} blocks released, {order}: {1e3 * longest_s:.2f} ms")


def skipped_blocks(policy, num_blocks):
    """Return a policy that has skipped all blocks of one request."""
    made = create_policy(policy, num_blocks)
    slots = list(range(num_blocks))
    hashes = random.Random(1).randbytes(32 * num_blocks)
    keys = [make_offload_key(hashes[i : i + 32]) for i in range(0, len(hashes), 32)]
    made.admit(keys, slots)
    made.access(slots, [False] * num_blocks)
    assert made.make_room(keys[:1], 1, lambda _: False) is None
    return made


def released_slots(order, num_blocks):
    """Return the slots that each step releases."""
    slots = list(range(num_blocks))
    if order == "random":
        random.Random(1).shuffle(slots)
    steps = [slots[i : i + KEYS_A_STEP] for i in range(0, num_blocks, KEYS_A_STEP)]
    if order == "jobs":
        random.Random(1).shuffle(steps)
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["chain", "star"])
@pytest.mark.parametrize("policy", ["lru", "arc", "hd"])
def test_the_longest_step_after_a_block_that_all_others_follow(
    policy, shape, capsys, benchmark, request
):
    is_measured = request.config.getoption("benchmark_enable")
    sizes = MEASURED_RELEASES if is_measured else PLAIN_RELEASES
    benchmark.pedantic(longest_evictions, (policy, shape, capsys, sizes))


def longest_evictions(policy, shape, capsys, sizes):
    """Print the longest step of each size."""
    for num_blocks in sizes:
        made = headed_blocks(policy, shape, num_blocks)
        began_s = time.thread_time()
        made.discard([0])
        longest_s = time.thread_time() - began_s
        for _ in range((num_blocks - 1) // KEYS_A_STEP):
            began_s = time.thread_time()
            made.make_room([], KEYS_A_STEP, lambda _: True)
            longest_s = max(longest_s, time.thread_time() - began_s)
        with capsys.disabled():
            tell(f"\n{policy}, {num_blocks} blocks in a {shape}: {1e3 * longest_s:.2f} ms")


def headed_blocks(policy, shape, num_blocks):
    """Return a policy whose block in slot 0 all others follow."""
    made = create_policy(policy, num_blocks)
    hashes = random.Random(1).randbytes(32 * num_blocks)
    keys = [make_offload_key(hashes[i : i + 32]) for i in range(0, len(hashes), 32)]
    slots = list(range(num_blocks))
    made.admit(keys, slots)
    if shape == "chain":
        made.access(slots, [False] * num_blocks)
    else:
        for slot in range(1, num_blocks):
            made.access([0, slot], [True, False])
    return made
