"""vLLM's layout: in a directory shared with its tier, and otherwise a miss."""

import pytest
from faulty_files import FaultyFileOps, is_temp
from fs.directories import FsDirectory
from fs.spaces import ROOM_FOR_8, K, check, evicted, rescan

from kvoffload_async.errors import BlockMissingError


@pytest.fixture
def shared(tmp_path) -> FsDirectory:
    return FsDirectory(tmp_path / "root", is_vllms=True)


def test_blocks_in_a_shared_directory_have_vllms_names(shared):
    with shared.open() as harness:
        assert harness.store(K[:8]) == {}
        assert harness.contains(K[:9]) == frozenset(K[:8])
        assert harness.load(K[:8]) == {}
    digits = K[0][:-4].hex()
    assert (shared.folder / digits[:3] / f"{digits[3:5]}_g0" / f"{digits}.bin").exists()
    folders = {path.name for path in shared.folder.glob("[!.]*")}
    assert folders == {key.hex()[:3] for key in K[:8]}, "made when a block needs them"


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_capacity_is_kept_in_a_shared_directory(shared, policy):
    with shared.open(capacity_bytes=ROOM_FOR_8, policy=policy) as harness:
        for first in range(0, 40, 4):
            assert harness.store(K[first : first + 4]) == {}
            check(shared, harness, ROOM_FOR_8)
        assert evicted(harness)
        rescan(harness)
        check(shared, harness, ROOM_FOR_8)
    assert shared.every_block_is_whole()


def test_victims_in_a_shared_directory_are_never_overwritten(shared):
    ops = FaultyFileOps()
    with shared.open(ops, capacity_bytes=ROOM_FOR_8) as harness:
        assert harness.store(K[:8]) == {}
        opened = [shared.path(key).open("rb") for key in K[:8]]  # as by vLLM's tier
        before = [file.read() for file in opened]
        assert harness.store(K[8:16]) == {}
        assert evicted(harness)
        for file, content in zip(opened, before, strict=True):
            file.seek(0)
            assert file.read() == content
            file.close()
        assert not [c for c in ops.calls if c.name == "truncate" and is_temp(c)]


def test_blocks_in_vllms_layout_are_a_miss_for_a_tier_that_does_not_share_it(directory, shared):
    with shared.open() as harness:
        assert harness.store(K[:8]) == {}
    with directory.open(capacity_bytes=ROOM_FOR_8) as harness:
        assert isinstance(harness.load(K[:1])[0], BlockMissingError)
        assert harness.store(K[:8]) == {}
        check(directory, harness, ROOM_FOR_8)
    assert shared.blocks() == set(K[:8])
