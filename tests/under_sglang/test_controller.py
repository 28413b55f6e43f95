"""SGLang's own controller, pools and factory, over this package's tiers."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sglang.srt.environ import envs
from sglang_world import PAGE_SIZE

PAGES = 1000
RANKS = 4


def tier_of(kind, folder):
    tier = {"type": kind, "root_dir": str(folder)}
    return tier | ({"capacity_bytes": "1GiB"} if kind == "slab" else {})


def prompt(pages, seed=0):
    return random.Random(seed).choices(range(1 << 15), k=pages * PAGE_SIZE)


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
@pytest.mark.parametrize("tier", ["slab", "fs"])
def test_a_thousand_pages_come_back(rank, tmp_path, kind, layout, tier):
    here = rank(kind, layout, "dynamic", {"tier": tier_of(tier, tmp_path)}, pages=2 * PAGES + 1)
    tokens = prompt(PAGES)
    stored, count = here.store(tokens)
    assert count == PAGES
    slots, found, loaded = here.load(tokens)
    assert (found, loaded) == (PAGES, PAGES)
    assert all(torch.equal(here.page(stored, n), here.page(slots, n)) for n in range(PAGES))


@pytest.mark.parametrize("layout", ["page_first_direct", "layer_first"])
def test_the_generic_interface_serves_as_well(rank, tmp_path, layout):
    extra = {"tier": tier_of("fs", tmp_path), "interface_v1": 0}
    here = rank("mha", layout, "dynamic", extra)
    tokens = prompt(30)
    stored, count = here.store(tokens)
    slots, found, loaded = here.load(tokens)
    assert (count, found, loaded) == (30, 30, 30)
    assert all(torch.equal(here.page(stored, n), here.page(slots, n)) for n in range(30))


def test_pages_survive_a_restart_and_a_longer_prompt_hits_its_prefix(rank, tmp_path):
    extra = {"tier": tier_of("slab", tmp_path)}
    first = rank("mha", "page_first", "dynamic", extra)
    tokens = prompt(20)
    stored, _ = first.store(tokens)
    first.close()
    again = rank("mha", "page_first", "dynamic", extra, seed=1)
    slots, found, loaded = again.load([*tokens, *prompt(5, seed=1)])
    assert (found, loaded) == (20, 20)
    assert all(torch.equal(first.page(stored, n), again.page(slots, n)) for n in range(20))


@pytest.mark.parametrize(("delay_s", "failures"), [(0.02, 0.0), (0.0, 0.5), (0.02, 0.3)])
def test_with_sglangs_injected_faults_no_page_is_wrong(rank, tmp_path, delay_s, failures):
    variables = envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY.override(delay_s)
    with variables, envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(failures):
        here = rank(
            "mha", "layer_first", "dynamic", {"tier": tier_of("slab", tmp_path)}, pages=3000
        )
    outcomes = set()
    for seed in range(6):
        tokens = prompt(150, seed)
        stored, count = here.store(tokens)
        slots, found, loaded = here.load(tokens)
        assert loaded <= found <= 150
        assert all(torch.equal(here.page(stored, n), here.page(slots, n)) for n in range(loaded))
        outcomes.add((count, loaded))
        for used in (stored, slots):
            if len(used):
                here.pool.free(used)
    assert failures or outcomes == {(150, 150)}
    here.close()  # through the wrapper
    assert here.controller.storage_backend is None


def test_a_configuration_error_is_sglangs_and_leaves_nothing_attached(rank, tmp_path):
    with pytest.raises(ValueError, match=r"did you mean 'root_dir'\?"):
        rank("mha", "layer_first", "dynamic", {"tier": {"type": "fs", "root_dri": "/kv"}})
    with pytest.raises(ValueError, match="tier: missing"):
        rank("mha", "layer_first", "dynamic")


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_four_ranks_agree_on_the_pages_and_each_gets_its_own(tmp_path, kind):
    """Four processes with SGLang's collectives; rank 3 loses a page of its own, or nobody's."""
    script = Path(__file__).with_name("one_rank.py")
    tier = json.dumps(tier_of("fs", tmp_path / "kv"))
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path / "meet"), kind, tier]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen(
            [*command, str(number), str(RANKS)], stdout=subprocess.PIPE, env=environment
        )
        for number in range(RANKS)
    ]
    try:
        reports = [json.loads(rank.communicate(timeout=600)[0].splitlines()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert all(report["equal"] for report in reports)
    assert {report["found"] for report in reports} == {100}
    if kind == "mha":
        assert {report["found_after_loss"] for report in reports} == {40}
    else:
        assert [report["stored_here"] for report in reports] == [100, 0, 0, 0]
