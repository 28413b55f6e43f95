"""What a released version has written is read for ever."""

import json

import pytest
from command_line import command
from formats.samples import FOLDER, Opened, Sample

from kvoffload_async import ConfigError
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.fs.usage import read_usage
from kvoffload_async.tiers.slab import recovery

__all__ = ["command"]

NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
PYTHON = [f"{name}:python" for name in NAMES if name.endswith("-encrypted")]
"""Samples that Python's threads decrypt, too."""


@pytest.fixture(params=NAMES + PYTHON)
def sample(request, monkeypatch):
    if request.param in PYTHON:
        monkeypatch.setenv("KVOFFLOAD_NATIVE", "0")
    return Sample.read(request.param.partition(":")[0])


@pytest.fixture
def root(sample, tmp_path):
    root = tmp_path / "root"
    sample.unpack(root)
    return root


def served(sample, root, **options):
    with Opened(root, sample.options(root.parent) | options) as opened:
        return opened.load(sample.keys())


def truth(sample):
    return {key: bytes(row) for key, row in zip(sample.keys(), sample.truth(), strict=True)}


def test_there_is_a_sample_of_every_version():
    fs = {"fs-1-key", "fs-1-count", "fs-2-key", "fs-2-count"}
    fs |= {"fs-2-encrypted"}
    assert fs | {"slab-2-headers", "slab-2-headers-key", "slab-3-encrypted"} == set(NAMES)


def test_every_block_of_a_sample_is_served_with_its_bytes(sample, root):
    assert served(sample, root) == truth(sample)
    assert served(sample, root) == truth(sample), "also when it has been closed in order"


def test_every_block_of_a_sample_has_a_checksum_that_is_right(sample, root):
    assert served(sample, root, verify="required") == truth(sample)


def test_a_sample_is_served_beside_new_blocks(sample, root):
    grown = {"capacity_bytes": "4MiB"}
    new = [key[:-1] + b"\xff" for key in sample.keys()[:4]]
    with Opened(root, sample.options(root.parent) | grown) as opened:
        opened.store(new, sample.truth()[:4])
        assert opened.load(sample.keys()) == truth(sample)
        assert list(opened.load(new).values()) == [bytes(row) for row in sample.truth()[:4]]


def test_a_damaged_block_of_a_sample_is_not_served(sample, root):
    pattern = "*.bin" if sample.tier["type"] == "fs" else "segment-*.slab"
    for path in root.rglob(pattern):
        damaged = bytearray(path.read_bytes())
        for at in range(100, len(damaged), 4096):  # what precedes the blocks is as long
            damaged[at] ^= 1
        with path.open("r+b") as file:
            file.write(damaged)
    found = served(sample, root)
    assert len(found) < len(sample.blocks)
    assert found.items() <= truth(sample).items()


def test_verify_finds_every_block_of_a_sample_right(sample, root, command, monkeypatch):
    # On the machine that made a sample too: nothing here has been open since this boot.
    monkeypatch.setattr(recovery, "boot_id", lambda: "of a later boot")
    command.run("store", "gc", root, "--older-than", 0)  # what the killed process has left
    path = sample.key_file(root.parent)
    key = () if path is None else (f"--{sample.kind}-key-file", path)
    result = command.run("store", "verify", root, "--json", *key)
    report = json.loads(result.stdout)
    (found,) = report["namespaces"] + report["slab_stores"]
    was_closed = sample.tier["type"] == "fs"
    expected = [] if was_closed else ["the store was not closed before a machine crash"]
    assert [problem.partition(",")[0] for problem in found["problems"]] == expected
    assert result.exit_code == (0 if was_closed else 1), result.output
    assert found["verification"]["verified"] == len(sample.blocks)


@pytest.mark.parametrize("sample", [n for n in NAMES if n.endswith("-key")], indirect=True)
def test_a_sample_with_a_key_is_served_to_nobody_without_it(sample, root):
    if sample.tier["type"] == "slab":
        with pytest.raises(ConfigError, match="by the integrity key with the id"):
            Opened(root, sample.tier)
        return
    with Opened(root, sample.tier) as opened:
        assert opened.load(sample.keys()) == {}


@pytest.mark.parametrize("sample", ["fs-2-count"], indirect=True)
def test_the_count_of_a_sample_is_read_and_goes_on(sample, root):
    (path,) = root.glob("*_r0/.usage")
    usage = read_usage(FileOps(), str(path.parent))
    assert usage is not None
    assert usage.is_complete
    assert (usage.sequence, usage.settled_bytes) == (16, 53248)
    assert [writer.num_changes for writer in usage.writers.values()] == [16]
    assert served(sample, root) == truth(sample)
    after = read_usage(FileOps(), str(path.parent))
    assert after is not None
    assert after.sequence > 16
    assert not after.writers


@pytest.mark.parametrize("sample", ["fs-1-count", "fs-2-key"], indirect=True)
def test_a_count_of_a_former_version_is_made_anew(sample, root):
    (path,) = root.glob("*_r0/.usage")
    assert read_usage(FileOps(), str(path.parent)) is None
    assert served(sample, root) == truth(sample)
    after = read_usage(FileOps(), str(path.parent))
    assert after is not None
    assert after.is_complete
    assert after.settled_bytes > len(sample.blocks) * 4096
