"""What a newer release has left in a namespace, as the command sees it."""

import json
import os

import pytest
from fs.maintenance.stores import HOUR_S, has_digest

NEWER = b"\x04" + bytes(20)


@pytest.fixture
def newer(store):
    """Blocks of which some are of a newer release, with other bytes and lengths."""
    if not has_digest(store.blocks[0]):
        pytest.skip("no extended attributes here")
    paths = store.blocks[::7]
    for number, path in enumerate(paths):
        os.setxattr(path, "user.kvoffload.xxh3", NEWER)
        os.truncate(path, 4096 * (number % 2) + 10 * (number % 3))
    return paths


def test_newer_blocks_are_counted_as_such_and_are_not_corrupt(store, newer):
    found = store.run("verify")["verification"]
    assert found["newer"] == len(newer)
    assert found["verified"] == len(store.blocks) - len(newer)
    assert found["corrupt"] == []
    before = store.blocks
    assert store.run("gc", "--corrupt")["corrupt"] == []
    assert store.blocks == before


def test_verify_shows_them_to_people(store, newer):
    result = store.command.run("store", "verify", store.root)
    assert result.exit_code == 0
    (line,) = [line for line in result.stdout.splitlines() if "of a newer release" in line]
    assert str(len(newer)) in line


@pytest.mark.parametrize("verb", ["inspect", "verify", "gc"])
def test_a_newer_namespace_is_refused_with_what_it_needs_and_left_as_it_is(bounded, verb):
    body = {"format": "kvoffload-fs", "version": 1, "features": {"incompatible": ["x"]}}
    (bounded.folder / ".format").write_text(json.dumps(body))
    bounded.temp("1-0123456789ab", age_s=24 * HOUR_S)
    os.truncate(bounded.blocks[0], 10)
    before = sorted(bounded.root.rglob("*"))
    lines = bounded.complaints(verb)  # where folders take no disk, of the count as well
    says = "it is of a newer release: it needs a release that knows feature 'x'"
    assert sum(says in line for line in lines) == 1
    assert sorted(bounded.root.rglob("*")) == before


def test_a_namespace_that_may_only_be_read_is_read(bounded):
    features = {"read_only_compatible": ["x"]}
    body = {"format": "kvoffload-fs", "version": 1, "features": features}
    (bounded.folder / ".format").write_text(json.dumps(body))
    assert bounded.run("verify")["verification"]["checked"] == len(bounded.blocks)
    bounded.run("inspect")
    (line,) = bounded.complaints("gc", "--corrupt")
    assert "this one may only read it" in line
