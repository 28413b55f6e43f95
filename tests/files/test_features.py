"""Which stores a release may read and write: by their version, then by their features."""

import pytest

from kvoffload_async.tiers.files.features import (
    Features,
    MalformedFormatError,
    NewerFormatError,
    check_format,
)

KNOWN = Features(frozenset("a"), frozenset("b"), frozenset("c"))
NEWEST = 3


def check(body, *, for_writing=True):
    return check_format(body, NEWEST, KNOWN, for_writing=for_writing)


@pytest.mark.parametrize("version", range(1, NEWEST + 1))
def test_every_version_up_to_the_newest_is_for_this_release(version):
    assert check({"version": version}) == Features()


@pytest.mark.parametrize("version", [None, "1", 1.0, True, 0, -1])
def test_what_is_no_version_is_malformed(version):
    with pytest.raises(MalformedFormatError, match="no version"):
        check({"version": version})


def test_a_newer_version_is_refused_before_its_features_are_read():
    with pytest.raises(NewerFormatError, match=r"knows format 4; this one .* up to 3"):
        check({"version": 4, "features": "of a shape unknown today"})


def test_known_features_are_accepted_and_returned():
    assert check({"version": 2, "features": KNOWN.encode()}) == KNOWN


@pytest.mark.parametrize(
    ("kind", "reads", "writes"),
    [
        ("compatible", True, True),
        ("read_only_compatible", True, False),
        ("incompatible", False, False),
    ],
)
def test_an_unknown_feature_forbids_what_its_kind_says(kind, reads, writes):
    body = {"version": 1, "features": {kind: ["new"]}}
    for for_writing, may in ((False, reads), (True, writes)):
        if may:
            assert check(body, for_writing=for_writing) == Features(**{kind: frozenset(["new"])})
        else:
            with pytest.raises(NewerFormatError, match="knows feature 'new'"):
                check(body, for_writing=for_writing)


def test_a_feature_is_known_as_what_it_is():
    with pytest.raises(NewerFormatError, match="knows features 'a', 'b'"):
        check({"version": 1, "features": {"incompatible": ["b", "a", "c"]}})


@pytest.mark.parametrize(
    "features", [None, [], {"other": []}, {"compatible": "ab"}, {"compatible": ["a", 1]}]
)
def test_what_are_no_features_is_malformed(features):
    with pytest.raises(MalformedFormatError, match="features"):
        check({"version": 1, "features": features})


def test_features_are_the_same_after_json_and_in_order():
    many = Features(incompatible=frozenset("zyx"))
    listed = {"compatible": [], "read_only_compatible": [], "incompatible": ["x", "y", "z"]}
    assert many.encode() == listed
    assert Features.decode(listed) == many
