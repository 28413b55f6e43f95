"""Damaged blocks: never served, named by `verify`, removed by `gc` when it is asked to."""

import os
from pathlib import Path

import pytest
from fs.maintenance.stores import has_digest, truncate


def flip(path):
    if not has_digest(path):
        pytest.skip("no extended attributes here")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    with path.open("r+b") as file:
        file.write(data)


def swap(path):
    """Give it another block's bytes and digest."""
    other = next(p for p in path.parent.glob("*.bin") if p != path)
    if not has_digest(other):
        pytest.skip("no extended attributes here")
    digest = os.getxattr(other, "user.kvoffload.xxh3")
    path.write_bytes(other.read_bytes())
    os.setxattr(path, "user.kvoffload.xxh3", digest)


def test_a_store_is_warm_and_what_is_damaged_is_a_miss_and_never_a_wrong_byte(store):
    assert store.replay()["hit_ratio"] > 0.999
    victims = store.blocks[::5]
    for number, path in enumerate(victims):
        (truncate, flip, Path.unlink)[number % 3](path)
    report = store.replay()
    assert report["corrupt_blocks"] == report["leaked_pins"] == 0
    assert report["hit_ratio"] < 0.99
    assert report["jobs_submitted"] == report["job_results"]


@pytest.mark.parametrize("damage", [truncate, flip, swap])
def test_what_is_damaged_is_named_by_verify_and_removed_by_gc(store, damage):
    before = store.blocks
    victims = before[::5]
    for path in victims:
        damage(path)
    lines = store.complaints("verify", "--verbose")
    assert len(lines) == len(victims)
    for path in victims:
        assert any(str(path) in line for line in lines)
    found = store.run("verify", "--verbose", exit_code=1)["verification"]
    assert sorted(bad["what"] for bad in found["corrupt"]) == [str(path) for path in victims]
    assert found["checked"] == len(before)
    assert store.blocks == before

    assert store.run("gc")["corrupt"] == []
    assert store.blocks == before
    would_go = store.run("gc", "--corrupt", "--dry-run", exit_code=1)
    assert sorted(would_go["corrupt"]) == [str(path) for path in victims]
    assert store.blocks == before
    removed = store.run("gc", "--corrupt")
    assert sorted(removed["corrupt"]) == [str(path) for path in victims]
    assert removed["freed_bytes"] > 0
    assert removed["failures"] == []
    assert store.blocks == sorted(set(before) - set(victims))

    assert store.run("verify")["verification"]["corrupt"] == []
    assert store.replay()["corrupt_blocks"] == 0
    assert store.replay()["hit_ratio"] > 0.999
