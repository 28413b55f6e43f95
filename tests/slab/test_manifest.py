"""The manifest's bytes: what is believed of them, and in which order."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slab.stores import BLOCK, FIELDS

from kvoffload_async import ConfigError
from kvoffload_async.tiers.files.features import Features, NewerFormatError
from kvoffload_async.tiers.slab.layout import StoreLayout
from kvoffload_async.tiers.slab.manifest import (
    BASE_FEATURES,
    INTEGRITY_KEY,
    VERSION,
    Manifest,
    UnreadableManifestError,
    _check,
)

NEW = StoreLayout("/root", FIELDS, 0, BLOCK).manifest.of_new_store()
KEYED = StoreLayout("/root", FIELDS, 0, BLOCK, "0123456789abcdef").manifest.of_new_store()


def changed(manifest: Manifest, **values) -> bytes:
    """Return a manifest with other values and the checksum that goes with them."""
    body = json.loads(manifest.encode()) | values
    body.pop("xxh3")
    return json.dumps(body | {"xxh3": _check(body)}).encode()


def without(manifest: Manifest, name: str) -> bytes:
    body = json.loads(manifest.encode())
    del body[name], body["xxh3"]
    return json.dumps(body | {"xxh3": _check(body)}).encode()


@pytest.mark.parametrize("manifest", [NEW, KEYED])
def test_what_is_written_is_read(manifest):
    assert Manifest.decode(manifest.encode()) == manifest


def test_every_new_store_has_a_uuid_of_its_own():
    assert NEW.store_uuid != KEYED.store_uuid
    assert json.loads(NEW.encode())["version"] == 2 < VERSION == 3


def test_a_store_with_a_key_says_so_to_releases_that_know_none():
    assert KEYED.features.incompatible >= {INTEGRITY_KEY}
    assert NEW.features.incompatible == KEYED.features.incompatible - {INTEGRITY_KEY}
    assert json.loads(KEYED.encode())["integrity_key_id"] == "0123456789abcdef"
    assert "integrity_key_id" not in json.loads(NEW.encode())


def test_the_version_comes_before_the_checksum():
    body = json.loads(NEW.encode()) | {"version": VERSION + 1}
    with pytest.raises(NewerFormatError, match=f"knows format {VERSION + 1}; this one knows those"):
        Manifest.decode(json.dumps(body).encode())


@pytest.mark.parametrize("has_checksum", [True, False])
def test_an_unknown_incompatible_feature_is_refused_before_the_checksum(has_checksum):
    features = {"incompatible": ["x"]}
    content = changed(NEW, features=features)
    if not has_checksum:
        content = content.replace(b'"xxh3": "', b'"xxh3": "0')
    for for_writing in (True, False):
        with pytest.raises(NewerFormatError, match=r"a release that knows feature 'x'$"):
            Manifest.decode(content, for_writing=for_writing)


def test_an_unknown_read_only_compatible_feature_is_refused_to_who_writes():
    content = changed(NEW, features=BASE_FEATURES.encode() | {"read_only_compatible": ["x"]})
    with pytest.raises(NewerFormatError, match="feature 'x'; this one may only read it"):
        Manifest.decode(content)
    read = Manifest.decode(content, for_writing=False)
    assert read.features == replace(BASE_FEATURES, read_only_compatible=frozenset({"x"}))


def test_an_unknown_compatible_feature_is_kept():
    content = changed(NEW, features=BASE_FEATURES.encode() | {"compatible": ["x"]})
    read = Manifest.decode(content)
    assert read.features == replace(BASE_FEATURES, compatible=frozenset({"x"}))
    assert json.loads(read.encode())["features"]["compatible"] == ["x"]


BAD = [
    {"version": 0},
    {"version": 1},
    {"version": True},
    {"version": "2"},
    {"version": 2.0},
    {"version": float("inf")},
    {"version": None},
    {"features": None},
    {"features": Features().encode()},
    {"features": []},
    {"features": {"incompatible": "x"}},
    {"features": {"incompatible": [1]}},
    {"features": {"other": []}},
    {"block_bytes": "4096"},
    {"block_bytes": 0},
    {"block_bytes": True},
    {"slot_bytes": BLOCK - 1},
    {"slot_bytes": 1 << 20},
    {"slot_bytes": float("nan")},
    {"rank": -1},
    {"rank": None},
    {"layout": 7},
    {"layout": "a:b"},
    {"run_config": []},
    {"store_uuid": None},
    {"store_uuid": "x" * 36},
    {"integrity_key_id": "0123456789abcdef"},
]


@pytest.mark.parametrize("values", BAD, ids=str)
def test_an_impossible_value_is_unreadable_although_its_checksum_is_right(values):
    with pytest.raises(UnreadableManifestError):
        Manifest.decode(changed(NEW, **values))


@pytest.mark.parametrize("name", ["version", "block_bytes", "layout", "run_config", "store_uuid"])
def test_a_value_that_is_missing_is_unreadable(name):
    with pytest.raises(UnreadableManifestError):
        Manifest.decode(without(NEW, name))


@pytest.mark.parametrize("key_id", [None, 7, "0123", "X" * 16])
def test_a_key_without_an_id_is_unreadable(key_id):
    with pytest.raises(UnreadableManifestError, match="missing or out of range"):
        Manifest.decode(changed(KEYED, integrity_key_id=key_id))


@given(st.binary(max_size=200) | st.builds(lambda depth: b"[" * depth, st.integers(0, 100_000)))
def test_any_bytes_are_a_manifest_or_refused(content):
    with pytest.raises(UnreadableManifestError):
        Manifest.decode(content)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(sorted(json.loads(KEYED.encode()).keys() - {"xxh3"})), JSON)
def test_any_value_is_read_or_refused(name, value):
    try:
        Manifest.decode(changed(KEYED, **{name: value}))
    except (UnreadableManifestError, NewerFormatError):
        return
    assert name in {"block_bytes", "slot_bytes", "rank", "run_config", "features", "version"}


# -- the tier -------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_mismatch", ["fail", "replace", "new_namespace"])
def test_a_tier_refuses_a_newer_store_and_writes_nothing(slab_store, on_mismatch):
    with slab_store.open():
        pass
    body = json.loads(slab_store.manifest.read_bytes()) | {"version": VERSION + 1}
    slab_store.manifest.write_text(json.dumps(body))
    (slab_store.folder / "journal.tmp").write_bytes(b"x")
    (slab_store.folder / "lock").write_bytes(b"not this process\n")
    before = {path.name: path.read_bytes() for path in slab_store.folder.iterdir()}
    with (
        pytest.raises(ConfigError, match=f"knows format {VERSION + 1}.*upgrade, or give another"),
        slab_store.open(on_mismatch=on_mismatch),
    ):
        pass
    assert {path.name: path.read_bytes() for path in slab_store.folder.iterdir()} == before


def test_a_replaced_store_gets_another_uuid(slab_store):
    with slab_store.open() as harness:
        before = harness.tier._store.manifest
    assert before == Manifest.decode(slab_store.manifest.read_bytes())
    with slab_store.open() as harness:
        assert harness.tier._store.manifest == before
    with slab_store.open_other(on_mismatch="replace") as harness:
        assert harness.tier._store.manifest.store_uuid != before.store_uuid
