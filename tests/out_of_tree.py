"""A module of somebody else's, with tiers that work and things that are none."""

import sys
import uuid
from contextlib import contextmanager

OUT_OF_TREE = """
from kvoffload_async import ExampleSecondaryTierManager, AsyncTier, TierCapabilities, ConfigError

class PlainManager(ExampleSecondaryTierManager):
    pass

class PlainTier(AsyncTier):
    capabilities = TierCapabilities(exclusive=True)

    def __init__(self, colour, *, io_timeout_s=1.0, depth=1, deep=False):
        self.colour = colour

    async def open(self, env):
        if self.colour == "refused":
            raise ConfigError("colour: 'refused' is not valid")

    async def contains(self, keys):
        return frozenset()

    async def store(self, job):
        return {}

    async def load(self, job):
        return {}

    async def close(self):
        pass

class NoTier:
    pass

not_even_a_class = 5
"""


@contextmanager
def out_of_tree_module(folder, monkeypatch):
    """Put the module on the path, under a name of its own."""
    name = f"out_of_tree_{uuid.uuid4().hex}"
    (folder / f"{name}.py").write_text(OUT_OF_TREE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    yield name
    sys.modules.pop(name, None)
