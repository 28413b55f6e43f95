"""Stores on filesystems of all kinds, and a power cut of a real one."""

import itertools
import shutil
from pathlib import Path

import pytest
from fs.directories import KIB, FsDirectory
from mounts import KINDS, make_image, mounted, mounted_image
from powercuts import problems
from slab.stores import SlabStore

from kvoffload_async.abc.maintenance import Problem
from kvoffload_async.testing import TierConformance
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.fs.maintenance.store import FsMaintenance
from kvoffload_async.tiers.slab.maintenance.store import SlabMaintenance

K = [key_of(number) for number in range(24)]
ROOM = {"capacity_bytes": 1024 * KIB}
TIERS = {
    "fs": (FsDirectory, {}),
    "fs bounded": (FsDirectory, ROOM | {"direct_io": True, "fsync": True}),
    "slab": (SlabStore, ROOM),
    "slab direct": (SlabStore, ROOM | {"direct_io": True, "fsync": True}),
}

serials = itertools.count()


@pytest.fixture(scope="module", params=KINDS)
def filesystem(request, tmp_path_factory):
    with mounted(request.param, tmp_path_factory.mktemp(request.param)) as folder:
        yield folder


@pytest.mark.slow
@pytest.mark.mounts
class TestTierOnAnyFilesystem(TierConformance):
    fault_seeds = range(1)
    short_io_timeout_s = 0.05
    traffic_runs = 2

    @pytest.fixture(params=["fs bounded", "slab direct"])
    def tier(self, request, filesystem):
        kind, options = TIERS[request.param]
        store = kind(filesystem / f"root{next(serials)}")
        return lambda: store.tier(**options)


@pytest.mark.mounts
@pytest.mark.parametrize("name", TIERS)
def test_blocks_come_and_go_and_the_store_is_clean(filesystem, name):
    kind, options = TIERS[name]
    root = filesystem / f"root{next(serials)}"
    with kind(root).open(**options) as harness:
        for first in range(0, 24, 4):
            assert harness.store(K[first : first + 4]) == {}
        assert harness.load(K) == {}
        assert all(harness.holds(key, slot) for slot, key in enumerate(K))
    with kind(root).open(**options) as harness:
        assert harness.load(K) == {}
    maintenance = FsMaintenance if kind is FsDirectory else SlabMaintenance
    assert not [f for f in problems(maintenance, root) if isinstance(f, Problem)]


@pytest.mark.mounts
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (FsDirectory, {"fsync": True}),
        (FsDirectory, {"fsync": True, "capacity_bytes": 160 * KIB}),
        (SlabStore, {"fsync": True, "capacity_bytes": 160 * KIB, "segment_bytes": 32 * KIB}),
    ],
    ids=["fs", "fs bounded", "slab"],
)
def test_what_a_real_filesystem_has_after_a_cut_has_what_was_acknowledged(tmp_path, kind, options):
    """The image as it is while the filesystem is mounted is the disk as a cut would leave it."""
    make_image("ext4", tmp_path / "image")
    with mounted_image(tmp_path / "image", tmp_path / "mounted") as folder:
        root = folder / "root"
        with kind(root).open(**options) as harness:
            for first in range(0, 24, 3):
                assert harness.store(K[first : first + 3]) == {}
                there = harness.contains(K)
                assert set(K[first : first + 3]) <= there
                after_cut(tmp_path, first, kind, options, there)


def after_cut(folder: Path, number: int, kind, options: dict, there: frozenset) -> None:
    image = folder / f"cut{number}"
    shutil.copyfile(folder / "image", image)
    with (
        mounted_image(image, folder / f"mounted{number}") as cut,
        kind(cut / "root").open(**options) as harness,
    ):
        failures = harness.load(K)
        served = {key for slot, key in enumerate(K) if slot not in failures}
        assert served >= there, "an acknowledged block is lost"
        assert all(harness.holds(key, K.index(key)) for key in served)
    image.unlink()
