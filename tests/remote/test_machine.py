"""Random histories over real stores: two hosts, damage, loss; every byte and answer is right."""

import contextlib

import obstore
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from remote.object.tiers import tier_on
from remote.valkey.tiers import tier_at
from servers.valkey import ValkeyServer

from kvoffload_async.errors import BlockMissingError, CorruptBlockError
from kvoffload_async.testing import TierHarness
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.object.tier import ObjectOptions

pytestmark = pytest.mark.slow

K = [key_of(number) for number in range(6)]
GOOD, BAD = "good", "bad"

hosts = st.integers(0, 1)
jobs = st.lists(st.sampled_from(K), unique=True, min_size=1)


class RemoteMachine(RuleBasedStateMachine):
    """Two hosts on one store; a subclass says which."""

    def open(self):
        raise NotImplementedError

    def put_bad(self, key):
        raise NotImplementedError

    def delete(self, key):
        raise NotImplementedError

    @initialize()
    def begin(self):
        self.model = {}
        self.hosts = [TierHarness(self.open()) for _ in range(2)]

    @rule(host=hosts, keys=jobs)
    def store(self, host, keys):
        assert self.hosts[host].store(keys) == {}
        for key in keys:
            self.model.setdefault(key, GOOD)  # the first writer wins

    @rule(host=hosts, keys=jobs)
    def load(self, host, keys):
        failures = self.hosts[host].load(keys)
        for i, key in enumerate(keys):
            state = self.model.get(key)
            kind = {None: BlockMissingError, BAD: CorruptBlockError}.get(state)
            assert type(failures.get(i)) is (kind or type(None))
            assert kind or self.hosts[host].holds(key, i)
            if state is BAD:
                del self.model[key]  # it was removed, so that it can be stored again

    @rule(host=hosts, keys=jobs)
    def ask(self, host, keys):
        assert self.hosts[host].contains(keys) == {key for key in keys if key in self.model}

    @rule(host=hosts)
    def ask_for_heads(self, host):
        present = [key in self.model for key in K]
        (length,) = self.hosts[host].run(self.hosts[host].tier.longest_prefixes([K]))
        head = present.index(False) if False in present else len(K)
        # With a gap any answer is right that ends before an absent key.
        assert length == head or (any(present[head:]) and not [*present, False][length])

    @rule(key=st.sampled_from(K))
    def damage(self, key):
        self.put_bad(key)
        self.model[key] = BAD

    @rule(key=st.sampled_from(K))
    def lose(self, key):
        self.delete(key)
        self.model.pop(key, None)

    @rule()
    def restart(self):
        self.close()
        self.hosts = [TierHarness(self.open()) for _ in range(2)]

    @invariant()
    def nothing_is_in_flight(self):
        for harness in getattr(self, "hosts", ()):
            assert harness.tier.gauges()["bytes_in_flight"] == 0

    def close(self):
        """Close the hosts, the last one first: each looks for threads that are younger than it."""
        for harness in reversed(getattr(self, "hosts", ())):
            harness.close()

    def teardown(self):
        self.close()


def run(machine):
    """Fewer examples than elsewhere: each step is a dozen system calls or more."""
    examples = max(5, settings.default.max_examples // 5)
    machine.TestCase.settings = settings(settings.default, max_examples=examples)
    machine.TestCase().runTest()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with ValkeyServer(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.mark.stateful
def test_valkey(server):
    class ValkeyMachine(RemoteMachine):
        def open(self):
            return tier_at(server.url())

        def _name(self, key):
            return self.hosts[0].tier._client._prefix + key

        @initialize()
        def begin(self):
            with server.client() as client:
                client.flushall()
            super().begin()

        def put_bad(self, key):
            with server.client() as client:
                client.set(self._name(key), b"bad")

        def delete(self, key):
            with server.client() as client:
                client.delete(self._name(key))

    run(ValkeyMachine)


@pytest.mark.stateful
def test_object(tmp_path_factory):
    class ObjectMachine(RemoteMachine):
        def open(self):
            return tier_on(self.connection)

        @initialize()
        def begin(self):
            self.connection = ObjectOptions(url=f"file://{tmp_path_factory.mktemp('blocks')}")
            self.objects = self.connection.open()
            super().begin()

        def put_bad(self, key):
            obstore.put(self.objects, self.hosts[0].tier._client._name(key), b"bad")

        def delete(self, key):
            with contextlib.suppress(FileNotFoundError):
                obstore.delete(self.objects, self.hosts[0].tier._client._name(key))

    run(ObjectMachine)
