"""A store of a newer release: the command says what it needs, and leaves every file as it is."""

import json

import pytest
from slab.stores import flip

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


NEWER = [newer_version, unknown_feature, unknown_features]


@pytest.mark.parametrize("make_newer", NEWER)
@pytest.mark.parametrize("verb", ["inspect", "verify", "gc"])
def test_it_is_refused_with_what_it_needs_and_left_as_it_is(slab, make_newer, verb):
    (slab.folder / "journal.tmp").write_bytes(b"a newer release's")
    flip(slab.journal, 300)
    need = make_newer(slab)
    (slab.folder / "lock").write_bytes(b"not this process\n")
    before = slab.files(), (slab.folder / "lock").read_bytes()
    (complaint,) = slab.complaints(verb)
    assert need in complaint
    assert "remove" not in complaint
    assert (slab.files(), (slab.folder / "lock").read_bytes()) == before


@pytest.mark.parametrize("arguments", [["--corrupt"], ["--unknown-files", "--older-than", 0]])
def test_no_gc_touches_it(slab, arguments):
    (slab.folder / "notes").write_bytes(b"a newer release's")
    newer_version(slab)
    before = slab.files()
    assert len(slab.complaints("gc", *arguments)) == 1
    assert len(slab.complaints("gc", "--dry-run", *arguments)) == 1
    assert slab.files() == before


def test_what_may_only_be_read_is_read_and_not_changed(slab):
    rewrite(slab, read_only_compatible=["sorted-slots"])
    correct_checksum(slab)
    before = slab.files()
    assert slab.run("inspect")["blocks"] == 12
    assert slab.run("verify")["verification"]["verified"] == 12
    (complaint,) = slab.complaints("gc")
    assert "knows feature 'sorted-slots'; this one may only read it" in complaint
    assert slab.files() == before


def test_what_is_compatible_is_no_matter(slab):
    rewrite(slab, compatible=["birthday"])
    correct_checksum(slab)
    assert slab.run("verify")["verification"]["verified"] == 12
    slab.run("gc", "--corrupt")
    assert slab.served() == list(range(12))
