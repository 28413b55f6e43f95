"""The conformance suite finds tiers that break the contract: each of these fails it by name."""

import inspect
from dataclasses import dataclass

import numpy as np
import pytest

from kvoffload_async.abc.tier import Direction, TierCapabilities, TierSettings
from kvoffload_async.config import at_least, option
from kvoffload_async.errors import BlockMissingError, ConfigError, CorruptBlockError, Trouble
from kvoffload_async.testing import TierConformance
from kvoffload_async.tiers.example import ExampleTier


class WrongBytes(ExampleTier):
    async def load(self, job):
        failures = await super().load(job)
        for slot in job.block_ids.tolist():
            self._rows[slot][0] ^= 1
        return failures


class AllOrNothing(ExampleTier):
    async def load(self, job):
        if any(key not in self._blocks for key in job.keys):
            return {i: BlockMissingError("none") for i in range(len(job.keys))}
        return await super().load(job)


class SilentlyMissing(ExampleTier):
    async def load(self, job):
        await super().load(job)
        return {}


class RefusesTheSecondStore(ExampleTier):
    async def store(self, job):
        failures = await super().store(job)
        return {**failures, **{i: OSError() for i, k in enumerate(job.keys) if k in self.seen(job)}}

    def seen(self, job):
        old, self._seen = getattr(self, "_seen", set()), {*getattr(self, "_seen", ()), *job.keys}
        return old


class TouchesAnotherSlot(ExampleTier):
    async def store(self, job):
        self._rows[60] = 0
        return await super().store(job)


class ContainsEverything(ExampleTier):
    async def contains(self, keys):
        return frozenset(keys)


SHARED = {}


class NotExclusive(ExampleTier):
    def __init__(self):
        super().__init__()
        self._blocks = SHARED


class OneAtATime(ExampleTier):
    busy = False

    async def load(self, job):
        if self.busy:
            raise OSError("busy")
        self.busy = True
        try:
            return await super().load(job)
        finally:
            self.busy = False


class RaisesOnClose(ExampleTier):
    async def close(self):
        if self._env is None:
            raise RuntimeError("was never open")
        await super().close()


class HoldsTheBuffer(ExampleTier):
    async def close(self):
        pass


class Forgetful(ExampleTier):
    capabilities = TierCapabilities(exclusive=True, persistent=True)


class CorruptsItsNeighbours(ExampleTier):
    async def load(self, job):
        failures = await super().load(job)
        bad = [i for i, k in enumerate(job.keys) if k in self._blocks and not self._blocks[k].any()]
        return {i: CorruptBlockError("bad") for i in range(len(job.keys))} if bad else failures


class Undescribed(ExampleTier):
    @dataclass(frozen=True, kw_only=True)
    class declares(TierSettings):
        depth: int = option(at_least(1), 3)


class AdvisesOnOtherErrors(ExampleTier):
    remedies = {OSError: "check the disk"}  # noqa: RUF012


class AdvisesNothing(ExampleTier):
    remedies = {Trouble.TOO_SLOW: ""}  # noqa: RUF012


class MaintainsNothing(ExampleTier):
    @classmethod
    def maintenance(cls):
        return dict


DECLARES = "test_the_class_declares_options_remedies_and_maintenance"
BROKEN = [
    (Undescribed, DECLARES),
    (AdvisesOnOtherErrors, DECLARES),
    (AdvisesNothing, DECLARES),
    (MaintainsNothing, DECLARES),
    (WrongBytes, "test_a_stored_block_loads_with_equal_bytes"),
    (AllOrNothing, "test_a_missing_block_fails_alone_and_as_missing"),
    (SilentlyMissing, "test_a_missing_block_fails_alone_and_as_missing"),
    (SilentlyMissing, "test_a_missing_key_is_one_failed_result_with_the_others_landed"),
    (RefusesTheSecondStore, "test_a_present_block_is_stored_again_with_success"),
    (TouchesAnotherSlot, "test_other_slots_than_the_jobs_are_untouched"),
    (ContainsEverything, "test_contains_tells_what_loads"),
    (NotExclusive, "test_an_exclusive_tier_shares_its_contents_with_nobody"),
    (OneAtATime, "test_as_many_jobs_run_at_once_as_the_bounds_say"),
    (RaisesOnClose, "test_closing_after_a_failed_open_is_harmless"),
    (HoldsTheBuffer, "test_a_stored_block_loads_with_equal_bytes"),
    (Forgetful, "test_blocks_survive_a_restart_exactly_if_persistent"),
    (CorruptsItsNeighbours, "test_a_damaged_block_fails_alone_and_as_corrupt"),
]


class Damaging(TierConformance):
    def damage(self, tier, key):
        tier._blocks[key][:] = 0
        return True


@pytest.mark.parametrize(("tier", "name"), BROKEN, ids=lambda x: getattr(x, "__name__", x))
def test_a_tier_that_breaks_the_contract_fails_the_test_that_names_it(tier, name):
    SHARED.clear()
    with pytest.raises((AssertionError, ExceptionGroup, OSError, RuntimeError)) as failure:
        getattr(Damaging(), name)(tier)
    (note,) = failure.value.__notes__
    assert note.startswith("The contract of AsyncTier promises: ")


@pytest.mark.parametrize(
    ("tier", "name", "text"),
    [
        (
            WrongBytes,
            "test_a_stored_block_loads_with_equal_bytes",
            r"expected in slot 9 the content of block K\[0\], which has \d+ in byte 0, got \d+ in",
        ),
        (
            SilentlyMissing,
            "test_a_missing_block_fails_alone_and_as_missing",
            r"\{0: 'BlockMissingError', 2: 'BlockMissingError'\}, by position in the job, got \{\}",
        ),
        (
            AllOrNothing,
            "test_a_missing_block_fails_alone_and_as_missing",
            r"got \{0: BlockMissingError\('none'\), 1: BlockMissingError",
        ),
        (
            TouchesAnotherSlot,
            "test_other_slots_than_the_jobs_are_untouched",
            r"expected no other slot to be written, got slots \[60\]",
        ),
        (
            ContainsEverything,
            "test_contains_tells_what_loads",
            r"expected \{K\[0\], K\[1\]\}, got \{K\[0\], K\[1\], K\[4\]\}",
        ),
        (
            Forgetful,
            "test_blocks_survive_a_restart_exactly_if_persistent",
            r"announced by open\(\) after a restart: expected \{K\[0\], K\[1\], K\[2\]\}, got \{\}",
        ),
    ],
)
def test_a_failure_says_what_was_expected_and_what_came(tier, name, text):
    with pytest.raises(AssertionError, match=text):
        getattr(Damaging(), name)(tier)


def test_an_error_of_the_tier_is_not_hidden_by_the_memory_that_its_frames_hold():
    class Failing(ExampleTier):
        async def load(self, job):
            row = self._rows[job.block_ids[0]]
            raise ZeroDivisionError(len(row))

    with pytest.raises(ZeroDivisionError):
        TierConformance().test_a_stored_block_loads_with_equal_bytes(Failing)


def test_every_test_of_the_suite_names_the_promise_that_it_tests():
    class BrokenFactory(Exception):
        pass

    def factory():
        raise BrokenFactory

    tests = [name for name in vars(TierConformance) if name.startswith("test_")]
    for name in tests:
        with pytest.raises(BrokenFactory) as failure:
            getattr(TierConformance(), name)(factory)
        assert "promises" in "".join(failure.value.__notes__)


def test_a_tier_that_detects_damage_block_by_block_passes():
    class Checked(ExampleTier):
        async def load(self, job):
            failures = await super().load(job)
            for i, key in enumerate(job.keys):
                if key in self._blocks and not self._blocks[key].any():
                    failures[i] = CorruptBlockError("zeros")
            return failures

    Damaging().test_a_damaged_block_fails_alone_and_as_corrupt(Checked)


def test_a_persistent_tier_and_a_shared_one_and_one_that_locks_pass():
    blocks, locked = {}, []

    class Persistent(ExampleTier):
        capabilities = TierCapabilities(exclusive=True, persistent=True)

        async def open(self, env):
            if locked:
                raise ConfigError("in use")
            locked.append(1)
            self._blocks = blocks
            await super().open(env)
            env.blocks_appeared(blocks)

        async def close(self):
            locked.clear()
            await super().close()

    class Shared(ExampleTier):
        capabilities = TierCapabilities(exclusive=False)

    suite = TierConformance()
    suite.test_blocks_survive_a_restart_exactly_if_persistent(Persistent)
    suite.test_an_exclusive_tier_shares_its_contents_with_nobody(Persistent)
    suite.test_blocks_survive_a_restart_exactly_if_persistent(Shared)
    suite.test_an_exclusive_tier_shares_its_contents_with_nobody(Shared)
    suite.test_the_manager_finds_what_it_stored(Shared)


def test_a_tier_that_loses_blocks_under_load_fails_the_test_with_faults():
    class Torn(ExampleTier):
        async def load(self, job):
            env, rows = self._opened()

            def tear():
                for slot in job.block_ids.tolist():
                    rows[slot] = np.uint8(1)

            await env.io.run(Direction.LOAD, tear)
            return {}

    class Short(TierConformance):
        fault_seeds = range(1)

    with pytest.raises(AssertionError, match="a block reported as loaded: expected in slot"):
        Short().test_every_job_has_one_result_in_any_order_with_faults(Torn)


def test_every_test_of_the_suite_takes_the_fixture_and_nothing_else():
    tests = [m for n, m in inspect.getmembers(TierConformance) if n.startswith("test_")]
    assert len(tests) > 20
    assert all(list(inspect.signature(test).parameters) == ["self", "tier"] for test in tests)
