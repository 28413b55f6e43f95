"""Whose blocks a tier serves: those of its own model, fingerprint and namespace, and no others."""

import asyncio

import numpy as np
import pytest
import torch

from kvoffload_async import (
    CPUOffloadingSpec,
    FileSystemTierManager,
    LookupResult,
    OffloadConfig,
    OffloadEngine,
    ReqContext,
    SlabTierManager,
    TieringOffloadingSpec,
    make_offload_key,
)
from kvoffload_async.errors import ConfigError
from kvoffload_async.runtime.buffer import PrimaryBuffer

BLOCK = 4096
HASHES = [bytes([number]) * 32 for number in range(3)]
KEYS = [make_offload_key(block_hash) for block_hash in HASHES]
UNDECIDED = {LookupResult.RETRY, LookupResult.HIT_PENDING}
TIERS = {
    "fs": {"type": "fs"},
    "slab": {"type": "slab", "capacity_bytes": "1MiB", "on_mismatch": "new_namespace"},
}


def configuration(root, tier, config=None, **options):
    return {
        "cpu_bytes_to_use": 8 * BLOCK,
        "block_bytes": BLOCK,
        "model": "org/model",
        "secondary_tiers": [TIERS[tier] | {"root_dir": str(root)} | options],
        **(config or {}),
    }


class Synchronous:
    """`TieringOffloadingSpec`, driven step by step."""

    @staticmethod
    def store(config, value):
        """Store the blocks, full of a value, and wait until they are in the tier."""
        with TieringOffloadingSpec(config) as spec:
            manager, request = spec.get_manager(), ReqContext("r")
            manager.on_new_request(request)
            granted = manager.prepare_store(KEYS, request)
            np.asarray(manager.get_primary_kv_view())[granted.store_spec.block_ids] = value
            manager.complete_store(granted.keys_to_store, request)
            manager.on_request_finished(request)
            manager.on_schedule_end()

    @staticmethod
    def served(config):
        """Return what is in the blocks that a new engine finds."""
        with TieringOffloadingSpec(config) as spec:
            manager, request = spec.get_manager(), ReqContext("r")
            manager.on_new_request(request)
            while UNDECIDED & (answers := {manager.lookup(key, request) for key in KEYS}):
                manager.on_schedule_end()
                manager.wait_for_progress(1.0)
            if answers == {LookupResult.MISS}:
                return set()
            assert answers == {LookupResult.HIT}
            slots = manager.prepare_load(KEYS, request).block_ids
            found = set(np.unique(np.asarray(manager.get_primary_kv_view())[slots]).tolist())
            manager.complete_load(KEYS, request)
            manager.on_request_finished(request)
            return found


class Asynchronous:
    """`OffloadEngine`, on a loop of its own."""

    @staticmethod
    def store(config, value):
        """Store the blocks, full of a value, and wait until they are in the tier."""

        async def run():
            caches = {"layer": torch.full((len(HASHES), BLOCK), value, dtype=torch.uint8)}
            async with (
                OffloadEngine(config, kv_caches=caches) as engine,
                engine.request("r", HASHES) as request,
            ):
                assert await engine.store(request, range(len(HASHES))) == len(HASHES)

        asyncio.run(run())

    @staticmethod
    def served(config):
        """Return what is in the blocks that a new engine finds."""

        async def run():
            caches = {"layer": torch.zeros(len(HASHES), BLOCK, dtype=torch.uint8)}
            async with (
                OffloadEngine(config, kv_caches=caches) as engine,
                engine.request("r", HASHES) as request,
            ):
                found = await engine.lookup(request)
                assert await engine.load(request, range(found)) == found
            return set(caches["layer"][:found].flatten().tolist())

        return asyncio.run(run())


# The whole configuration's keys and the tier's, of two engines.
ONE_FOLDER = "models that have one folder"
DIFFERENT = {
    "model": (({"model": "a"}, {}), ({"model": "b"}, {})),
    ONE_FOLDER: (({"model": "a/b"}, {}), ({"model": "a_b"}, {})),
    "the tier's model": (({}, {}), ({}, {"model": "b"})),
    "fingerprint": (({"fingerprint": "1"}, {}), ({"fingerprint": "2"}, {})),
    "no fingerprint": (({}, {}), ({"fingerprint": "1"}, {})),
    "the tier's fingerprint": (
        ({"fingerprint": "1"}, {}),
        ({"fingerprint": "1"}, {"fingerprint": "2"}),
    ),
    "namespace": (({}, {"namespace": "1"}), ({}, {"namespace": "2"})),
    "no namespace": (({}, {}), ({}, {"namespace": "../1"})),
    "namespace for fingerprint": (({}, {"namespace": "1"}), ({}, {"fingerprint": "1"})),
    "beside a run_config": (
        ({}, {"run_config": {"dtype": "bf16"}, "namespace": "1"}),
        ({}, {"run_config": {"dtype": "bf16"}, "namespace": "2"}),
    ),
}


# Both surfaces read one configuration in one way; what it says is tried out on the quicker one.
CASES = [(Synchronous, difference) for difference in DIFFERENT] + [(Asynchronous, "fingerprint")]


@pytest.mark.parametrize(("surface", "difference"), CASES)
@pytest.mark.parametrize("tier", TIERS)
def test_engines_of_different_identities_never_serve_each_others_blocks(
    tmp_path, surface, tier, difference
):
    first, second = (
        configuration(tmp_path, tier, config, **options)
        for config, options in DIFFERENT[difference]
    )
    surface.store(first, 1)
    assert surface.served(second) == set()
    surface.store(second, 2)
    assert surface.served(first) == {1}
    assert surface.served(second) == {2}
    assert {path.parent for path in tmp_path.rglob("*_r0*")} == {tmp_path}


@pytest.mark.parametrize(
    ("surface", "difference"), [case for case in CASES if case[1] != ONE_FOLDER]
)
def test_a_store_that_replaces_another_serves_nothing_of_it(tmp_path, surface, difference):
    first, second = (
        configuration(tmp_path, "slab", config, **options | {"on_mismatch": "replace"})
        for config, options in DIFFERENT[difference]
    )
    surface.store(first, 1)
    assert surface.served(second) == set()
    surface.store(second, 2)
    assert surface.served(second) == {2}
    assert 2 not in surface.served(first)


@pytest.mark.parametrize("surface", [Synchronous, Asynchronous])
def test_a_store_does_not_replace_that_of_another_model_in_the_same_folder(tmp_path, surface):
    first, second = (
        configuration(tmp_path, "slab", config, **options | {"on_mismatch": "replace"})
        for config, options in DIFFERENT[ONE_FOLDER]
    )
    surface.store(first, 1)
    with pytest.raises(ConfigError, match="another model_name"):
        surface.served(second)
    assert surface.served(first) == {1}


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("where", ["in the tier", "in the whole configuration"])
def test_an_identity_means_the_same_wherever_it_is_said(tmp_path, tier, where):
    said = {"model": "m", "fingerprint": "f"}
    whole, own = (said, {}) if where == "in the whole configuration" else ({}, said)
    config = configuration(tmp_path, tier, whole, namespace="n", **own)
    Synchronous.store(config, 3)
    assert Synchronous.served(config) == {3}
    other = configuration(tmp_path, tier, own, namespace="n", **whole)
    assert Synchronous.served(other) == {3}
    assert Asynchronous.served(other) == {3}


def test_an_identity_of_a_model_alone_has_the_folder_that_it_always_had(tmp_path):
    config = configuration(tmp_path, "fs", {"block_bytes": "16KiB", "cpu_bytes_to_use": "64KiB"})
    for whole, own in (({"model": "default"}, {}), ({}, {"model": "default"})):
        with TieringOffloadingSpec(
            config | whole | {"secondary_tiers": [config["secondary_tiers"][0] | own]}
        ) as spec:
            spec.get_manager()
        assert [path.name for path in tmp_path.glob("*_r0")] == ["default_607472e631a8_r0"]


@pytest.mark.parametrize(
    ("change", "difference"),
    [({"model": "org_model"}, "another model_name"), ({"fingerprint": "f"}, "another fingerprint")],
)
def test_a_slab_store_of_another_identity_is_refused_by_default(tmp_path, change, difference):
    config = configuration(tmp_path, "slab", on_mismatch="fail")
    Synchronous.store(config, 1)
    with pytest.raises(ConfigError, match=rf"{difference}\); .*new_namespace.*\"replace\""):
        Synchronous.served(config | change)
    assert Synchronous.served(config) == {1}


# -- the model must be named --------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("run_config", [None, {"dtype": "bf16"}])
def test_a_tier_on_disk_without_a_model_is_refused_before_anything_starts(
    tmp_path, tier, run_config, threads_left
):
    config = configuration(tmp_path / "new", tier, run_config=run_config)
    del config["model"]
    config["secondary_tiers"].insert(0, {"type": "example"})
    with pytest.raises(ConfigError) as raised:
        TieringOffloadingSpec(config)
    assert str(raised.value).startswith("secondary_tiers[1]: model: missing;")
    assert 'add "model": "org/name" to the tier, or to the whole' in str(raised.value)
    assert "those of another with equal sizes would be served as its own" in str(raised.value)
    assert '"run_config": {"model_name": "org/name", ...} to the tier' in str(raised.value)
    assert not (tmp_path / "new").exists()
    assert not threads_left()


@pytest.mark.parametrize(
    ("manager", "options"),
    [(FileSystemTierManager, {}), (SlabTierManager, {"capacity_bytes": "1MiB"})],
)
def test_a_tier_on_disk_on_its_own_needs_a_model_as_well(tmp_path, manager, options):
    buffer = PrimaryBuffer(4, BLOCK)
    root = tmp_path / "new"
    with pytest.raises(ConfigError, match=r"^model: missing"):
        manager(None, buffer.view, root_dir=str(root), **options)
    assert not root.exists()
    named = {"run_config": {"model_name": "m"}}
    manager(None, buffer.view, root_dir=str(root), **options, **named).shutdown()
    assert root.exists()
    assert buffer.release()


@pytest.mark.parametrize("tiers", [[], [{"type": "example", "model": "m"}]])
def test_the_engine_needs_a_model_whatever_its_tiers_are(tiers, threads_left):
    config = {"cpu_bytes_to_use": BLOCK, "block_bytes": BLOCK, "secondary_tiers": tiers}
    for given in (config, OffloadConfig.parse(config)):
        with pytest.raises(ConfigError, match=r'^model: missing; add "model": "org/name"'):
            OffloadEngine(given, lambda _view: pytest.fail("made"))
    assert not threads_left()


def test_what_has_nothing_on_disk_needs_no_model():
    config = {"cpu_bytes_to_use": BLOCK, "block_bytes": BLOCK}
    assert CPUOffloadingSpec(config).config.model is None
    TieringOffloadingSpec(config | {"secondary_tiers": [{"type": "example"}]})


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(
    ("key", "name"),
    [("model", "model_name"), ("fingerprint", "fingerprint"), ("namespace", "namespace")],
)
def test_a_tier_that_contradicts_its_run_config_is_refused(tmp_path, tier, key, name):
    options = {"run_config": {"model_name": "m", name: "a"}, key: "b"}
    with pytest.raises(ConfigError, match=rf"\[0\]: {key}: 'b' contradicts run_config, .* 'a'"):
        TieringOffloadingSpec(configuration(tmp_path, tier, **options))
    TieringOffloadingSpec(configuration(tmp_path, tier, **options | {key: "a"}))


def test_a_run_config_names_its_model_with_a_name(tmp_path):
    for name in ("", 3):
        config = configuration(tmp_path, "fs", run_config={"model_name": name})
        with pytest.raises(ConfigError, match=f"run_config: model_name: {name!r} is not valid"):
            TieringOffloadingSpec(config)


# -- labels -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["", "x" * 201, "a\nb", "\ud800", 7, True, ["a"]])
@pytest.mark.parametrize("tier", ["example", *TIERS])
@pytest.mark.parametrize("key", ["fingerprint", "namespace"])
def test_a_label_is_a_printable_text_of_bounded_length(tmp_path, tier, key, value):
    options = {} if tier == "example" else TIERS[tier] | {"root_dir": str(tmp_path / "new")}
    config = {"cpu_bytes_to_use": BLOCK, "block_bytes": BLOCK, "model": "m"}
    with pytest.raises(ConfigError) as raised:
        TieringOffloadingSpec(config | {"secondary_tiers": [{"type": tier, **options, key: value}]})
    assert f"secondary_tiers[0]: {key}: {value!r} is not valid" in str(raised.value)
    assert "200 printable characters" in str(raised.value)
    if key == "fingerprint":
        with pytest.raises(ConfigError, match=r"^fingerprint: "):
            TieringOffloadingSpec(config | {key: value})


@pytest.mark.parametrize("tier", TIERS)
def test_any_printable_label_is_safe(tmp_path, tier):
    label = "../.. \N{SNOWMAN}/" * 20
    config = configuration(tmp_path / "a" / "b", tier, fingerprint=label, namespace=label)
    Synchronous.store(config, 4)
    assert Synchronous.served(config) == {4}
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]
