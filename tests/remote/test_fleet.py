"""A hundred hosts and one store in virtual time, and what `docs/_tools/fleet_cost.py` predicts."""

import runpy
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from remote.fake_store import SLOT_BYTES
from remote.test_links import BLOCK_MIB, PROMPT, Host, K, LinkClient
from virtual_runner import VirtualRunner

from kvoffload_async.abc.events import JobOverdue
from kvoffload_async.testing.harness import content_of, key_of

HOSTS = 100
MIB = 1 << 20
TOOL = runpy.run_path(str(Path(__file__).parents[2] / "docs/_tools/fleet_cost.py"))


class FarClient(LinkClient):
    """Counts what passes its link.

    Attributes:
        passed: Bytes by direction.
    """

    def __init__(self, mib_per_s, rtt_s):
        super().__init__(mib_per_s, rtt_s)
        self.passed = Counter()

    async def _pass(self, direction, num_bytes):
        self.passed[direction] += num_bytes
        await super()._pass(direction, num_bytes)


class VirtualFleet:
    """Hosts that share the contents of one store, each behind a link of its own."""

    def __init__(self, mib_per_s, rtt_s):
        self.runner = VirtualRunner()
        clients = [FarClient(mib_per_s, rtt_s) for _ in range(HOSTS)]
        for client in clients:
            client.values = clients[0].values
        self.hosts = [Host(client, runner=self.runner) for client in clients]

    def __enter__(self):
        with ExitStack() as stack:
            for host in self.hosts:
                stack.enter_context(host)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_):
        self._stack.close()
        self.runner.close()

    def run(self, keys_of, *, is_promotion):
        """Have all hosts move a prompt at the same time; return errors and the seconds."""
        began_s = self.runner.now_s()
        for number, host in enumerate(self.hosts):
            host.start(keys_of(number), is_promotion=is_promotion)
        errors = [error for host in self.hosts for error in host.ended()[0]]
        return errors, self.runner.now_s() - began_s

    def calls(self, name):
        return sum(host.client.calls[name] for host in self.hosts)

    def passed_bytes(self, direction):
        """Return the payload of a direction, as blocks of `BLOCK_MIB`."""
        passed = sum(host.client.passed[direction] for host in self.hosts)
        return passed / SLOT_BYTES * BLOCK_MIB * MIB


LINKS = [(mib_per_s, rtt_s) for mib_per_s in (5, 40, 400) for rtt_s in (0.001, 0.005, 0.155)]
SHORT = (40, 0.005)


@pytest.mark.parametrize(
    ("mib_per_s", "rtt_s"),
    [
        pytest.param(*SHORT, marks=pytest.mark.slow),
        *(pytest.param(*link, marks=pytest.mark.sweep) for link in LINKS if link != SHORT),
    ],
)
def test_a_hundred_hosts_take_what_bandwidth_allows_and_the_tool_predicts(mib_per_s, rtt_s):
    blocks = PROMPT if mib_per_s == 400 else 60
    fleet = TOOL["Fleet"](
        hosts=HOSTS,
        block_bytes=BLOCK_MIB * MIB,
        prompt_blocks=blocks,
        loads=blocks,
        stores=4,
        latency_s=rtt_s,
        nic_gbit=mib_per_s * MIB * 8 / 1e9,
    )
    cost = TOOL["cost_of"]("object", fleet)
    fastest_s = TOOL["load_seconds"](fleet)
    with VirtualFleet(mib_per_s, rtt_s) as virtual:
        errors, seconds = virtual.run(lambda _: K[:blocks], is_promotion=True)
        assert errors == []
        assert seconds <= 1.3 * (fastest_s - rtt_s) + 6 * rtt_s
        errors, seconds = virtual.run(lambda _: K[:blocks], is_promotion=True)
        assert errors == []
        assert seconds == pytest.approx(fastest_s, rel=0.2)
        assert virtual.calls("get") == 2 * cost.requests["gets"]
        assert virtual.passed_bytes("down") == pytest.approx(2 * cost.read_bytes, rel=0.2)

        first = len(K)
        errors, _ = virtual.run(
            lambda number: [key_of(first + 4 * number + i) for i in range(4)], is_promotion=False
        )
        assert errors == []
        assert virtual.calls("put") == cost.requests["puts"]
        assert virtual.passed_bytes("up") == pytest.approx(cost.written_bytes, rel=0.2)
        for host in virtual.hosts:
            assert host.gauge("failed") == host.gauge("unstarted_blocks") == 0, "no fault"
            assert not any(isinstance(event, JobOverdue) for event in host.events)
            rows = np.asarray(host.buffer.view)
            assert (rows[blocks - 1] == content_of(K[blocks - 1], SLOT_BYTES)).all()
