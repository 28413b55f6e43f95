"""The scripts of docs/formats.md read, and write, what tiers do with no code of theirs."""

import os
import runpy
import subprocess
import sys

import pytest
from cryptography.exceptions import InvalidTag
from doc_blocks import ROOT, blocks_of
from fs.directories import BLOCK, FsDirectory
from remote.fake_store import SLOT_BYTES, FakeClient, World
from sealed_names import key_file, sealing

from kvoffload_async.testing.harness import TierHarness, content_of, key_of
from kvoffload_async.tiers._sealed_names import NameKeys, read_name_keys
from kvoffload_async.tiers.files.digests import TenantRings
from kvoffload_async.tiers.files.sealing import EncryptionKey
from kvoffload_async.tiers.fs.digest_attribute import ATTRIBUTE


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


def test_a_script_opens_the_name_of_a_tenants_block(script, tmp_path):
    path, key = key_file(tmp_path), key_of(7)
    (name,) = NameKeys(TenantRings([read_name_keys(path)], lambda _: 0)).sealed(0, [key])
    text = f"{name[:-4].hex()}_g{int.from_bytes(name[-4:], 'big')}.bin"
    command = [sys.executable, script("open_name.py"), path, text, "tenants"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (key[:1] + key[9:-4]).hex()


SECRET = b"s" * 32
RINGS = {
    "": [EncryptionKey(SECRET)],
    "a": TenantRings([[EncryptionKey(SECRET).of("a")]], lambda _: 0),
}


@pytest.mark.parametrize("tenant", sorted(RINGS))
def test_a_script_decrypts_a_file(script, tmp_path, tenant):
    directory, key = FsDirectory(tmp_path / "root"), key_of(7)
    try:
        os.setxattr(tmp_path, ATTRIBUTE, b"")
    except OSError:
        pytest.skip("no extended attributes here")
    with directory.open(verify="required", encryption_keys=RINGS[tenant]) as harness:
        harness.store([key])
    decrypt = runpy.run_path(script("decrypt.py"))["decrypt"]
    path, layout = str(directory.path(key)), directory.namespace.layout_of(BLOCK)
    assert decrypt(path, SECRET, layout, key, tenant) == content_of(key, BLOCK).tobytes()
    with pytest.raises(InvalidTag):
        decrypt(path, SECRET, layout, key, "other")


@pytest.mark.parametrize("tenant", sorted(RINGS))
def test_a_script_opens_and_writes_encrypted_values(script, tenant):
    functions = runpy.run_path(script("remote_block.py"))
    key, name = key_of(7), tenant.encode()
    content = content_of(key, SLOT_BYTES).tobytes()
    with World(encryption_keys=RINGS[tenant]) as world:
        world.store([key])
        layout = world.env.identity.digest
        assert functions["open_value"](SECRET, world.client.values[key], name) == content
    made = functions["make_value"](SECRET, layout, key, content, name)
    with World(FakeClient({key: made}), encryption_keys=RINGS[tenant]) as world:
        assert world.load([key]) == {}
        assert world.holds(key, 0)
