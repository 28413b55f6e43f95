"""Random histories of two hosts that pack: what is served is right, and nothing is overwritten."""

import obstore
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from remote.object.tiers import names_in, tier_on

from kvoffload_async.errors import BlockMissingError, CorruptBlockError
from kvoffload_async.testing import TierHarness
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.object.chains import is_lead
from kvoffload_async.tiers.object.client import ObjectConnection
from kvoffload_async.tiers.object.search import most_questions

pytestmark = pytest.mark.slow

BLOCK_BYTES = 4096
KEYS = [key_of(number) for number in range(24)]
# Three prompts: the second parts from the first behind 5 blocks, the third is another one.
PROMPTS = [KEYS[:12], [*KEYS[:5], *KEYS[12:18]], KEYS[18:]]
assert any(is_lead(key, 4) for key in PROMPTS[0][1:]), "packs end within a prompt too"

hosts = st.integers(0, 1)
slices = st.tuples(st.sampled_from(PROMPTS), st.integers(0, 11), st.integers(1, 12)).map(
    lambda drawn: (drawn[0], min(drawn[1], len(drawn[0]) - 1), drawn[1] + drawn[2])
)


class PackMachine(RuleBasedStateMachine):
    """Two hosts that look for prompts, and store and load what they please of them."""

    folder = ""

    @initialize(pack_blocks=st.sampled_from([4, 8, 64]))
    def begin(self, pack_blocks):
        self.pack_bytes = pack_blocks * BLOCK_BYTES
        self.connection = ObjectConnection(f"file://{self.make_folder()}")
        self.objects = self.connection.open()
        self.stored = set()
        """What some host has stored, and nobody has damaged or lost since."""
        self.contents = {}
        self.is_sound = True
        """Whether nothing was ever damaged or lost."""
        self.hosts = [self.open() for _ in range(2)]

    def open(self):
        return TierHarness(tier_on(self.connection, pack_bytes=self.pack_bytes))

    @rule(host=hosts, part=slices)
    def look(self, host, part):
        prompt, begin, end = part
        harness = self.hosts[host]
        before = harness.tier.gauges()["requests"]
        question = harness.tier.longest_prefixes([prompt[begin:end]], [prompt[:begin]])
        (length,) = harness.run(question)
        asked = harness.tier.gauges()["requests"] - before
        assert asked <= most_questions(len(prompt[begin:end]))
        found = prompt[begin : begin + length]
        if self.is_sound:
            ends_at = prompt[begin + length : begin + length + 1]
            assert set(found) <= self.stored or not set(ends_at) <= self.stored

    @rule(host=hosts, part=slices, is_looked_for=st.booleans())
    def store(self, host, part, is_looked_for):
        prompt, begin, end = part
        if is_looked_for:
            self.look(host, part)
        assert self.hosts[host].store(prompt[begin:end]) == {}
        self.stored |= set(prompt[begin:end])

    @rule(host=hosts, part=slices)
    def load_what_is_found(self, host, part):
        prompt, begin, end = part
        harness = self.hosts[host]
        (length,) = harness.run(
            harness.tier.longest_prefixes([prompt[begin:end]], [prompt[:begin]])
        )
        found = prompt[begin : begin + length]
        failures = self.load(host, found)
        if self.is_sound and set(found) <= self.stored:
            assert all(prompt[begin + i] not in found[:1] for i in failures), "the first is there"

    @rule(host=hosts, part=slices)
    def load_at_random(self, host, part):
        prompt, begin, end = part
        self.load(host, prompt[begin:end])

    def load(self, host, keys):
        """Load, and check that what did not fail is right, whatever was done to the store."""
        failures = self.hosts[host].load(keys)
        for i, key in enumerate(keys):
            if i in failures:
                assert isinstance(failures[i], BlockMissingError | CorruptBlockError)
                assert self.hosts[host].is_untouched(i)
                assert not (self.is_sound and isinstance(failures[i], CorruptBlockError))
            else:
                assert self.hosts[host].holds(key, i)
        return failures

    @rule(number=st.integers(0, 20), at=st.integers(0, 1 << 16))
    def damage(self, number, at):
        if names := self.names():
            name = names[number % len(names)]
            value = bytearray(bytes(obstore.get(self.objects, name).bytes()))
            if value:
                value[at % len(value)] ^= 1
            obstore.put(self.objects, name, bytes(value))
            self.contents.pop(name, None)
            self.is_sound = False

    @rule(number=st.integers(0, 20))
    def lose(self, number):
        if names := self.names():
            obstore.delete(self.objects, names[number % len(names)])
            self.is_sound = False

    @rule(host=hosts)
    def restart(self, host):
        del host
        for harness in reversed(self.hosts):
            harness.close()
        self.hosts = [self.open() for _ in range(2)]

    @rule(prompt=st.sampled_from(PROMPTS))
    def everything_can_be_stored_again(self, prompt):
        """Whatever is bad goes when it is loaded, after which the prompt is served whole."""
        host = self.hosts[0]
        for _ in range(len(prompt) + 1):
            host.run(host.tier.longest_prefixes([prompt]))
            failures = self.load(0, prompt)
            if not failures:
                break
            assert host.store(prompt) == {}
        assert not failures
        self.stored |= set(prompt)

    @invariant()
    def no_object_is_overwritten(self):
        now = {name: bytes(obstore.get(self.objects, name).bytes()) for name in self.names()}
        for name, content in now.items():
            # What is bad is removed, and stored anew.
            assert self.contents.get(name, content) == content or not self.is_sound
        self.contents = now

    @invariant()
    def nothing_is_in_flight(self):
        for harness in getattr(self, "hosts", ()):
            assert harness.tier.gauges()["bytes_in_flight"] == 0

    def names(self):
        if not hasattr(self, "connection"):
            return []
        return sorted(name for name in names_in(self.connection) if "_g" in name)

    def teardown(self):
        for harness in reversed(getattr(self, "hosts", ())):
            harness.close()


@pytest.mark.stateful
def test_two_hosts_that_pack(tmp_path_factory):
    class Machine(PackMachine):
        def make_folder(self):
            return tmp_path_factory.mktemp("blocks")

    examples = max(5, settings.default.max_examples // 5)
    Machine.TestCase.settings = settings(settings.default, max_examples=examples)
    Machine.TestCase().runTest()
