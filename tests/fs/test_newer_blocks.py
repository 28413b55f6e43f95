"""What a newer release has left in a namespace: never wrong, never removed, never overwritten."""

import json
import os

import pytest
from faulty_files import FaultyFileOps
from fs.directories import BLOCK, FsDirectory, load_key, store_key

from kvoffload_async import BlockMissingError, ConfigError, CorruptBlockError
from kvoffload_async.testing.harness import content_of, key_of
from kvoffload_async.tiers.fs.digest_attribute import ATTRIBUTE
from kvoffload_async.tiers.fs.operations import StoreStatus

A, B = key_of(0), key_of(1)
NEWER = [b"\x04", b"\x04" + bytes(16), b"\x04" + bytes(24), b"\xff" + bytes(60)]
DAMAGED = [b"", b"\x00" + bytes(16), b"\x01" + bytes(15), b"\x02" + bytes(16), b"\x01" + bytes(16)]


def put(directory: FsDirectory, value: bytes, content: bytes | None = None):
    path = directory.put(A, content)
    try:
        os.setxattr(path, ATTRIBUTE, value)
    except OSError:
        pytest.skip("no extended attributes here")
    return path


@pytest.mark.parametrize("verify", ["when_present", "required", "off"])
@pytest.mark.parametrize("length", [0, 100, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("value", NEWER)
def test_a_newer_block_is_a_miss_and_its_file_stays(directory, value, length, verify):
    path = put(directory, value, bytes(length))
    failure = load_key(directory.files(verify=verify), A)
    assert isinstance(failure.error, BlockMissingError)
    assert "of a newer release" in str(failure.error)
    assert failure.freed_bytes is None
    assert path.stat().st_size == length


KEYED = b"\x02" + bytes(24)
"""A checksum that an integrity key has made, which this tier lacks."""


@pytest.mark.parametrize("options", [{}, {"direct_io": True}])
@pytest.mark.parametrize("value", [*NEWER, KEYED])
def test_a_tier_that_verifies_nothing_does_not_serve_what_it_could_not_verify(
    directory, value, options
):
    path = put(directory, value)
    directory.put(B)
    with directory.open(verify="off", **options) as harness:
        failures = harness.load([A, B])
        assert list(failures) == [0]
        assert isinstance(failures[0], BlockMissingError)
        assert harness.store([A]) == {}, "present"
    assert os.getxattr(path, ATTRIBUTE) == value


@pytest.mark.parametrize("value", DAMAGED)
def test_a_damaged_checksum_is_no_newer_one(directory, value):
    path = put(directory, value)
    failure = load_key(directory.files(), A)
    assert isinstance(failure.error, CorruptBlockError)
    assert not path.exists()


@pytest.mark.parametrize("capacity_bytes", [None, 1 << 20])
def test_its_store_reports_it_as_present_and_leaves_it(directory, capacity_bytes):
    path = put(directory, NEWER[1], b"newer")
    with directory.open(capacity_bytes=capacity_bytes) as harness:
        assert harness.store([A, B]) == {}
        assert harness.contains([A]) == {A}
        assert set(harness.load([A, B])) == {0}
    assert path.read_bytes() == b"newer"
    assert os.getxattr(path, ATTRIBUTE) == NEWER[1]


def test_one_that_is_evicted_is_not_overwritten_but_removed(directory):
    """What a newer release's readers compare with what, nobody here knows."""
    ops = FaultyFileOps()
    files = directory.files(ops, reuses_inodes=True)
    for value, is_overwritten in [(NEWER[1], False), (directory.attribute_of(A), True)]:
        path = put(directory, value)
        with path.open("rb") as reader:
            outcome = store_key(files, B, victim=A)
            assert outcome.status is StoreStatus.WRITTEN
            assert outcome.freed_bytes is not None
            is_new = reader.read() == content_of(B, BLOCK).tobytes()
        assert is_new is is_overwritten
        directory.path(B).unlink()


# -- the namespace --------------------------------------------------------------------------------

FORMAT = {"format": "kvoffload-fs", "version": 1}


def write_format(directory: FsDirectory, body: object) -> None:
    directory.folder.mkdir(parents=True, exist_ok=True)
    text = body if isinstance(body, str) else json.dumps(body)
    (directory.folder / ".format").write_text(text)


@pytest.mark.parametrize(
    ("body", "need"),
    [
        (FORMAT | {"version": 2}, "knows format 2"),
        (FORMAT | {"features": {"incompatible": ["x"]}}, "knows feature 'x'"),
        (FORMAT | {"features": {"read_only_compatible": ["x"]}}, "this one may only read it"),
        ({"format": "other", "version": 1}, "is not known to this release"),
        (FORMAT | {"version": "x"}, "is not known to this release"),
        (FORMAT | {"features": {"incompatible": 7}}, "is not known to this release"),
        ("", "is not known to this release"),
        ("[" * 50_000, "is not known to this release"),
        ("\xff", "is not known to this release"),
    ],
    ids=range(9),
)
def test_a_tier_refuses_a_namespace_of_a_newer_release_and_writes_nothing(directory, body, need):
    write_format(directory, body)
    before = sorted(directory.root.rglob("*"))
    with (
        pytest.raises(ConfigError, match=f"root_dir: .*{need}.*; upgrade, or give"),
        directory.open(),
    ):
        pass
    assert sorted(directory.root.rglob("*")) == before


def test_a_namespace_with_features_that_do_not_matter_is_used(directory):
    write_format(directory, FORMAT | {"features": {"compatible": ["x"]}})
    with directory.open() as harness:
        assert harness.store([A]) == {}
        assert harness.load([A]) == {}
