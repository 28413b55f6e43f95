"""Who gets which tiers and requests, and what an unbounded cache finds."""

from pathlib import Path

import pytest

from kvoffload_async import ConfigError, OffloadConfig, TieringOffloadingSpec
from kvoffload_async.cli.settings import ReplayFlags, ScratchFolder, resolve
from kvoffload_async.errors import InputError
from kvoffload_async.replay.source import ChatWorkload
from laboratory.fleet.plan import AFFINITY, RANDOM, Equipment, UnboundedCache, spread


def config(*tiers):
    return OffloadConfig.parse(
        {
            "cpu_bytes_to_use": "1MiB",
            "block_bytes": 4096,
            "model": "replay",
            "secondary_tiers": list(tiers),
        }
    )


@pytest.fixture
def bucket(tmp_path):
    return {"type": "fs", "root_dir": str(tmp_path / "bucket")}


def tiers_of(equipment, member, name="lockstep", **given):
    given = {"shares": True, "remembers": True} | given
    return list(equipment.of(member, name, **given).secondary_tiers)


def test_a_process_without_a_tier_of_its_own_gets_a_slab_before_what_is_shared(bucket, tmp_path):
    equipment = Equipment(config(bucket), tmp_path / "scratch")
    (near, far), (other, _) = tiers_of(equipment, 0), tiers_of(equipment, 1)
    assert (near["type"], far["type"]) == ("slab", "fs")
    assert near["capacity_bytes"] > 4 << 20
    assert Path(near["root_dir"]).parent == tmp_path / "scratch" / "slab"
    assert near["root_dir"] != other["root_dir"]


def test_a_slab_is_divided_and_the_other_tiers_are_shared(bucket, tmp_path):
    slab = {"type": "slab", "root_dir": str(tmp_path / "own"), "capacity_bytes": "4MiB"}
    equipment = Equipment(config(bucket, slab), tmp_path)
    (own, shared), (others, same) = tiers_of(equipment, 0), tiers_of(equipment, 1)
    assert Path(own["root_dir"]).parent == tmp_path / "own"
    assert own["root_dir"] != others["root_dir"]
    assert shared == same
    assert shared["root_dir"] == bucket["root_dir"]
    assert equipment.shared_names == ["fs"]


def test_what_processes_had_of_their_own_goes_and_what_is_not_the_fleets_stays(
    bucket, tmp_path, caplog
):
    slab = {"type": "slab", "root_dir": str(tmp_path / "own"), "capacity_bytes": "4MiB"}
    equipment = Equipment(config({"type": "example"}, bucket, slab), tmp_path)
    (folder,) = [tier["root_dir"] for tier in tiers_of(equipment, 1) if tier["type"] == "slab"]
    for path in (Path(folder) / "segments", tmp_path / "own" / "other", tmp_path / "bucket"):
        path.mkdir(parents=True)
    equipment.remove_folders(2, "alone")
    assert Path(folder).exists()
    equipment.remove_folders(2, "lockstep")
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["other"]
    assert (tmp_path / "bucket").exists()
    Path(folder).write_text("no folder")
    equipment.remove_folders(2, "lockstep")
    assert "could not be removed" in caplog.text


def test_a_tier_in_memory_is_each_process_own(bucket, tmp_path):
    equipment = Equipment(config({"type": "example"}, bucket), tmp_path)
    assert [tier["type"] for tier in tiers_of(equipment, 0)] == ["example", "fs"]


def test_alone_a_process_has_nothing_that_is_shared(bucket, tmp_path):
    equipment = Equipment(config(bucket), tmp_path)
    assert [tier["type"] for tier in tiers_of(equipment, 0, shares=False)] == ["slab"]


def test_every_pass_and_every_fleet_begins_with_nothing_stored(bucket, tmp_path):
    given = bucket | {"namespace": "mine"}
    spaces = {
        tiers_of(Equipment(config(given), tmp_path), 0, name)[1]["namespace"]
        for name in ("lockstep", "free")
        for _ in range(2)
    }
    assert len(spaces) == 4
    assert all(space.startswith("mine-fleet-") for space in spaces)


def test_in_lockstep_no_process_remembers_that_a_block_was_absent(tmp_path):
    pytest.importorskip("obstore", reason="needs the extra object")
    far = {"type": "object", "url": f"file://{tmp_path}", "negative_cache_ttl_s": 5.0}
    equipment = Equipment(config(far), tmp_path)
    remembered = [
        tiers_of(equipment, 0, remembers=remembers)[1]["negative_cache_ttl_s"]
        for remembers in (True, False)
    ]
    assert remembered == [5.0, 0]


def test_a_fleet_that_shares_nothing_is_refused(tmp_path):
    with pytest.raises(InputError, match="no tier is shared"):
        Equipment(config({"type": "example"}), tmp_path)


def test_the_built_in_workload_has_a_shared_tier_and_own_ones_for_a_fleet():
    with ScratchFolder() as scratch:
        equipment = Equipment(resolve(ReplayFlags(), scratch).config, Path(scratch.path))
        assert equipment.shared_names == ["fs"]
        for member in range(2):
            TieringOffloadingSpec(equipment.of(member, "lockstep", shares=True, remembers=True))


def test_options_that_cannot_work_are_found_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match="root_dir"):
        Equipment(config({"type": "fs", "root_dir": "relative"}), tmp_path)


def test_a_random_spread_is_the_same_for_the_same_seed():
    requests = [[1]] * 100
    first, again, other = (list(spread(requests, 4, RANDOM, seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert set(first) == {0, 1, 2, 3}


def test_by_affinity_a_request_goes_where_its_prefix_is():
    requests = [[1, 2, 3], [7, 8, 9], [1, 2, 3, 4], [7, 8, 9, 5], [1, 2, 3, 4, 5]]
    assert list(spread(requests, 2, AFFINITY, 0)) == [0, 1, 0, 1, 0]


def test_a_head_that_everybody_has_draws_no_request_to_one_process():
    requests = [[0, 10 * i, 10 * i + 1, 10 * i + 2] for i in range(1, 9)]
    whose = list(spread(requests, 4, AFFINITY, 0))
    assert sorted(whose) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_affinity_finds_more_than_chance():
    requests = list(ChatWorkload())

    def found(how):
        shares = [[] for _ in range(4)]
        for request, member in zip(requests, spread(requests, 4, how, 0), strict=True):
            shares[member].append(request)
        return sum(UnboundedCache.over(share).hits for share in shares)

    assert found(AFFINITY) > found(RANDOM)


def test_an_unbounded_cache_finds_the_longest_head_that_was_there():
    cache = UnboundedCache.over([[1, 2, 3], [1, 2, 4], [1, 9, 3], [2], [1, 1, 2]])
    assert (cache.hits, cache.refs) == (2 + 1 + 1 + 3, 13)
    assert cache.hit_ratio == 7 / 13
    assert UnboundedCache.over([]).hit_ratio == 0
