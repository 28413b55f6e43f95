"""One layout for all tensor-parallel sizes: what some ranks stored, other numbers of ranks load."""

from dataclasses import replace

import numpy as np
import pytest
from canonical_world import LATENT, CanonicalPair, Model
from engine_world import failing
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from vllm_world import MODULE, SLOT_BYTES, key_of, keys_of, make_config, own_id, shared_files

from kvoffload_async.abc.tier import Direction
from kvoffload_async.errors import ConfigError
from kvoffload_async.integrations.vllm.spec import KVOffloadSpec

MODELS = {
    "MHA, packed, NHD": Model(heads=8),
    "MHA, packed, HND": Model(order="HND", heads=8),
    "MHA, split, NHD": Model("split", heads=8),
    "MHA, split, HND": Model("split", "HND", heads=8),
    "GQA, two heads": Model(heads=2),
    "GQA, two heads, split, HND": Model("split", "HND", heads=2),
    "GQA, one head": Model(order="HND", heads=1),
    "MLA": Model(LATENT, heads=1, head_size=12),
}
SIZES = (1, 2, 4, 8)
TIER = {"type": "fs", "fingerprint": "f"}


@pytest.fixture(params=MODELS.values(), ids=MODELS)
def model(request):
    return request.param


@pytest.fixture
def pair():
    """Create engines, and close them at the end."""
    opened = []

    def create(model, ranks, folder=None, **options):
        tiers = [] if folder is None else [{**TIER, "root_dir": str(folder)}]
        engine_id = own_id(f"kvoffload-canonical-{len(opened)}")
        opened.append(CanonicalPair(engine_id, model, ranks, tiers, **options))
        return opened[-1]

    yield create
    for each in opened:
        each.close()
    assert shared_files() == []


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
@pytest.mark.parametrize("ranks", SIZES)
def test_ranks_write_every_byte_of_a_row_once_and_it_is_that_of_one_rank(
    pair, model, ranks, blocks_per_chunk
):
    engine = pair(model, ranks, blocks_per_chunk=blocks_per_chunk)
    contents = engine.fill(1)
    engine.rows()[:] = 0xEE
    blocks = [5, 2, 7, 0]
    sizes = []
    for worker in engine.workers:
        get_finished = worker.get_finished

        def noting(get_finished=get_finished):
            results = get_finished()
            sizes.extend(result.transfer_size for result in results)
            return results

        worker.get_finished = noting
    keys = keys_of(*range(len(blocks) // blocks_per_chunk))
    output = engine.store(keys, [blocks])
    for at, slot in enumerate(output.store_spec.block_ids):
        mine = blocks[at * blocks_per_chunk : (at + 1) * blocks_per_chunk]
        assert np.array_equal(engine.rows()[slot], engine.row_of(contents, mine))
    assert sum(sizes) == len(keys) * engine.row_bytes


@pytest.mark.slow
@pytest.mark.parametrize("before", SIZES)
@pytest.mark.parametrize("after", SIZES)
def test_blocks_of_one_size_are_hits_of_another_with_the_right_bytes(
    pair, model, before, after, tmp_path
):
    blocks, keys = [5, 2, 7, 0], keys_of(*range(4))
    here = pair(model, before, tmp_path)
    contents = here.fill(1)
    here.store(keys, [blocks])
    here.finish_jobs()
    there = pair(model, after, tmp_path)
    there.fill(2)
    there.load(keys, [[1, 3, 4, 6]])
    moved = [content.copy() for content in contents]
    for content, original in zip(moved, contents, strict=True):
        content[[1, 3, 4, 6]] = original[blocks]
    assert there.has(moved, [1, 3, 4, 6])
    assert there.has(model.contents(2), [0, 2, 5, 7]), "nothing else changed"


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_row_of_which_a_rank_could_not_write_its_part_is_not_served(pair, model, ranks):
    for rank in range(ranks):
        engine = pair(model, ranks)
        engine.store(keys_of(0), [[5]])
        failing(engine, Direction.STORE, rank)
        engine.store(keys_of(1, 2), [[2, 7]])
        assert engine.final(keys_of(0, 1, 2)) == ["HIT", "MISS", "MISS"]


def test_rows_of_another_order_are_not_served(pair, tmp_path):
    here = pair(Model(order="NHD"), 2, tmp_path)
    here.store(keys_of(0), [[5]])
    here.finish_jobs()
    assert pair(Model(order="HND"), 2, tmp_path).final(keys_of(0)) == ["MISS"]
    assert pair(Model(order="NHD"), 4, tmp_path).final(keys_of(0)) == ["HIT"]


@pytest.mark.parametrize("is_sharded", [True, False])
def test_under_vllms_own_spec_the_folder_is_that_of_all_sizes_whose_rows_are_equal(
    is_sharded, tmp_path
):
    tier = {**TIER, "type": "FsTier", "module_path": MODULE, "root_dir": str(tmp_path)}

    def folder(ranks):
        sizes = {"tp_size": ranks, "world_size": ranks, "is_parallelism_agnostic": True}
        config = make_config([tier], own_id(f"kvoffload-canonical-{ranks}"), **sizes)
        spec = TieringOffloadingSpec(
            replace(
                config_with_canonical_layout(config),
                worker_kv_bytes_per_block=SLOT_BYTES // (ranks if is_sharded else 1),
            )
        )
        manager = spec.get_manager()
        try:
            return manager.secondary_tiers[0].file_mapper.get_file_name(key_of(0))
        finally:
            manager.shutdown()

    assert (folder(1) == folder(2)) is is_sharded, "copies of replicated heads make rows longer"


# -- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [{}, {"is_parallelism_agnostic": True, "tp_size": 2, "pp_size": 2, "world_size": 4}],
)
def test_what_vllm_does_not_certify_is_refused_in_its_words_before_anything_starts(sizes):
    config = make_config([], own_id("kvoffload-uncertified"), **sizes)
    with pytest.raises(ConfigError, match=r"canonical_layout: .* could not be certified"):
        KVOffloadSpec(config_with_canonical_layout(config))
    assert shared_files() == []


def config_with_canonical_layout(config):
    return replace(config, canonical_layout=True, kv_cache_layout="LBNHC")


def test_tensors_that_vllm_does_not_certify_are_refused_in_its_words():
    model = Model("split")
    with pytest.raises(ConfigError, match="could not certify every layer as parallelism-agnostic"):
        CanonicalPair(own_id("kvoffload-uncertified"), Unknown(model.kind), 2)
    assert shared_files() == []


class Unknown(Model):
    """A model whose tensors have an order of axes that vLLM does not know."""

    def tensor(self, content):
        return super().tensor(content).flatten(3)


def test_ranks_that_would_see_different_pages_in_a_row_are_refused(monkeypatch):
    monkeypatch.setattr(
        KVOffloadSpec, "_digest_of", lambda self, _: f"{self.config.parallel.rank:032x}"
    )
    with pytest.raises(ConfigError, match="the ranks have KV caches of different layouts"):
        CanonicalPair(own_id("kvoffload-unequal"), Model(), 2)
    assert shared_files() == []


def test_trusting_vllms_directory_is_refused():
    model = Model()
    with pytest.raises(ConfigError, match="trust_vllm_directory: not possible with canonical"):
        CanonicalPair(
            own_id("kvoffload-trust"),
            model,
            2,
            [{"type": "fs", "root_dir": "/srv/kv", "trust_vllm_directory": True}],
        )
    assert shared_files() == []
