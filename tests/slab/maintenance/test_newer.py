"""A store of a newer release: the command says what it needs, and leaves every file as it is."""

import json

import pytest
from slab.stores import flip

from kvoffload_async.tiers.slab.layout import MANIFEST
from kvoffload_async.tiers.slab.manifest import VERSION, _check


def rewrite(slab, **values):
    """Say something else in the manifest, as a release with other checksums would."""
    body = json.loads(slab.manifest.read_bytes())
    features = body["features"]
    for kind in features.keys() & values.keys():
        features[kind] = [*features[kind], *values.pop(kind)]
    slab.manifest.write_text(json.dumps(body | values, indent=2, sort_keys=True))


def correct_checksum(slab):
    body = json.loads(slab.manifest.read_bytes())
    del body["xxh3"]
    slab.manifest.write_text(json.dumps(body | {"xxh3": _check(body)}))


def newer_version(slab):
    rewrite(slab, version=VERSION + 1, xxh3="made in another way")
    return f"needs a release that knows format {VERSION + 1}"


def unknown_feature(slab):
    rewrite(slab, incompatible=["braided-segments"])
    return "needs a release that knows feature 'braided-segments'"


def unknown_features(slab):
    rewrite(slab, incompatible=["b", "a"])
    return "needs a release that knows features 'a', 'b'"


def damaged_and_newer(slab):
    newer_version(slab)
    slab.manifest.write_bytes(slab.manifest.read_bytes()[:-3])
    return f"needs a release that knows format {VERSION + 1}"


NEWER = [newer_version, unknown_feature, unknown_features]


@pytest.mark.parametrize("make_newer", NEWER)
@pytest.mark.parametrize("verb", ["inspect", "verify", "gc", "repair"])
def test_it_is_refused_with_what_it_needs_and_left_as_it_is(slab, make_newer, verb):
    (slab.folder / "journal.tmp").write_bytes(b"a newer release's")
    flip(slab.journal, 300)
    need = make_newer(slab)
    (slab.folder / "lock").write_bytes(b"not this process\n")
    before = slab.files(), (slab.folder / "lock").read_bytes()
    (complaint,) = slab.complaints(verb)
    assert need in complaint
    assert "repair" not in complaint
    assert (slab.files(), (slab.folder / "lock").read_bytes()) == before


@pytest.mark.parametrize("arguments", [["--corrupt"], ["--unknown-files", "--older-than", 0]])
def test_no_gc_touches_it(slab, arguments):
    (slab.folder / "notes").write_bytes(b"a newer release's")
    newer_version(slab)
    before = slab.files()
    assert len(slab.complaints("gc", *arguments)) == 1
    assert len(slab.complaints("gc", "--dry-run", *arguments)) == 1
    assert slab.files() == before


def test_repair_believes_a_damaged_manifest_that_says_so(slab):
    need = damaged_and_newer(slab)
    before = slab.files()
    (complaint,) = slab.complaints("repair")
    assert need in complaint
    assert slab.files() == before


def test_repair_is_not_misled_by_a_version_in_the_run_config(slab):
    rewrite(slab, run_config={"model_name": "m", "version": 99}, xxh3="wrong")
    slab.manifest.write_bytes(slab.manifest.read_bytes()[:-3])
    assert slab.run("repair")["manifest_rebuilt"]


def test_a_given_manifest_of_a_newer_release_is_refused(slab):
    backup = slab.command.directory / "backup.json"
    newer_version(slab)
    slab.manifest.rename(backup)
    assert f"knows format {VERSION + 1}" in slab.command.refusal(
        "store", "repair", slab.root, "--manifest", backup
    )
    assert not slab.manifest.exists()


def test_a_newer_store_beside_it_is_no_source_for_a_lost_manifest(slab):
    beside = slab.root / "m_r7"
    beside.mkdir()
    newer_version(slab)
    slab.manifest.rename(beside / MANIFEST)
    result = slab.command.run("store", "repair", slab.folder)
    assert result.exit_code == 1
    assert "it cannot be reconstructed" in result.stderr


def test_what_may_only_be_read_is_read_and_not_changed(slab):
    rewrite(slab, read_only_compatible=["sorted-slots"])
    correct_checksum(slab)
    before = slab.files()
    assert slab.run("inspect")["blocks"] == 12
    assert slab.run("verify")["verification"]["verified"] == 12
    for verb in ("gc", "repair"):
        (complaint,) = slab.complaints(verb)
        assert "knows feature 'sorted-slots'; this one may only read it" in complaint
    assert slab.files() == before


def test_what_is_compatible_is_no_matter(slab):
    rewrite(slab, compatible=["birthday"])
    correct_checksum(slab)
    assert slab.run("verify")["verification"]["verified"] == 12
    slab.run("gc", "--corrupt")
    slab.run("repair")
    assert slab.served() == list(range(12))
