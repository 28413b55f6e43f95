"""A forked child opens a `valkey` tier of its own."""

import pytest
from remote.valkey.tiers import QUICK, tier_at
from tiers.test_forked_children import in_child, stores_and_loads

from kvoffload_async.testing.harness import TierHarness

pytestmark = [
    pytest.mark.servers,
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "closed"])
def test_a_child_of_a_process_that_used_a_server_uses_it_too(server, is_open):
    def open_tier():
        return TierHarness(tier_at(server.url(), **QUICK))

    with open_tier() as harness:
        assert stores_and_loads(harness)
        if is_open:
            assert in_child(lambda: stores_and_loads(open_tier()))
            assert stores_and_loads(harness), "the parent goes on"
    if not is_open:
        assert in_child(lambda: stores_and_loads(open_tier()))
