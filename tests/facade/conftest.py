"""Worlds that end in order, whatever the test did to them."""

import importlib

import pytest
from facade.worlds import EXCLUSIVE, Alone, World
from out_of_tree import out_of_tree_module

from kvoffload_async import SecondaryTierFactory


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


@pytest.fixture
def module(tmp_path, monkeypatch):
    with out_of_tree_module(tmp_path, monkeypatch) as name:
        yield name


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put a distribution with entry points on the path."""

    def put(group, **points):
        info = tmp_path / "elsewhere-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
        lines = [f"{name} = {target}" for name, target in points.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()

    return put


@pytest.fixture
def view():
    return memoryview(bytearray(4 * 64)).cast("B", (4, 64))


@pytest.fixture
def create(view):
    made = []

    def make(config):
        made.append(SecondaryTierFactory.create_secondary_tier(config, view, None))
        return made[-1]

    yield make
    for tier in made:
        assert tier.shutdown(5.0).is_clean
