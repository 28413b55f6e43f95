"""The example tier meets the whole contract, plain and in a wrapper that could inject faults."""

import pytest

from kvoffload_async.errors import TierClosedError
from kvoffload_async.testing import FaultyTier, InlineIo, TierConformance, TierHarness
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.example import ExampleSettings, ExampleTier


class TestExampleTier(TierConformance):
    short_io_timeout_s = 0.05

    @pytest.fixture
    def tier(self):
        return ExampleTier


class TestExampleTierInAFaultlessWrapper(TestExampleTier):
    @pytest.fixture
    def tier(self):
        return lambda: FaultyTier(ExampleTier())


def test_it_counts_its_blocks_and_keeps_one_copy_of_each():
    tier = ExampleTier()
    with TierHarness(tier) as harness:
        harness.store([key_of(1), key_of(2)])
        harness.store([key_of(2), key_of(3)])
        assert tier.get_num_blocks() == 3


def test_a_stored_block_keeps_its_bytes_when_its_slot_changes():
    with TierHarness(ExampleTier()) as harness:
        harness.store([key_of(1)], [0])
        harness.rows[0] = 0
        assert harness.load([key_of(1)], [5]) == {}
        assert harness.holds(key_of(1), 5)


def test_it_refuses_work_before_it_is_open():
    tier = ExampleTier()
    with TierHarness(tier) as harness:
        job = harness.job([key_of(1)], [0], is_promotion=False)
    with pytest.raises(TierClosedError), TierHarness(ExampleTier()) as other:
        other.run(tier.store(job))


def test_its_option_is_logged_and_checked(caplog):
    caplog.set_level("INFO")
    ExampleTier(ExampleSettings(custom_param=7))
    assert "custom_param=7" in caplog.text


def test_inline_io_runs_a_call_at_once():
    assert InlineIo
