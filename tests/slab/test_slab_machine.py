"""A `slab` store against a dictionary, with everything that can go wrong."""

import errno
import shutil
import tempfile
from pathlib import Path

import pytest
from faulty_files import FaultyFileOps
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from slab.stores import BLOCK, FIXED, SlabStore, flip, sound

from kvoffload_async.abc.events import BlocksAppeared, BlocksEvicted
from kvoffload_async.errors import BlockMissingError, CorruptBlockError, TierFullError
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.slab.layout import segment_name
from kvoffload_async.tiers.slab.records import RECORD_BYTES

K = [key_of(number) for number in range(40)]
SLOTS = 24
CAPACITY = FIXED + 38 * BLOCK

some_keys = st.lists(st.sampled_from(K), min_size=1, max_size=8, unique=True)
offsets = st.floats(0, 1, exclude_max=True)


class SlabMachine(RuleBasedStateMachine):
    """One store, opened again and again, against what its blocks are: right or damaged.

    What is damaged by hand may be gone or refused, but never served; what is not must be served
    until the store says that it has evicted it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="slab-machine-"))
        self.slab_store = SlabStore(self.directory / "root")
        self.right: set = set()
        """What must be served."""
        self.doubtful: set = set()
        """What may be there, served right, or not."""

    @initialize(
        policy=st.sampled_from(["lru", "arc"]),
        segment_slots=st.integers(3, 12),
        stripes=st.integers(1, 2),
    )
    def start(self, policy, segment_slots, stripes):
        self.options = {
            "policy": policy,
            "capacity_bytes": CAPACITY,
            "segment_bytes": segment_slots * BLOCK,
            "io_threads": 2,
            "stripes": stripes,
            "piece_bytes": 3 * BLOCK,
        }
        self._open()

    def _open(self) -> None:
        self.ops = FaultyFileOps()
        self.harness = self.slab_store.open(self.ops, num_slots=SLOTS, **self.options)
        self.tier = self.harness.tier
        present = self.harness.announced()
        assert self.right <= present <= self.right | self.doubtful
        self.doubtful &= present
        self.harness.events.clear()

    def _close(self) -> None:
        self.ops.heal()
        self.harness.close()
        assert not self.ops.open_fds

    def _take_news(self) -> None:
        for event in self.harness.events:
            if isinstance(event, BlocksEvicted):
                self.right -= set(event.keys)
                self.doubtful -= set(event.keys)
            elif isinstance(event, BlocksAppeared):
                self.right |= set(event.keys)
        self.harness.events.clear()

    # -- work -----------------------------------------------------------------------------------

    @rule(keys=some_keys, shift=st.integers(0, SLOTS - 8))
    def store(self, keys, shift):
        failures = self.harness.store(keys, range(shift, shift + len(keys)))
        self._take_news()
        assert all(isinstance(error, TierFullError) for error in failures.values())
        # What was there already was not written again, and stays as doubtful as it was.
        self.right |= {k for i, k in enumerate(keys) if i not in failures} - self.doubtful

    @rule(keys=some_keys, order=st.randoms(use_true_random=False))
    def load(self, keys, order):
        slots = order.sample(range(SLOTS), len(keys))
        failures = self.harness.load(keys, slots)
        for index, (key, slot) in enumerate(zip(keys, slots, strict=True)):
            if index not in failures:
                assert self.harness.holds(key, slot), "wrong bytes were served"
                assert key in self.right | self.doubtful
            else:
                assert key not in self.right, "a good block was refused"
                assert isinstance(failures[index], BlockMissingError | CorruptBlockError)
                self.doubtful.discard(key)

    @rule(keys=some_keys)
    def touch(self, keys):
        self.harness.on_loop(lambda: self.tier.touch(keys))

    @rule()
    def restart(self):
        self._close()
        self._open()

    @rule(slots=st.integers(8, 40))
    def restart_with_another_capacity(self, slots):
        self._close()
        self.options["capacity_bytes"] = FIXED + slots * BLOCK
        before, self.right = self.right, set()
        self.doubtful |= before
        self._open()
        self.right = before & self.doubtful
        self.doubtful -= self.right

    # -- damage ---------------------------------------------------------------------------------

    def _doubt(self, keys) -> None:
        keys = set(keys)
        self.doubtful |= self.right & keys
        self.right -= keys

    @rule(key=st.sampled_from(K), byte=st.integers(0, BLOCK - 1))
    def damage_a_block(self, key, byte):
        if key in self.slab_store.addresses():
            self.slab_store.damage(key, byte=byte)
            self._doubt([key])

    @rule(at=offsets, bit=st.integers(0, 7))
    def damage_the_journal(self, at, bit):
        """While it is closed: whoever has it open overwrites it sooner or later."""
        self._close()
        before = self.slab_store.addresses()
        size = self.slab_store.journal.stat().st_size
        if size:
            flip(self.slab_store.journal, int(at * size), bit)
            after = self.slab_store.addresses()
            # A lost removal brings a block back, whose slot may have other bytes by now.
            self.doubtful |= after.keys() - self.right
            self._doubt(before.keys() - {k for k, p in after.items() if before.get(k) == p})
        self._open()

    @rule(at=offsets)
    def cut_the_journal(self, at):
        self._close()
        before = self.slab_store.addresses()
        size = self.slab_store.journal.stat().st_size
        with self.slab_store.journal.open("r+b") as file:
            file.truncate(int(at * size))
        after = self.slab_store.addresses()
        self.doubtful |= after.keys() - self.right
        self._doubt(before.keys() - {k for k, p in after.items() if before.get(k) == p})
        self._open()

    @rule(at=offsets, junk=st.binary(min_size=1, max_size=3 * RECORD_BYTES))
    def append_to_the_journal(self, at, junk):
        self._close()
        with self.slab_store.journal.open("ab") as file:
            file.write(junk)
        self._open()

    @rule(number=st.integers(0, 3), slots=st.integers(0, 6))
    def cut_a_segment(self, number, slots):
        numbers = sorted(self.tier._store.catalog.segments)
        number = numbers[number % len(numbers)] if numbers else 0
        path = self.slab_store.folder / segment_name(number)
        size = self.slab_store.size_of(slots)
        if path.exists() and path.stat().st_size > size:
            with path.open("r+b") as file:
                file.truncate(size)
            first = number << 32 | slots
            last = (number + 1) << 32
            blocks = self.tier._store.catalog.items()
            self._doubt(k for k, p in blocks if first <= p < last)

    # -- trouble --------------------------------------------------------------------------------

    @rule(
        keys=some_keys,
        code=st.sampled_from([errno.EIO, errno.ENOSPC]),
        skip=st.integers(0, 12),
        times=st.integers(1, 3),
        is_load=st.booleans(),
    )
    def calls_fail(self, keys, code, skip, times, is_load):
        for at in range(times):
            self.ops.fail(code, at=len(self.ops.calls) + 1 + skip + at)
        self._try(keys, is_load=is_load)

    @rule(keys=some_keys)
    def the_disk_is_full(self, keys):
        self.ops.fail(errno.ENOSPC, on="pwrite fallocate")
        self._try(keys, is_load=False)

    @rule(keys=some_keys)
    def the_disk_is_full_for_a_moment(self, keys):
        self.ops.fail(errno.ENOSPC, on="pwrite fallocate", times=1)
        self._try(keys, is_load=False)

    @rule(keys=some_keys, max_bytes=st.sampled_from([1000, BLOCK, 5000]))
    def calls_are_short(self, keys, max_bytes):
        self.ops.shorten(max_bytes, on="pwritev preadv pwrite")
        self._try(keys, is_load=False)
        self._try(keys, is_load=True)

    def _try(self, keys, *, is_load: bool) -> None:
        """Store or load in trouble: what is claimed must be true, everything else may fail."""
        failures = self.harness.load(keys) if is_load else self.harness.store(keys)
        self.ops.heal()
        self._take_news()
        for slot, key in enumerate(keys):
            if slot not in failures:
                if is_load:
                    assert self.harness.holds(key, slot), "wrong bytes were served"
                elif key not in self.doubtful:
                    self.right.add(key)
            elif isinstance(failures[slot], BlockMissingError | CorruptBlockError):
                assert key not in self.right
                self.doubtful.discard(key)

    # -- what always holds ----------------------------------------------------------------------

    @invariant()
    def the_accounting_is_exact(self):
        if hasattr(self, "tier"):
            sound(self.tier)
            assert self.right <= set(self.tier._store.catalog.keys())

    @invariant()
    def the_capacity_is_not_exceeded(self):
        if hasattr(self, "tier"):
            assert self.slab_store.disk_bytes() <= self.options["capacity_bytes"]

    @precondition(lambda self: hasattr(self, "tier"))
    @rule()
    def everything_that_must_be_is_served(self):
        keys = sorted(self.right)[:SLOTS]
        assert self.harness.load(keys) == {}
        assert all(self.harness.holds(key, slot) for slot, key in enumerate(keys))

    def teardown(self):
        try:
            if hasattr(self, "harness"):
                self._close()
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)


@pytest.mark.stateful
def test_a_store_serves_right_bytes_and_accounts_exactly_whatever_happens():
    run_state_machine_as_test(
        SlabMachine,
        settings=settings(
            max_examples=max(1, settings().max_examples // 3), stateful_step_count=20
        ),
    )
