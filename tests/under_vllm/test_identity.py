"""Which blocks may be served: those of the same layout, of a model with the same content."""

import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from engine_world import EXAMPLE
from vllm_world import keys_of, make_config

from kvoffload_async.errors import ConfigError
from kvoffload_async.integrations.vllm import KVOffloadSpec
from kvoffload_async.integrations.vllm.identity import (
    Fingerprint,
    Identity,
    ModelContent,
    identify,
)
from kvoffload_async.integrations.vllm.internals import ConnectorArguments
from kvoffload_async.integrations.vllm.options import IdentityOptions

KEYS = keys_of(1, 2, 3)
ONE = {"is_parallelism_agnostic": True}
TWO = {"tp_size": 2, "world_size": 2, "is_parallelism_agnostic": True}


class Content(ModelContent):
    """A model's content that is known, or is not."""

    def __init__(self, found):
        super().__init__(None)
        self._found = found


def identity_of(*, options=None, layout="aa", content="c", kv_layout=None, **config):
    spec = KVOffloadSpec(
        replace(
            make_config([], "e", **config),
            extra_config={"cpu_bytes_to_use": "64KiB"},
            kv_cache_layout=kv_layout,
        )
    )
    chosen = IdentityOptions.take_from(dict(options or {}), "fs")
    return identify(spec, chosen, layout, Content(Fingerprint(content)))


def test_equal_engines_have_one_identity():
    assert identity_of() == identity_of()
    assert isinstance(identity_of(), Identity)


@pytest.mark.parametrize(
    "other",
    [
        TWO,
        {"pp_size": 2, "world_size": 2, "is_parallelism_agnostic": True},
        {"pcp_size": 2, "world_size": 2, "is_parallelism_agnostic": True},
        {"dcp_size": 2, "tp_size": 2, "world_size": 2, "is_parallelism_agnostic": True},
        {"layout": "bb"},
        {"content": "d"},
        {"options": {"namespace": "mine"}},
        {"options": {"fingerprint": "mine"}},
        {"groups": 2},
        {"model": "org/another"},
    ],
)
def test_whatever_differs_is_part_of_the_identity(other):
    first, second = identity_of(**ONE), identity_of(**(ONE | other))
    assert first.run_config != second.run_config


def replicated(ranks):
    """Return the parallel sizes of a model whose rows are the same on every rank."""
    return {"tp_size": ranks, "world_size": ranks, "replicated_layout": True}


def test_sizes_are_no_part_of_the_identity_where_every_rank_has_the_same_bytes():
    two, four = identity_of(**replicated(2)), identity_of(**replicated(4))
    assert two == four
    assert two.run_config["replicated_layout"] is True
    assert two.run_config != identity_of().run_config, "one rank packs its row by other rules"
    assert two.run_config != identity_of(**replicated(2), layout="bb").run_config


def test_vllms_name_is_trusted_where_every_rank_has_the_same_bytes():
    trusting = {"options": {"trust_vllm_directory": True}}
    assert identity_of(**trusting, **replicated(2)) == identity_of(**trusting, **replicated(4))


def test_a_namespace_and_a_fingerprint_of_one_text_are_not_mistaken_for_each_other():
    made = [identity_of(options={key: "x"}, content="x") for key in ("namespace", "fingerprint")]
    made.append(identity_of(content="x"))
    assert len({str(sorted(one.run_config.items())) for one in made}) == 3


def test_a_given_fingerprint_stands_for_a_content_that_cannot_be_known():
    assert identity_of(content="").run_config["fingerprint"] == ""
    given = identity_of(options={"fingerprint": "v7"}, content="")
    assert given.unknown == ""
    assert given.run_config["given_fingerprint"] == "v7"


def test_the_model_is_not_looked_at_where_a_fingerprint_is_given():
    class Untouchable(ModelContent):
        def fingerprint(self):
            raise AssertionError("looked at")

    spec = KVOffloadSpec(replace(make_config([], "e"), extra_config={"cpu_bytes_to_use": "64KiB"}))
    for options in ({"fingerprint": "v7"}, {"trust_vllm_directory": True}):
        identify(spec, IdentityOptions.take_from(dict(options), "fs"), "", Untouchable(None))


def test_a_tier_is_refused_where_weights_change_while_the_server_runs():
    class VllmConfig:
        weight_transfer_config = "nccl"

    spec = KVOffloadSpec(replace(make_config([], "e"), extra_config={"cpu_bytes_to_use": "64KiB"}))
    content = ModelContent(ConnectorArguments(VllmConfig(), None))
    with pytest.raises(ConfigError, match=r"weight_transfer_config is set.*remove the tier"):
        identify(spec, IdentityOptions(), "", content)
    identify(spec, IdentityOptions(fingerprint="they never change"), "", content)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TWO, "tp_size=2"),
        ({"pp_size": 2, "world_size": 2, "is_parallelism_agnostic": True}, "pp_size=2"),
        ({"kv_layout": "LBNHC"}, "LBNHC"),
    ],
)
def test_vllms_name_is_not_trusted_where_it_does_not_tell_layouts_apart(config, message):
    with pytest.raises(ConfigError, match=f"trust_vllm_directory: .*{message}"):
        identity_of(options={"trust_vllm_directory": True}, **config)


def test_vllms_name_stays_for_a_world_of_one_that_is_trusted():
    trusted = identity_of(options={"trust_vllm_directory": True}, kv_layout="LBHNC", **ONE)
    assert set(trusted.run_config) == {
        *("model_name", "tokens_per_hash", "blocks_per_file", "dtype", "kv_cache_groups"),
        *("tp_size", "pp_size", "pcp_size", "dcp_size", "inference_engine"),
    }


# -- under vLLM's manager -----------------------------------------------------------------------


def store_all(world):
    assert world.store(KEYS) == KEYS
    world.finish_jobs()
    world.shutdown()


@pytest.mark.parametrize(("writer", "reader"), [(ONE, TWO), (TWO, ONE)])
def test_another_tensor_parallel_size_is_served_nothing(serving, tier, writer, reader):
    store_all(serving(tier, **writer))
    assert serving(tier, **reader).load(KEYS) == {}


@pytest.mark.parametrize("kind", ["fs", "slab"])
def test_one_copy_is_served_with_another_number_of_ranks(serving, request, kind):
    tier = request.getfixturevalue(kind)
    store_all(serving(tier, **replicated(2)))
    assert serving(tier, **replicated(4)).holds(KEYS)


def test_one_copy_in_vllms_directory_is_served_with_another_number_of_ranks(
    serving, trusting, theirs
):
    store_all(serving(theirs, **replicated(2)))
    second = serving(trusting, **replicated(4))
    assert second.holds(KEYS)
    own = serving(theirs, **replicated(4)).tier
    assert second.tier.file_mapper.base_path == own.file_mapper.base_path


@pytest.mark.parametrize("key", ["namespace", "fingerprint"])
def test_another_namespace_or_fingerprint_is_served_nothing(serving, fs, key):
    store_all(serving({**fs, key: "one"}))
    other = serving({**fs, key: "another"})
    assert other.load(KEYS) == {}
    other.shutdown()
    assert serving({**fs, key: "one"}).holds(KEYS)


def test_a_slab_of_another_content_is_emptied_and_its_place_taken(serving, slab, caplog):
    store_all(serving(slab))
    with caplog.at_level(logging.WARNING, "kvoffload_async"):
        other = serving({**slab, "fingerprint": "another"})
    assert "given_fingerprint" in caplog.text
    assert other.load(KEYS) == {}
    store_all(other)
    assert len(list(Path(slab["root_dir"]).iterdir())) == 1


def test_namespaces_have_a_slab_each(serving, slab):
    store_all(serving({**slab, "namespace": "one"}))
    store_all(serving({**slab, "namespace": "another"}))
    assert serving({**slab, "namespace": "one"}).holds(KEYS)


def test_a_slab_of_another_model_that_only_has_the_same_folder_is_kept(serving, slab):
    store_all(serving(slab, model="org/a_b"))
    with pytest.raises(ConfigError, match="another model_name"):
        serving(slab, model="org_a/b")
    assert serving(slab, model="org/a_b").holds(KEYS)


def test_a_slab_of_another_content_is_kept_where_the_user_says_so(serving, slab):
    store_all(serving(slab))
    with pytest.raises(ConfigError, match="another given_fingerprint"):
        serving({**slab, "fingerprint": "another", "on_mismatch": "fail"})
    assert serving(slab).holds(KEYS)


def test_blocks_of_an_unknown_content_are_for_this_process_alone(serving, tier, caplog):
    del tier["fingerprint"]
    root = Path(tier["root_dir"])
    with caplog.at_level(logging.WARNING, "kvoffload_async"):
        world = serving(tier)
    assert caplog.text.count("cannot be known") == 1
    assert '"fingerprint"' in caplog.text
    world.store(KEYS)
    world.reset()
    assert world.holds(KEYS)
    world.shutdown()
    assert list(root.iterdir()) == []
    assert serving(tier).load(KEYS) == {}


def test_two_tiers_of_unknown_content_are_warned_of_once(serving, fs, slab, caplog):
    del fs["fingerprint"], slab["fingerprint"]
    with caplog.at_level(logging.WARNING, "kvoffload_async"):
        serving(fs, slab)
    assert caplog.text.count("cannot be known") == 1


def test_two_processes_of_unknown_content_share_nothing_while_both_live(serving, fs):
    del fs["fingerprint"]
    first, second = serving(fs), serving(fs)
    first.store(KEYS)
    first.finish_jobs()
    assert second.load(KEYS) == {}
    assert first.holds(KEYS)


def test_a_tier_that_does_not_open_leaves_no_folder_of_its_process(serving, slab):
    del slab["fingerprint"]
    with pytest.raises(ConfigError, match="capacity_bytes"):
        serving({**slab, "capacity_bytes": 10})
    assert list(Path(slab["root_dir"]).iterdir()) == []


def test_replicas_share_files_and_have_a_slab_each(serving, fs, slab):
    first, second = (serving(fs, data_parallel_index=index) for index in (0, 1))
    first.store(KEYS)
    first.finish_jobs()
    assert second.holds(KEYS)
    one, two = (serving(slab, data_parallel_index=index) for index in (0, 1))
    one.store(KEYS)
    one.finish_jobs()
    assert two.load(KEYS) == {}


# -- with this package's engine -----------------------------------------------------------------


def disk(kind, tmp_path, **options):
    capacity = {"capacity_bytes": "8MiB", "segment_bytes": "1MiB"} if kind == "slab" else {}
    tier = {"type": kind, "root_dir": str(tmp_path), "fingerprint": "made up", **capacity}
    return {**tier, **options}


@pytest.mark.parametrize("kind", ["fs", "slab"])
@pytest.mark.parametrize(("writer", "reader"), [(1, 2), (2, 1)])
def test_an_engine_with_another_number_of_ranks_is_served_nothing(
    pair, tmp_path, kind, writer, reader
):
    # The same bytes a row: half the tensors a rank, and twice the ranks.
    tiers = [disk(kind, tmp_path)]
    first = pair(tiers, ranks=writer, num_tensors=4 // writer, groups=(range(4 // writer),))
    first.fill(1)
    first.store(KEYS, [[1, 2, 3]])
    first.finish_jobs()
    first.close()
    second = pair(tiers, ranks=reader, num_tensors=4 // reader, groups=(range(4 // reader),))
    assert second.final(KEYS) == ["MISS"] * 3


@pytest.mark.parametrize("kind", ["fs", "slab"])
def test_one_copy_is_served_to_an_engine_with_another_number_of_ranks(pair, tmp_path, kind):
    tiers = [disk(kind, tmp_path)]
    first = pair(tiers, ranks=2, replicated=True)
    first.fill(1)
    first.store(KEYS, [[1, 2, 3]])
    first.finish_jobs()
    first.close()
    assert pair(tiers, ranks=3, replicated=True).final(KEYS) == ["HIT"] * 3


@pytest.mark.parametrize("kind", ["fs", "slab"])
def test_tensors_in_another_order_of_groups_are_served_nothing(pair, tmp_path, kind):
    tiers = [disk(kind, tmp_path)]
    first = pair(tiers, groups=((0,), (1,)))
    first.fill(1)
    first.store(KEYS, [[1, 2, 3], []])
    first.finish_jobs()
    first.close()
    assert pair(tiers, groups=((1,), (0,))).final(KEYS) == ["MISS"] * 3


@pytest.mark.parametrize("kind", ["fs", "slab"])
def test_an_equal_engine_is_served_everything(pair, tmp_path, kind):
    tiers = [disk(kind, tmp_path)]
    first = pair(tiers, ranks=2)
    before = first.fill(1)
    first.store(KEYS, [[1, 2, 3]])
    first.finish_jobs()
    first.close()
    second = pair(tiers, ranks=2)
    second.load(KEYS, [[4, 5, 6]])
    for rank in range(2):
        assert second.tensors[rank][0][4].equal(before[rank][0][1])


@pytest.mark.parametrize("kind", ["fs", "slab"])
def test_an_engine_of_unknown_content_leaves_nothing_behind(pair, tmp_path, kind, caplog):
    tier = disk(kind, tmp_path)
    del tier["fingerprint"]
    with caplog.at_level(logging.WARNING, "kvoffload_async"):
        first = pair([tier])
    assert caplog.text.count("cannot be known") == 1
    first.fill(1)
    first.store(KEYS, [[1, 2, 3]])
    first.finish_jobs()
    first.manager.reset_cache()
    first.close()
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_does_not_open_leaves_nothing_behind(pair, tmp_path):
    tier = disk("slab", tmp_path, capacity_bytes=10)
    del tier["fingerprint"]
    with pytest.raises(ConfigError, match="capacity_bytes"):
        pair([tier])
    assert list(tmp_path.iterdir()) == []


def test_replicas_of_this_engine_share_files_and_have_a_slab_each(pair, tmp_path):
    roots = {kind: tmp_path / kind for kind in ("fs", "slab")}
    tiers = [disk(kind, root) for kind, root in roots.items()]
    first, second = (pair(tiers, data_parallel_index=index) for index in (0, 1))
    first.fill(1)
    first.store(KEYS, [[1, 2, 3]])
    first.finish_jobs()
    assert second.final(KEYS) == ["HIT"] * 3
    assert len(list(roots["slab"].iterdir())) == 2
    assert len(list(roots["fs"].glob("*_r0"))) == 1


def test_a_tier_in_memory_asks_for_no_identity(pair):
    here = pair(EXAMPLE)
    here.fill(1)
    here.store(KEYS, [[1, 2, 3]])
    here.finish_jobs()


# -- what people get wrong ----------------------------------------------------------------------


def own(tier):
    """Return the same tier as `KVOffloadSpec` is given it."""
    return {key: tier[key] for key in tier if key != "module_path"} | {"type": "fs"}


@pytest.mark.parametrize("key", ["fingerprint", "namespace", "trust_vllm_directory"])
def test_an_identity_option_beside_the_tiers_is_refused_with_its_location(serving, pair, fs, key):
    remedy = f'{key}: .* put it into the tier: .*"{key}"'
    with pytest.raises(ConfigError, match=remedy):
        pair([], extra={key: "v7"})
    with pytest.raises(ConfigError, match=remedy):
        serving(fs, extra={key: "v7"})


def test_a_capacity_of_a_directory_shared_with_vllms_tier_is_warned_of(
    serving, pair, trusting, caplog
):
    serving({**trusting, "capacity_bytes": "1 GiB"})
    assert caplog.text.count("capacity_bytes: 1 GiB does not bound") == 1
    caplog.clear()
    pair([own(trusting) | {"capacity_bytes": "1 GiB"}])
    assert caplog.text.count("does not bound what vLLM's own fs tier writes") == 1


def test_a_capacity_beyond_the_free_space_is_warned_of(serving, pair, fs, caplog):
    capacity = {"capacity_bytes": shutil.disk_usage(fs["root_dir"]).total - (1 << 20)}
    serving(fs | capacity)
    assert "is more than the filesystem" in caplog.text
    caplog.clear()
    pair([own(fs) | capacity])
    assert "is more than the filesystem" in caplog.text
