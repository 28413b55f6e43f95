"""A child forked from a process that has used an object store, or not: run beside the tests.

    python forked_use.py URL WHEN

`WHEN` is "unused" (the parent has only checked the configuration), "open" or "closed". The child
opens a tier, and prints what it loads, or the error.
"""

import os
import signal
import sys

from remote.object.tiers import tier_on

from kvoffload_async import SecondaryTierFactory
from kvoffload_async.errors import StateError
from kvoffload_async.testing.harness import TierHarness, key_of
from kvoffload_async.tiers.object.tier import ObjectOptions

KEYS = [key_of(number) for number in range(4)]
DEADLINE_S = 60


def use(connection):
    """Open a tier, and store and load blocks."""
    harness = TierHarness(tier_on(connection))
    assert harness.store(KEYS) == {}
    assert harness.load(KEYS) == {}
    return harness


def main(url, when):
    connection = ObjectOptions(url=url)
    if when == "unused":
        SecondaryTierFactory.check_config({"type": "object", "url": url, "model": "m"})
    else:
        kept = use(connection)
        if when == "closed":
            kept.close()
    child = os.fork()
    if not child:
        signal.alarm(DEADLINE_S)
        try:
            use(connection)
            said = "loaded"
        except StateError as error:
            said = str(error)
        os.write(1, said.encode())
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if when == "open":
        assert kept.load(KEYS) == {}, "the parent goes on"
        kept.close()
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
