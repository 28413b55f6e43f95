"""A capacity beyond the space of the filesystem is warned of at opening, by both tiers on disk."""

import pytest

from kvoffload_async.facade.secondary import FileSystemTierManager, SlabTierManager
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.testing.harness import key_of, make_job
from kvoffload_async.tiers.files.ops import FileOps, warn_of_capacity

MIB = 1 << 20
BLOCK = 4096
DEADLINE_S = 30.0


class Disk(FileOps):
    """A filesystem with so many free bytes."""

    def __init__(self, free_bytes):
        super().__init__()
        self._free_bytes = free_bytes

    def free_bytes(self, folder):
        super().free_bytes(folder)
        return self._free_bytes


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("capacity_bytes:")]


def open_tier(kind, root, free_bytes, view, **options):
    manager = {"fs": FileSystemTierManager, "slab": SlabTierManager}[kind]
    options = {"capacity_bytes": 64 * MIB, **options}
    return manager(None, view, model="m", root_dir=str(root), ops=Disk(free_bytes), **options)


@pytest.fixture
def view():
    buffer = PrimaryBuffer(4, BLOCK)
    yield buffer.view
    assert buffer.release()


@pytest.mark.parametrize("kind", ["fs", "slab"])
@pytest.mark.parametrize("free_bytes", [8 * MIB, 64 * MIB, None])
def test_a_capacity_beyond_the_free_space_is_warned_of_once(
    kind, free_bytes, view, tmp_path, caplog
):
    tier = open_tier(kind, tmp_path, free_bytes, view)
    tier.submit_store(make_job(1, [key_of(1)], [0], is_promotion=False))
    assert tier.drain_jobs(DEADLINE_S)
    assert all(result.success for result in tier.get_finished_jobs())
    assert tier.shutdown(DEADLINE_S).is_clean
    said = warnings(caplog)
    if free_bytes == 8 * MIB:
        assert len(said) == 1
        assert f"{64 * MIB} is more than the filesystem of {str(tmp_path)!r} has" in said[0]
        assert f"{8 * MIB} bytes are free" in said[0]
    else:
        assert said == []


@pytest.mark.parametrize("kind", ["fs", "slab"])
def test_space_that_the_tier_uses_already_counts_as_its_own(kind, view, tmp_path, caplog):
    tier = open_tier(kind, tmp_path, 64 * MIB, view)
    tier.submit_store(make_job(1, [key_of(1)], [0], is_promotion=False))
    assert tier.drain_jobs(DEADLINE_S)
    assert tier.shutdown(DEADLINE_S).is_clean
    again = open_tier(kind, tmp_path, 64 * MIB - BLOCK, view)
    assert again.shutdown(DEADLINE_S).is_clean
    assert warnings(caplog) == []


def test_the_free_space_is_that_of_the_filesystem(tmp_path, caplog):
    ops = FileOps()
    ops.enter(str(tmp_path))
    free_bytes = ops.free_bytes(str(tmp_path))
    assert free_bytes > 0
    warn_of_capacity(ops, str(tmp_path), 1 << 62, 0)
    assert len(warnings(caplog)) == 1
    ops.leave(str(tmp_path))
