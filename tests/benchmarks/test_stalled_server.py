"""What a scheduler's step costs beside a server that stalls for ever, and how soon hits are back.

Method: a Valkey server behind a proxy that stops moving bytes. A step is one request of 16 blocks,
half of them stored before: lookups, a store, the end of the step. The seconds on the clock of each
step are taken with the server in order, then stalled, in turn. Printed are the medians and 99th
percentiles, and how long after the server's return a request found its blocks again. Nothing is
asserted about time but the shutdown's deadline, which is a promise.

    pytest tests/benchmarks/test_stalled_server.py --benchmark-enable -s
"""

import statistics
import time

import pytest
from servers.proxy import Proxy
from servers.valkey import ValkeyServer

from kvoffload_async import TieringOffloadingSpec
from kvoffload_async.testing.harness import key_of
from kvoffload_async.types import LookupResult, ReqContext

MEASURED_STEPS, PLAIN_STEPS = 2_000, 20
BLOCKS = 16
BREAKER_RETRY_S, PROBE_S, SHUTDOWN_S = 1.0, 0.5, 5.0
UNDECIDED = {LookupResult.RETRY, LookupResult.HIT_PENDING}


class Owner:
    """A scheduler's thread, and what it has done."""

    def __init__(self, manager):
        self.manager = manager
        self._number = 0

    def step(self):
        """Return the seconds of a step, without what the loop does meanwhile."""
        self._number += 1
        ctx = ReqContext(f"r{self._number}")
        first = BLOCKS * self._number // 2
        keys = [key_of(number) for number in range(first, first + BLOCKS)]
        began_s = time.perf_counter()
        self.manager.on_new_request(ctx)
        for key in keys:
            self.manager.lookup(key, ctx)
        granted = self.manager.prepare_store(keys, ctx)
        if granted is not None:
            self.manager.complete_store(granted.keys_to_store, ctx)
        self.manager.on_request_finished(ctx)
        self.manager.on_schedule_end()
        took_s = time.perf_counter() - began_s
        self.manager.wait_for_progress(0.001)
        return took_s

    def hits(self, keys):
        """Look keys up until there is an answer; return how many there are."""
        self._number += 1
        ctx = ReqContext(f"r{self._number}")
        self.manager.on_new_request(ctx)
        while UNDECIDED.intersection(answers := self._answers(keys, ctx)):
            self.manager.on_schedule_end()
            self.manager.wait_for_progress(0.05)
        self.manager.on_request_finished(ctx)
        self.manager.on_schedule_end()
        return answers.count(LookupResult.HIT)

    def _answers(self, keys, ctx):
        return [self.manager.lookup(key, ctx) for key in keys]


def shown(name, seconds):
    ordered = sorted(1e6 * each for each in seconds)
    p99 = ordered[int(0.99 * (len(ordered) - 1))]
    return f"{name}: median {statistics.median(ordered):,.0f} us, p99 {p99:,.0f} us"


@pytest.mark.slow
@pytest.mark.bench
def test_steps_beside_a_server_that_stalls(tmp_path, request, capsys):
    steps = MEASURED_STEPS if request.config.getoption("--benchmark-enable") else PLAIN_STEPS
    tier = {"type": "valkey", "model": "org/model", "positive_cache_ttl_s": 0.0}
    tier |= {"probe_timeout_s": PROBE_S, "call_timeout_s": PROBE_S, "io_timeout_s": 2.0}
    with ValkeyServer(tmp_path) as server, Proxy(server.port) as proxy:
        tier["url"] = server.url(proxy.port)
        config = {
            "cpu_bytes_to_use": "4MiB",
            "block_bytes": "16KiB",
            "breaker_retry_s": BREAKER_RETRY_S,
            "secondary_tiers": [tier],
        }
        with TieringOffloadingSpec(config) as spec:
            owner = Owner(manager := spec.get_manager())
            for _ in range(steps):
                owner.step()
            took_s = {"in order": [], "stalled": []}
            for _ in range(3):
                for name, seconds in took_s.items():
                    proxy.set(stalls=name == "stalled")
                    seconds += [owner.step() for _ in range(steps // 3)]
            keys = [key_of(number) for number in range(BLOCKS // 2, BLOCKS)]
            proxy.set()
            back_s = time.perf_counter()
            while owner.hits(keys) < len(keys):
                assert time.perf_counter() - back_s < 60, "no hits any more"
            back_s = time.perf_counter() - back_s
            proxy.set(stalls=True)
            owner.step()
            closing_s = time.perf_counter()
            manager.shutdown(SHUTDOWN_S)
            closing_s = time.perf_counter() - closing_s
    with capsys.disabled():
        for name, seconds in took_s.items():
            print(f"\n{shown(name, seconds)}", end="")  # noqa: T201 - the figures asked for
        retries = back_s / BREAKER_RETRY_S
        print(  # noqa: T201
            f"\nhits {back_s:.2f} s after its return ({retries:.1f} breaker_retry_s), shutdown "
            f"beside a stalled server {closing_s:.2f} s of {SHUTDOWN_S:g} s"
        )
    assert closing_s < 2 * SHUTDOWN_S
