"""Tenants with keys of their own: nobody opens, or names, a block of another."""

import hashlib
import shutil

import pytest
from command_line import command
from fs.spaces import rescanned
from hypothesis import assume, given
from hypothesis import strategies as st
from remote.fake_store import FakeClient, World
from sealed_names import key_file

from kvoffload_async import ConfigError, SecondaryTierFactory
from kvoffload_async.abc.tier import KVIdentity
from kvoffload_async.config import TenantOptions, UnknownTenant
from kvoffload_async.facade.spec import TieringOffloadingSpec
from kvoffload_async.facade.tenant_keys import with_tenant_keys
from kvoffload_async.facade.tenants import Tenants
from kvoffload_async.facade.tier_factory import with_quotas
from kvoffload_async.testing.harness import TierHarness, key_of
from kvoffload_async.tiers._sealed_names import NameKey, NameKeys, SealedNames
from kvoffload_async.tiers.files.digests import TenantRings
from kvoffload_async.tiers.files.sealing import EncryptionKey, Sealer
from kvoffload_async.types import make_offload_key

__all__ = ["command"]

BLOCK = 4096
NAMES = ("default", "a", "b")
OPTIONS = {
    "fs": lambda root: {"root_dir": root, "capacity_bytes": "16MiB"},
    "slab": lambda root: {"root_dir": root, "capacity_bytes": "16MiB", "on_mismatch": "replace"},
    "object": lambda root: {"url": f"file://{root}"},
}


class Keys:
    """Key files of tenants, of which each is made when it is first asked for."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, text):
        path = self.folder / hashlib.sha256(text.encode()).hexdigest()
        if not path.exists():
            return str(shutil.move(key_file(self.folder, f"the secret named {text}"), path))
        return str(path)


@pytest.fixture
def keys(tmp_path):
    return Keys(tmp_path)


@pytest.fixture(params=sorted(OPTIONS))
def kind(request):
    return request.param


def tenants_of(given):
    options = [TenantOptions.take(each, name=name) for name, each in given.items()]
    return Tenants(options, UnknownTenant.DEFAULT)


def own(keys, *names, change=""):
    """Return options of tenants, each with both keys of its own."""
    return {
        name: {
            "encryption_key_file": keys(f"block {name}{change}"),
            "name_key_file": keys(f"name {name}{change}"),
        }
        for name in names
    }


def configured(kind, root, tenants, **options):
    config = {"type": kind, **OPTIONS[kind](str(root)), **options}
    (config,) = with_tenant_keys([config], tenants)
    if kind != "object":
        (config,) = with_quotas([config], tenants.quotas)
    return dict(config)


def opened(kind, root, given, **options):
    """Return the harness of a tier with tenants."""
    root.mkdir(exist_ok=True)
    config = configured(kind, root, tenants_of(given), **options)
    tier_class = SecondaryTierFactory.class_of(config).tier_class
    rings = config.pop("tenant_names", None)
    del config["type"]
    identity = KVIdentity("m", None, None, BLOCK, 0, 1, {"model_name": "m"})
    tier = tier_class.from_options(config, identity)
    return TierHarness(tier if rings is None else SealedNames(tier, NameKeys(rings)), 64, BLOCK)


def blocks(*numbers, names=NAMES):
    """Return keys of blocks of each tenant, who all send the same prompts."""
    tenants = tenants_of({name: {} for name in names})
    return {
        name: [tenants.tagged(key_of(number), index) for number in range(*numbers)]
        for index, name in enumerate(tenants.names)
    }


K = blocks(4)
ALL = [key for some in K.values() for key in some]


def served(harness, some):
    """Return the keys that load, whose slots have their contents; others are wiped or untouched."""
    failures = harness.load(some, range(len(some)))
    good = [key for i, key in enumerate(some) if i not in failures]
    assert all(harness.holds(key, i) for i, key in enumerate(some) if i not in failures)
    assert not any(harness.holds(key, i) for i, key in enumerate(some) if i in failures)
    return good


# -- each format -----------------------------------------------------------------------------------


def test_each_tenant_loads_its_blocks_over_restarts(kind, tmp_path, keys):
    for names in (NAMES, NAMES[1:]):  # the default tenant has keys, or the tier's
        given = own(keys, *names)
        tiers = {"encryption_key_file": keys("tier"), "name_key_file": keys("tier's names")}
        root = tmp_path / f"root-{len(names)}"
        with opened(kind, root, given, **tiers) as harness:
            assert harness.store(ALL) == {}
        with opened(kind, root, given, **tiers) as harness:
            assert served(harness, ALL) == ALL
            assert harness.contains(ALL) == set(ALL)


@pytest.mark.parametrize("which", ["encryption_key_file", "name_key_file"])
def test_without_its_key_nothing_of_a_tenant_opens_and_others_do(
    kind, tmp_path, keys, which, caplog
):
    root, given = tmp_path / "root", own(keys, *NAMES)
    with opened(kind, root, given) as harness:
        harness.store(ALL)
    shutil.copytree(root, tmp_path / "backup", symlinks=True)
    given["a"] = given["a"] | {which: own(keys, "a", change=" new")["a"][which]}
    others = [*K["default"], *K["b"]]
    with opened(kind, root, given) as harness:
        assert served(harness, ALL) == others
        assert served(harness, others) == others
        harness.store(K["a"])
    with opened(kind, tmp_path / "backup", given) as harness:
        assert served(harness, ALL) == others
    warned = [r for r in caplog.records if "a key that is not given" in r.getMessage()]
    assert len(warned) == (2 if which == "encryption_key_file" else 0), "once for each start"
    with opened(kind, root, given) as harness:
        assert set(served(harness, ALL)) >= set(others)


def test_a_tenant_that_is_no_more_leaves_nothing_that_opens(kind, tmp_path, keys):
    root = tmp_path / "root"
    with opened(kind, root, own(keys, *NAMES)) as harness:
        harness.store(ALL)
    with opened(kind, root, own(keys, "default", "b")) as harness:
        assert served(harness, ALL) == [*K["default"], *K["b"]]


def test_a_tenants_keys_rotate_while_others_stay(kind, tmp_path, keys):
    root, given = tmp_path / "root", own(keys, *NAMES)
    with opened(kind, root, given) as harness:
        harness.store(ALL)
    new = own(keys, "a", change=" new")["a"]
    given["a"] = {option: [path, given["a"][option]] for option, path in new.items()}
    later = blocks(4, 8)
    with opened(kind, root, given) as harness:
        assert served(harness, ALL) == ALL
        assert harness.store([*later["a"], *later["b"]]) == {}
        absent = blocks(8, 9)["b"]
        assert served(harness, [*later["a"], *absent, *later["b"]]) == [*later["a"], *later["b"]]
        assert list(harness.run(harness.tier.longest_prefixes([K["a"] + later["a"]]))) == [8]
    given["a"] = new
    with opened(kind, root, given) as harness:
        assert served(harness, [*ALL, *later["a"]]) == [*K["default"], *K["b"], *later["a"]]


@pytest.mark.parametrize("kind", ["fs", "slab"])
def test_several_tenants_names_are_recovered_and_counted(kind, tmp_path, keys):
    root = tmp_path / "root"
    given = own(keys, *NAMES)
    del given["b"]["name_key_file"]
    with opened(kind, root, given) as harness:
        harness.store([*ALL, *blocks(4, 6)["b"]])
    with opened(kind, root, given) as harness:
        if kind == "fs":
            harness.run(rescanned(harness.tier._tier._housekeeping))
        assert harness.announced() == {*ALL, *blocks(4, 6)["b"]}
        gauges = harness.tier.gauges()
        counts = [gauges[f"tenant_{tenant}_bytes"] for tenant in range(3)]
        assert counts[0] == counts[1]
        assert counts[2] == counts[0] * 6 // 4
        assert gauges["unknown_names"] == 0


@pytest.mark.parametrize("kind", ["fs", "slab"])
def test_maintenance_leaves_the_blocks_of_tenants(kind, tmp_path, keys, command):
    root, given = tmp_path / "root", own(keys, *NAMES)
    with opened(kind, root, given) as harness:
        harness.store(ALL)
    key = ["--encryption-key-file", given["a"]["encryption_key_file"]]
    assert "another key" in command.run("store", "verify", root, *key).output
    command.run("store", "gc", root, "--corrupt", *key)
    with opened(kind, root, given) as harness:
        assert served(harness, ALL) == ALL


def test_remote_values_open_for_their_tenant_alone():
    tenants = tenants_of({name: {} for name in NAMES})
    one, other = (EncryptionKey(bytes([number]) * 32) for number in (1, 2))
    rings = [[one.of("default")], [one.of("a")], [other.of("b")]]
    client = FakeClient()
    with World(client, encryption_keys=TenantRings(rings, tenants.tenant_of)) as world:
        assert world.store(ALL) == {}
        assert world.load(ALL) == {}
    rings = [rings[0], [other.of("a")], rings[2]]
    with World(client, encryption_keys=TenantRings(rings, tenants.tenant_of)) as world:
        assert set(world.load(ALL)) == {4, 5, 6, 7}
        assert set(client.values) == set(ALL), "a value that no key opens stays"


# -- nothing of a tenant opens under another -------------------------------------------------------

NUMBERS = st.integers(0, 2)
SECRETS = st.lists(NUMBERS, min_size=3, max_size=3)


def rings_of(secrets, key_class=EncryptionKey):
    return [[key_class(bytes([secret]) * 32)] for secret in secrets]


@given(SECRETS, SECRETS, NUMBERS, NUMBERS, st.booleans())
def test_a_block_opens_under_no_other_tenants_ring_or_name(one, other, writer, reader, moved):
    """Not even if two tenants have the same key, which is the tier's."""
    assume(writer != reader or one[writer] != other[reader])
    tenants = tenants_of({name: {} for name in NAMES})

    def sealer(secrets):
        rings = zip(rings_of(secrets), NAMES, strict=True)
        bound = [[key.of(name) for key in ring] for ring, name in rings]
        return Sealer(TenantRings(bound, tenants.tenant_of), "fs 2", "layout")

    key = tenants.tagged(key_of(1), writer)
    body = bytearray(6)
    seal = sealer(one).seal(key, memoryview(b"secret"), memoryview(body))
    opener = sealer(other)
    if moved:
        key = tenants.tagged(key_of(1), reader)
    else:
        opener._tenant_of = lambda _: reader
    assert not opener.open_into(key, seal, memoryview(body))
    assert body == bytes(6)


@given(SECRETS, SECRETS, NUMBERS, NUMBERS)
def test_a_name_is_opened_for_no_other_tenant(one, other, writer, reader):
    assume(writer != reader or one[writer] != other[reader])
    tenants = tenants_of({name: {} for name in NAMES})
    writes = NameKeys(TenantRings(rings_of(one, NameKey), tenants.tenant_of))
    reads = NameKeys(TenantRings(rings_of(other, NameKey), tenants.tenant_of))
    key = tenants.tagged(key_of(1), writer)
    (name,) = writes.sealed(0, [key])
    assert tenants.tenant_of(name) == writer
    assert name[:1] + name[9:] != key[:1] + key[9:]
    assert writes.opened([name]) == [key]
    moved = name[:1] + tenants.tag(reader) + name[9:]
    assert reads.opened([moved]) == []
    assert reads.unknown_names == 1


def test_equal_hashes_of_tenants_with_one_name_key_have_unlike_names():
    tenants = tenants_of({name: {} for name in NAMES})
    names = NameKeys(TenantRings(rings_of([1, 1, 1], NameKey), tenants.tenant_of))
    sealed = list(names.sealed(0, [tenants.tagged(key_of(1), i) for i in range(3)]))
    assert len({name[:1] + name[9:] for name in sealed}) == 3


def test_keys_of_every_length_come_back_and_strangers_are_skipped():
    tenants = tenants_of({name: {} for name in NAMES})
    rings = [[NameKey(b"1" * 32)], None, [NameKey(b"2" * 32), NameKey(b"3" * 32)]]
    names = NameKeys(TenantRings(rings, tenants.tenant_of))
    for index in range(3):
        keys = [
            tenants.tagged(make_offload_key(bytes(range(1, n + 1)), n), index) for n in range(1, 69)
        ]
        sealed = list(names.sealed(0, keys))
        assert names.opened(sealed) == keys
        assert (sealed == keys) is (index == 1)
        assert len(names.sealed(1, keys)) == (68 if index == 2 else 0)
    assert names.opened([b"short", b"x" * 20, b"x" * 60]) == []
    assert names.unknown_names == 3


# -- bad input -------------------------------------------------------------------------------------


def refused(match, tier, given):
    with pytest.raises(ConfigError, match=match):
        with_tenant_keys([tier], tenants_of(given))


@pytest.mark.parametrize("option", ["encryption_key_file", "name_key_file"])
def test_a_key_of_another_tenant_or_of_the_tier_is_refused(tmp_path, keys, option):
    fs = {"type": "fs", "root_dir": str(tmp_path / "root")}
    given = {name: {option: keys(name)} for name in NAMES}
    twice = given | {"b": {option: [keys("c"), key_file(tmp_path, "the secret named a")]}}
    refused(f"{option}: tenant 'b' has a key of tenant 'a'", fs, twice)
    with pytest.raises(ConfigError, match="has a key of tenant 'a'"):
        with_tenant_keys([], tenants_of(twice))
    tiers = fs | {option: keys("a")}
    assert with_tenant_keys([tiers], tenants_of(given)), "nobody uses the tier's"
    del given["b"]
    assert with_tenant_keys([tiers], tenants_of(given))
    given["b"] = {}
    refused(rf"secondary_tiers\[0\]: {option}: tenant 'a' has a key of the tier", tiers, given)
    missing = {"a": {option: str(tmp_path / "none")}}
    refused(rf"tenants\['a'\]: {option}: .*cannot be read", fs, missing)
    assert not (tmp_path / "root").exists()


def test_a_tenant_without_a_key_beside_one_with_it_is_refused(tmp_path, keys):
    fs = {"type": "fs", "root_dir": str(tmp_path)}
    key = {"encryption_key_file": keys("a")}
    refused("encryption_key_file: tenant 'default' has none", fs, {"a": key})
    refused("encryption_key_file: tenant 'b' has none", fs, {"default": key, "b": {}})
    refused("the tier cannot encrypt", {"type": "example"}, {"default": key})
    refused("trust_vllm_directory", fs | {"trust_vllm_directory": True}, {"a": {}})
    assert with_tenant_keys([fs], tenants_of({"a": {}})) == [fs]
    (given,) = with_tenant_keys([fs | {"encryption_key_file": keys("t")}], tenants_of({"a": key}))
    rings = given["encryption_key_file"].rings
    assert [ring[0].tenant for ring in rings] == [b"default", b"a"]
    assert with_tenant_keys([fs], tenants_of({"a": {"name_key_file": keys("a")}}))


def test_an_engine_checks_its_tenants_keys_before_it_starts(tmp_path, keys):
    root = tmp_path / "root"
    config = {
        "model": "m",
        "block_bytes": BLOCK,
        "cpu_bytes_to_use": 64 * BLOCK,
        "tenants": own(keys, *NAMES),
        "secondary_tiers": [{"type": "fs", "root_dir": str(root), "capacity_bytes": "16MiB"}],
    }
    with TieringOffloadingSpec(config) as spec:
        (manager,) = spec.get_manager().secondary_tiers
        assert manager.link.actor.location.endswith("names sealed with key of each tenant")
        assert manager.tier._settings.is_encrypted
        again = TieringOffloadingSpec(spec.config)
        again.shutdown()
    tiers = [config["secondary_tiers"][0] | {"integrity_key_file": keys("i")}]
    with pytest.raises(ConfigError, match="integrity_key_file: does not go with encryption_key"):
        TieringOffloadingSpec(config | {"secondary_tiers": tiers})
