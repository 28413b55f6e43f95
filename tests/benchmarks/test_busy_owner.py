"""Loads beside a scheduler that computes: how long they take, and how much they slow it down.

The owner computes for about 2 ms a step, with the interpreter's lock, ends the step and polls, as a
scheduler does. `slab`, `fs` and, where vLLM is installed, its own `fs` tier load the same blocks in
turn, in an order that changes with every round. A load takes from its submission until the owner
sees its result; a step is slowed by what its computing takes longer than it does while nothing
else runs.

Run with `--benchmark-enable -s` for the measured sizes; as a plain test it is two small rounds.
"""

import importlib.util
import os
import statistics
import time
from collections import defaultdict
from contextlib import ExitStack
from itertools import permutations

import pytest
from laboratory.peers import load_peer

from kvoffload_async.bench.baseline import Payload
from kvoffload_async.bench.contender import Contender
from kvoffload_async.types import as_block_ids, make_offload_key

BLOCKS = 16
ROUNDS = 200
STEP_S = 0.002
DEADLINE_S = 60.0


def compute(loops):
    """What an owner does in a step; returns how long it took."""
    start_s = time.perf_counter()
    total = 0
    for number in range(loops):
        total += number
    return time.perf_counter() - start_s


def loops_of_a_step():
    loops = 10_000
    fastest_s = min(compute(loops) for _ in range(50))
    return int(loops * STEP_S / fastest_s)


class Owner:
    """Drives one open tier, step by step."""

    def __init__(self, tier, loops):
        self._tier = tier
        self._loops = loops
        self._num_jobs = 0

    def run(self, keys, *, is_load):
        """Run one job; return how long it took, and each step's computing."""
        self._num_jobs += 1
        rows = as_block_ids(range(len(keys)))
        job = self._tier.make_job(self._num_jobs, keys, rows, is_load=is_load)
        manager = self._tier.manager
        steps_s = []
        start_s = time.perf_counter()
        (manager.submit_load if is_load else manager.submit_store)(job)
        while True:
            manager.on_schedule_end(self._tier.step)
            results = list(manager.get_finished_jobs())
            taken_s = time.perf_counter() - start_s
            if results:
                assert [result.success for result in results] == [True]
                return taken_s, steps_s
            assert taken_s < DEADLINE_S
            steps_s.append(compute(self._loops))


def contenders():
    yield Contender({"type": "slab"})
    yield Contender({"type": "fs"})
    if importlib.util.find_spec("vllm") is not None:
        yield load_peer({"type": "vllm-fs"})


@pytest.mark.bench
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:vllm")
def test_a_load_beside_a_computing_owner(tmp_path, request):
    is_measured = request.config.getoption("benchmark_enable")
    rounds = ROUNDS if is_measured else 2
    block_bytes = (256 if is_measured else 4) << 10
    loops = loops_of_a_step()
    keys = [make_offload_key(os.urandom(32)) for _ in range(BLOCKS)]
    took_s, slowed_s, idle_s = defaultdict(list), defaultdict(list), []
    with Payload(BLOCKS, block_bytes) as payload, ExitStack() as stack:
        payload.fill()
        owners = {}
        for contender in contenders():
            (tmp_path / contender.name).mkdir()
            folder = str(tmp_path / contender.name)
            tier = contender.open(payload.view, folder, BLOCKS * block_bytes)
            stack.callback(tier.close)
            owners[contender.name] = Owner(tier, loops)
            owners[contender.name].run(keys, is_load=False)
        orders = list(permutations(owners))
        for number in range(rounds):
            idle_s.append(compute(loops))
            for name in orders[number % len(orders)]:
                payload.wipe()
                load_s, steps_s = owners[name].run(keys, is_load=True)
                assert not payload.wrong_rows(BLOCKS)
                took_s[name].append(load_s)
                slowed_s[name].append(sum(steps_s) - statistics.median(idle_s) * len(steps_s))
    idle_ms = statistics.median(idle_s) * 1e3
    print(  # noqa: T201 - the figures are what this is for
        f"\nloads of {BLOCKS} x {block_bytes >> 10} KiB, {rounds} rounds, steps of {idle_ms:.2f} "
        f"ms, load {os.getloadavg()[0]:.1f}"
    )
    peer_s = statistics.median(took_s["vllm-fs"]) if "vllm-fs" in took_s else None
    for name, each in took_s.items():
        middle, mean = statistics.median(each), statistics.fmean(each)
        beside = "" if peer_s is None else f", {middle / peer_s:.2f} times vLLM's"
        print(  # noqa: T201 - as above
            f"{name:8} median {middle * 1e3:6.2f} ms{beside}, mean {mean * 1e3:6.2f} ms; the owner "
            f"is slowed by {statistics.median(slowed_s[name]) * 1e3:5.2f} ms a load"
        )
