"""One directory for vLLM's own `fs` tier and ours, if the user says that both have one model."""

import json
from pathlib import Path

import numpy as np
import pytest
from vllm_world import content_of, key_of, keys_of

KEYS = [*keys_of(1, 2, 3), key_of(1, group=1)]
LAYOUTS = [
    {},
    {"groups": 2},
    {"is_parallelism_agnostic": True},
    {"tp_size": 2, "world_size": 2},
    {"tp_size": 2, "pp_size": 2, "world_size": 4, "rank": 3},
]


def store_all(world):
    assert world.store(KEYS) == KEYS
    world.finish_jobs()
    world.shutdown()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_vllms_tier_wrote_ours_serves(serving, trusting, theirs, layout):
    store_all(serving(theirs, **layout))
    assert serving(trusting, **layout).holds(KEYS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_our_tier_wrote_vllms_serves(serving, trusting, theirs, layout):
    store_all(serving(trusting, **layout))
    assert serving(theirs, **layout).holds(KEYS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_name_the_same_files(serving, trusting, theirs, layout):
    ours, others = serving(trusting, **layout).tier, serving(theirs, **layout).tier
    for key in KEYS:
        assert ours.file_mapper.get_file_name(key) == others.file_mapper.get_file_name(key)
    ours_config = Path(ours.file_mapper.config_path)
    assert json.loads(ours_config.read_text()) == others.file_mapper.get_run_config()


def test_another_run_configuration_shares_nothing(serving, trusting):
    store_all(serving(trusting))
    assert serving(trusting, groups=2).load(KEYS) == {}


def test_two_engines_of_either_kind_serve_each_other_while_they_run(serving, trusting, theirs):
    ours, others = serving(trusting), serving(theirs)
    assert ours.load(KEYS) == others.load(KEYS) == {}, "which no later request is told"
    ours.store(KEYS[:2])
    ours.finish_jobs()
    others.store(KEYS[2:])
    others.finish_jobs()
    for world in (ours, others):
        found = world.load(KEYS)
        assert found.keys() == set(KEYS)
        assert all(np.array_equal(rows, content_of(key)) for key, rows in found.items())


def test_a_block_that_vllms_tier_left_short_is_a_miss_and_makes_room(serving, trusting, theirs):
    store_all(serving(theirs))
    world = serving(trusting)
    path = Path(world.tier.file_mapper.get_file_name(KEYS[1]))
    path.write_bytes(b"short")
    assert world.load(KEYS).keys() == set(KEYS) - {KEYS[1]}
    assert not path.exists()


def test_a_relative_directory_starts_at_the_working_directory(
    serving, trusting, theirs, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    store_all(serving({**theirs, "root_dir": "kv"}))
    assert serving({**trusting, "root_dir": "kv"}).holds(KEYS)
