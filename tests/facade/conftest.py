"""Worlds that end in order, whatever the test did to them."""

import pytest
from facade.worlds import EXCLUSIVE, Alone, World


@pytest.fixture
def worlds():
    made = []

    def make(*tiers, **options):
        made.append(World(*(tiers or (EXCLUSIVE,)), **options))
        return made[-1]

    yield make
    for world in made:
        if world.rows is not None:
            world.end()


@pytest.fixture
def alone():
    made = []

    def make(*args, **kwargs):
        made.append(Alone(*args, **kwargs))
        return made[-1]

    yield make
    for world in made:
        world.end()
