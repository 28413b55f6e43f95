"""Whatever is in a store's small files: no traceback is seen, and no wrong byte served."""

import itertools
import json
import os
import shutil

import numpy as np
import pytest
from cli.hostile_files import CORPUS, SPARSE_BYTES, altered, written
from command_line import Command
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiers.kept import BLOCK, NUM_BLOCKS, keep_blocks

from kvoffload_async.errors import OffloadError
from kvoffload_async.facade.tier_factory import SecondaryTierFactory
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.slab.manifest import _check as manifest_checksum
from kvoffload_async.types import JobMetadata, ReqContext, as_block_ids

pytestmark = pytest.mark.slow

CALLS = (
    ["inspect"],
    ["verify", "--json"],
    ["gc", "--corrupt", "--unknown-files", "--older-than", "0"],
)
SMALL_FILES = {
    "fs": ("config.json", ".usage", ".writers/9-abc .writers/\x1b[2J"),
    "slab": ("manifest.json", "journal", "manifest.json.tmp journal.tmp lock"),
}
"""The files of each kind; those with blanks between them are several."""
OPTIONS = {"fs": {"capacity_bytes": "16MiB"}, "slab": {"capacity_bytes": "1MiB"}}
CASES = [(kind, name) for kind, names in SMALL_FILES.items() for name in names]
every_small_file = pytest.mark.parametrize(("kind", "name"), CASES)
_numbers = itertools.count()


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A directory of each kind, with blocks in it."""
    roots = {kind: tmp_path_factory.mktemp(kind) for kind in SMALL_FILES}
    for kind, root in roots.items():
        keep_blocks(kind, root, **OPTIONS[kind])
    return roots


@pytest.fixture
def opened_as(kept, tmp_path):
    """Return a directory like one that was kept, with another small file in it."""

    def make(kind, name, content):
        root = tmp_path / str(next(_numbers))
        shutil.copytree(kept[kind], root)
        for path in paths_of(root, name):
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        return root

    return make


def paths_of(root, names):
    (folder,) = root.glob("*_r0")
    if names == "config.json":
        return [root / folder.name.removesuffix("_r0") / names]
    return [folder / name for name in names.split(" ")]


def survives(kind, root):
    """Call everything on a directory; what is refused is refused in a line."""
    for call in CALLS:
        result = Command(root).run("store", call[0], root, *call[1:])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.output
        assert result.exit_code in {0, 1, 2}
        assert all(line.startswith("kvoffload: ") for line in result.stderr.splitlines())
        assert len(result.stderr) < 10_000
        if "--json" in call and result.exit_code < 2:
            json.loads(result.stdout)
    serves_nothing_wrong(kind, root)


def serves_nothing_wrong(kind, root):
    """Open a tier, store and load; it may refuse to open, and say so in a line."""
    buffer = PrimaryBuffer(NUM_BLOCKS, BLOCK)
    rows = np.asarray(buffer.view)
    rows[:] = np.arange(NUM_BLOCKS, dtype=np.uint8)[:, None]
    config = {"type": kind, "root_dir": str(root), "model": "m", **OPTIONS[kind]}
    try:
        tier = SecondaryTierFactory.create_secondary_tier(config, buffer.view, None)
    except OffloadError as error:
        refusal = str(error)
    else:
        refusal = ""
        serves_what_it_stored(tier, rows)
        tier.shutdown()
    assert "\n" not in refusal
    del rows
    buffer.release()


def serves_what_it_stored(tier, rows):
    keys = tuple(key_of(number) for number in range(NUM_BLOCKS))
    slots = as_block_ids(range(NUM_BLOCKS))
    for job_id, is_load in ((1, True), (2, False), (3, True)):
        if is_load:
            rows[:] = 255
        job = JobMetadata(job_id, keys, slots, is_load, ReqContext("r"))
        (tier.submit_load if is_load else tier.submit_store)(job)
        assert tier.drain_jobs(30.0)
        (result,) = tier.get_finished_jobs()
        right = keys if result.success else (result.successful_keys or ())
        if is_load:
            assert all((rows[n] == n).all() for n in range(NUM_BLOCKS) if keys[n] in right)
        rows[:] = np.arange(NUM_BLOCKS, dtype=np.uint8)[:, None]
    assert result.success  # what was stored a moment ago


def corpus_in_files():
    """Yield every content in every file; CI tries each content in one file of each kind."""
    for number, content in enumerate(CORPUS):
        for at, case in enumerate(CASES):
            marks = () if at % 3 == number % 3 else pytest.mark.sweep
            yield pytest.param(*case, content, marks=marks)


@pytest.mark.parametrize(("kind", "name", "content"), list(corpus_in_files()))
def test_what_is_no_small_file_of_a_store_is_a_line_or_is_ignored(opened_as, kind, name, content):
    survives(kind, opened_as(kind, name, CORPUS[content]))


@every_small_file
def test_a_small_file_that_claims_terabytes_is_a_line_or_is_ignored(opened_as, kind, name):
    root = opened_as(kind, name, b"{")
    for path in paths_of(root, name):
        os.truncate(path, SPARSE_BYTES)
    survives(kind, root)


def test_a_block_that_claims_terabytes_is_a_line(opened_as):
    """Without a manifest, nothing says how long it should be."""
    root = opened_as("fs", "config.json", b"")
    os.truncate(min(root.rglob("*.bin")), SPARSE_BYTES)
    survives("fs", root)


@settings(
    max_examples=settings().max_examples // 10,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # a directory an example
)
@given(data=st.data())
@pytest.mark.parametrize(
    ("kind", "name"),
    [("fs", "config.json"), ("slab", "manifest.json"), ("fs", ".writers/9-abc .writers/9")],
)
def test_an_object_with_other_values_is_a_line_or_is_ignored(opened_as, kept, kind, name, data):
    path = paths_of(kept[kind], name)[0]
    fields = json.loads(path.read_bytes()) if path.exists() else {"boot_id": "a", "host": "b"}
    changed = data.draw(altered(fields))
    if "xxh3" in changed and data.draw(st.booleans()):  # whoever can write, can do that, too
        body = {key: value for key, value in changed.items() if key != "xxh3"}
        changed["xxh3"] = manifest_checksum(body)
    survives(kind, opened_as(kind, name, written(changed)))


@settings(
    max_examples=settings().max_examples // 10,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # a directory an example
)
@given(data=st.data())
@every_small_file
def test_a_small_file_that_is_damaged_is_a_line_or_is_ignored(opened_as, kept, kind, name, data):
    path = paths_of(kept[kind], name)[0]
    content = bytearray(path.read_bytes() if path.exists() else b'{"boot_id": "a"}')
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(content)))
        piece = data.draw(st.binary(max_size=12) | st.sampled_from([b"[", b"NaN", b"KVSLABF1"]))
        content[at : at + data.draw(st.sampled_from([0, len(piece), 64, 4096]))] = piece
    survives(kind, opened_as(kind, name, bytes(content)))
