"""The scripts of docs/formats.md read, and write, what tiers do with no code of theirs."""

import subprocess
import sys

import pytest
from doc_blocks import ROOT, blocks_of
from fs.directories import FsDirectory
from sealed_names import key_file, sealing

from kvoffload_async.testing.harness import TierHarness, key_of


@pytest.fixture
def script(tmp_path):
    """Return a function that runs a script of the page, and returns what it prints."""
    page = ROOT / "docs/formats.md"
    texts = {block.title: block.text for block in blocks_of(page)}

    def run(title, *arguments):
        path = tmp_path / title
        path.write_text(texts[title])
        done = subprocess.run(
            [sys.executable, path, *map(str, arguments)], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    return run


def test_a_script_opens_the_name_of_a_block(script, tmp_path):
    directory, path = FsDirectory(tmp_path / "root"), key_file(tmp_path)
    with TierHarness(sealing(directory.tier, [path])()) as harness:
        harness.store([key_of(7)])
    (file,) = directory.folder.rglob("*.bin")
    assert script("open_name.py", path, file.name) == key_of(7)[:-4].hex()
