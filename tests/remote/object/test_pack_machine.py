"""Random histories of hosts that pack, each its own way: what is served is right, nothing lost."""

from concurrent.futures import ThreadPoolExecutor

import obstore
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from remote.object.tiers import names_in, tier_on

from kvoffload_async.errors import BlockMissingError, CorruptBlockError
from kvoffload_async.testing import TierHarness
from kvoffload_async.testing.harness import content_of, key_of
from kvoffload_async.tiers.files.digests import IntegrityKey
from kvoffload_async.tiers.object.client import ObjectConnection, name_of
from kvoffload_async.tiers.object.packs import is_chunk_boundary
from kvoffload_async.tiers.object.tier import most_questions

pytestmark = pytest.mark.slow

BLOCK_BYTES = 4096
KEYS = [key_of(number) for number in range(24)]
# Three prompts: the second parts from the first behind 5 blocks, the third is another one.
PROMPTS = [KEYS[:12], [*KEYS[:5], *KEYS[12:18]], KEYS[18:]]
assert any(is_chunk_boundary(key, 4) for key in PROMPTS[0][1:]), "packs end within a prompt too"

hosts = st.integers(0, 1)
pack_sizes = st.sampled_from([0, 4, 8, 64])
slices = st.tuples(st.sampled_from(PROMPTS), st.integers(0, 11), st.integers(1, 12)).map(
    lambda drawn: (drawn[0], min(drawn[1], len(drawn[0]) - 1), drawn[1] + drawn[2])
)


class PackMachine(RuleBasedStateMachine):
    """Two hosts that look for prompts, and store and load what they please of them.

    Each packs as much as it was told to, or nothing, and remembers answers or does not.
    """

    folder = ""

    @initialize(
        pack_blocks=st.tuples(pack_sizes, pack_sizes),
        remembers=st.booleans(),
        integrity_key=st.sampled_from([None, IntegrityKey(b"k" * 32)]),
    )
    def begin(self, pack_blocks, remembers, integrity_key):
        self.pack_blocks = pack_blocks
        seconds = 60.0 if remembers else 0.0
        self.options = {
            "remember_present_s": seconds,
            "negative_cache_ttl_s": seconds,
            "integrity_key": integrity_key,
        }
        self.connection = ObjectConnection(f"file://{self.make_folder()}")
        self.objects = self.connection.open()
        self.stored = set()
        """What some host has stored, and nobody has damaged or lost since."""
        self.contents = {}
        """What every object had when it was last looked at."""
        self.bad = set()
        """The objects that were damaged; no other one may go, or change."""
        self.is_sound = True
        """Whether nothing was ever damaged, lost, or put there by somebody else."""
        self.hosts = [self.open(blocks) for blocks in pack_blocks]

    def open(self, pack_blocks):
        return TierHarness(
            tier_on(self.connection, pack_bytes=pack_blocks * BLOCK_BYTES, **self.options)
        )

    @rule(host=hosts, part=slices)
    def look(self, host, part):
        prompt, begin, end = part
        harness = self.hosts[host]
        before = harness.tier.gauges()["requests"]
        question = harness.tier.longest_prefixes([prompt[begin:end]], [prompt[:begin]])
        (length,) = harness.run(question)
        asked = harness.tier.gauges()["requests"] - before
        assert asked <= most_questions(len(prompt[begin:end]))
        assert 0 <= length <= len(prompt[begin:end])
        # Those before it are taken to be there; the last one is.
        last = prompt[begin + length - 1 : begin + length] if length else ()
        assert set(last) <= self.stored or not self.is_sound

    @rule(host=hosts, part=slices, is_looked_for=st.booleans())
    def store(self, host, part, is_looked_for):
        prompt, begin, end = part
        if is_looked_for:
            self.look(host, part)
        assert self.hosts[host].store(prompt[begin:end]) == {}
        self.stored |= set(prompt[begin:end])

    @rule(host=hosts, part=slices, is_looked_for=st.booleans())
    def what_was_stored_is_loaded_at_once(self, host, part, is_looked_for):
        was_sound = self.is_sound
        self.store(host, part, is_looked_for)
        prompt, begin, end = part
        failures = self.load(host, prompt[begin:end])
        assert failures == {} or not was_sound

    @rule(parts=st.tuples(slices, slices), is_looked_for=st.booleans())
    def both_store_at_once(self, parts, is_looked_for):
        if is_looked_for:
            for host, part in enumerate(parts):
                self.look(host, part)
        chains = [prompt[begin:end] for prompt, begin, end in parts]
        with ThreadPoolExecutor(2) as threads:
            failures = threads.map(lambda host, chain: host.store(chain), self.hosts, chains)
            assert list(failures) == [{}, {}]
        self.stored |= {key for chain in chains for key in chain}

    @rule(parts=st.tuples(slices, slices))
    def both_load_at_once(self, parts):
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda host, p: self.load(host, p[0][p[1] : p[2]]), [0, 1], parts))

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
            self.put_bad(name, bytes(value))

    def put_bad(self, name, value):
        obstore.put(self.objects, name, value)
        self.contents[name] = value
        self.bad.add(name)
        self.is_sound = False

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=6, unique=True))
    def pack_what_does_not_follow(self, keys):
        """A pack of somebody else's, in order; its blocks are anywhere in the prompts."""
        if (name := self.name_of(keys[0])) not in self.names():
            value = self.hosts[0].tier._packs.wrap(keys, [content_of(k, BLOCK_BYTES) for k in keys])
            obstore.put(self.objects, name, value.data)
            self.is_sound = False

    @rule(
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=6),
        what=st.sampled_from(["table", "block", "nothing", "end"]),
    )
    def claim_what_is_not_there(self, keys, what):
        value = self.hosts[0].tier._packs.wrap(keys, [content_of(k, BLOCK_BYTES) for k in keys])
        value[{"table": 70, "block": -BLOCK_BYTES}.get(what, 0)] ^= what in {"table", "block"}
        is_good = what == "nothing" and len(set(keys)) == len(keys)
        name = self.name_of(keys[0])
        if not is_good and name not in self.names():
            self.put_bad(name, value[: -1 if what == "end" else None].tobytes())

    @rule(number=st.integers(0, 20))
    def lose(self, number):
        if names := self.names():
            name = names[number % len(names)]
            obstore.delete(self.objects, name)
            self.contents.pop(name, None)
            self.bad.discard(name)
            self.is_sound = False

    @rule(host=hosts)
    def restart(self, host):
        del host
        for harness in reversed(self.hosts):
            harness.close()
        self.hosts = [self.open(blocks) for blocks in self.pack_blocks]

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
    def no_good_object_is_overwritten_or_removed(self):
        now = {name: bytes(obstore.get(self.objects, name).bytes()) for name in self.names()}
        for name, content in getattr(self, "contents", now).items():
            if now.get(name) != content:
                assert name in self.bad
                self.bad.remove(name)
        self.contents = now

    @invariant()
    def nothing_is_in_flight(self):
        for harness in getattr(self, "hosts", ()):
            assert harness.tier.gauges()["bytes_in_flight"] == 0

    def name_of(self, key):
        return name_of(self.hosts[0].tier._client._namespace, key)

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
