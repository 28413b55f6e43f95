"""The scripts of docs/formats.md read, and write, what tiers do with no code of theirs."""

import runpy
import subprocess
import sys

import pytest
from doc_blocks import ROOT, blocks_of
from fs.directories import FsDirectory
from remote.fake_store import SLOT_BYTES, FakeClient, World
from sealed_names import key_file, sealing

from kvoffload_async.testing.harness import TierHarness, content_of, key_of
from kvoffload_async.tiers.files.sealing import EncryptionKey


@pytest.fixture
def script(tmp_path):
    """Return a function that returns the path of a script of the page."""
    texts = {block.title: block.text for block in blocks_of(ROOT / "docs/formats.md")}

    def write(title):
        path = tmp_path / title
        path.write_text(texts[title])
        return str(path)

    return write


def test_a_script_opens_the_name_of_a_block(script, tmp_path):
    directory, path = FsDirectory(tmp_path / "root"), key_file(tmp_path)
    with TierHarness(sealing(directory.tier, [path])()) as harness:
        harness.store([key_of(7)])
    (file,) = directory.folder.rglob("*.bin")
    command = [sys.executable, script("open_name.py"), path, file.name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == key_of(7)[:-4].hex()


def test_a_script_opens_and_writes_encrypted_values(script):
    functions = runpy.run_path(script("remote_block.py"))
    secret, key = b"s" * 32, key_of(7)
    content = content_of(key, SLOT_BYTES).tobytes()
    with World(encryption_keys=[EncryptionKey(secret)]) as world:
        world.store([key])
        layout = world.env.identity.digest
        assert functions["open_value"](secret, world.client.values[key]) == content
    made = functions["make_value"](secret, layout, key, content)
    with World(FakeClient({key: made}), encryption_keys=[EncryptionKey(secret)]) as world:
        assert world.load([key]) == {}
        assert world.holds(key, 0)
