"""A forked child opens a `mooncake` tier with a helper process of its own."""

import pytest
from tiers.test_forked_children import in_child, stores_and_loads

from kvoffload_async.testing.harness import TierHarness

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
