"""Helper processes in a forked child, and where no thread can be started."""

import asyncio

import pytest
from own_threads import Threadless
from remote.mooncake.fakes import children
from tiers.test_forked_children import in_child, stores_and_loads

from kvoffload_async.errors import TierUnavailableError
from kvoffload_async.testing.harness import TierHarness
from kvoffload_async.tiers.mooncake.process import Helper

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "closed"])
def test_a_child_of_a_process_with_a_helper_starts_another_one(fake, is_open):
    with TierHarness(fake.tier()) as harness:
        assert stores_and_loads(harness)
        if is_open:
            assert in_child(lambda: stores_and_loads(TierHarness(fake.tier())))
            assert stores_and_loads(harness), "the parent goes on"
    if not is_open:
        assert in_child(lambda: stores_and_loads(TierHarness(fake.tier())))


def test_closing_a_tier_starts_no_thread(fake, monkeypatch):
    harness = TierHarness(fake.tier())
    Threadless(monkeypatch, [])
    harness.close()


def test_a_helper_without_the_thread_that_waits_for_it_is_killed(fake, monkeypatch):
    before = children()

    async def start():
        with pytest.raises(TierUnavailableError, match=r"thread of a helper cannot.*ulimit -u"):
            Helper(fake.settings(), 4096, asyncio.get_running_loop())

    Threadless(monkeypatch, [])
    asyncio.run(start())
    assert children() == before
