"""A real vLLM engine on a directory that another engine has filled: never a wrong token.

Both kinds of tier are behind one primary, so that a block is served if either would serve it. Each
engine that fills a directory does so once; those that read get a copy of it.
"""

import os
import shutil

import pytest
from test_engine import FULL_BLOCKS, MODULE, connector, run
from tiny_model import save_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
CHANGES = {
    "rope": {"llm": {"hf_overrides": ROPE}},
    "model dtype": {"llm": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}},
    "kv dtype": {"llm": {"kv_cache_dtype": "fp8"}},
    "norm": {"llm": {"hf_overrides": {"rms_norm_eps": 0.5}}},
}


def tiers(spec, folder):
    names = ("fs", "slab") if spec == "KVOffloadSpec" else ("FsTier", "SlabTier")
    made = [
        {"type": name, "root_dir": str(folder / name)}
        | ({"capacity_bytes": "16MiB"} if "lab" in name else {})
        for name in names
    ]
    if spec != "KVOffloadSpec":
        made = [{**one, "module_path": MODULE} for one in made]
    return made


def generate(model, spec=None, folder=None, **settings):
    """Return the tokens of one engine, and how many tokens came from its tiers."""
    chosen = connector(spec, tiers=tiers(spec, folder)) if spec else None
    found = run(model=model, connector=chosen, steps=["generate"], **settings)
    return found["tokens"][0], found["hits"][0]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def plain(model):
    """The tokens of the engine that fills the directories."""
    return generate(model)[0]


@pytest.fixture(scope="module", params=["KVOffloadSpec", "HostTieringOffloadingSpec"])
def spec(request):
    return request.param


@pytest.fixture(scope="module")
def filled(model, plain, spec, tmp_path_factory):
    """A directory that an engine with one rank has filled."""
    folder = tmp_path_factory.mktemp("filled")
    assert generate(model, spec, folder) == (plain, 0)
    return folder


@pytest.fixture
def copied(filled, tmp_path):
    return shutil.copytree(filled, tmp_path / "copy")


ANOTHER_HOST = ("unshare", "--uts", "sh", "-c", 'hostname another && exec "$@"', "--")


def test_an_unchanged_engine_is_served_every_block(model, plain, spec, copied):
    under = ANOTHER_HOST if os.geteuid() == 0 else ()
    assert generate(model, spec, copied, under=under) == (plain, FULL_BLOCKS)
    # With a process for the worker, vLLM's manager does not see its tensors: another identity.
    assert generate(model, spec, copied, processes=True)[0] == plain
    assert generate(model, spec, copied, processes=True) == (plain, FULL_BLOCKS)


@pytest.fixture(scope="module")
def changed_tokens(model, plain):
    """Return the tokens of a changed engine without a connector; each is run once."""
    known = {}

    def tokens(name):
        if name not in known:
            known[name] = generate(model, **CHANGES[name])[0]
            assert known[name] != plain, "the change would not be seen"
        return known[name]

    return tokens


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_a_changed_setting_serves_nothing_of_before(model, spec, copied, changed_tokens, name):
    expected = changed_tokens(name)
    assert generate(model, spec, copied, **CHANGES[name]) == (expected, 0)


def test_a_model_dtype_beside_an_explicit_kv_dtype_is_told_apart(
    model, spec, tmp_path, changed_tokens
):
    expected = changed_tokens("kv dtype")
    assert generate(model, spec, tmp_path, **CHANGES["kv dtype"]) == (expected, 0)
    changed = changed_tokens("model dtype")
    assert generate(model, spec, tmp_path, **CHANGES["model dtype"]) == (changed, 0)


def test_replaced_weights_serve_nothing_of_before(spec, tmp_path):
    model = tmp_path / "model"
    save_tiny_model(model, seed=1)
    before = generate(str(model))[0]
    assert generate(str(model), spec, tmp_path / "kv") == (before, 0)
    save_tiny_model(model, seed=2)
    after = generate(str(model))[0]
    assert after != before, "the change would not be seen"
    assert generate(str(model), spec, tmp_path / "kv") == (after, 0)


def test_dummy_weights_of_another_seed_serve_nothing_of_before(model, spec, tmp_path):
    seeds = [{"llm": {"load_format": "dummy", "seed": seed}} for seed in (1, 2)]
    for settings in seeds:
        expected = generate(model, **settings)[0]
        assert generate(model, spec, tmp_path, **settings) == (expected, 0)
    assert not [left for root in tmp_path.iterdir() for left in root.iterdir()]


def test_two_ranks_are_served_nothing_of_one(model, plain, spec, copied):
    settings = {"processes": True, "ranks": 2}
    assert generate(model, spec, copied, **settings) == (plain, 0)
    assert generate(model, spec, copied, **settings) == (plain, FULL_BLOCKS)


def test_one_rank_is_served_nothing_of_two(model, plain, spec, tmp_path):
    assert generate(model, spec, tmp_path, processes=True, ranks=2) == (plain, 0)
    assert generate(model, spec, tmp_path) == (plain, 0)
