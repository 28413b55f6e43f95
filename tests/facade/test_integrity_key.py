"""The option `integrity_key_file` of the tiers on disk."""

import logging

import numpy as np
import pytest

from kvoffload_async import ConfigError, SecondaryTierFactory, TieringOffloadingSpec
from kvoffload_async.config import TierOptions
from kvoffload_async.facade.secondary import FileSystemTierManager, SlabTierManager
from kvoffload_async.facade.tier_options import identity_of
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.tiers.fs.operations import Verify
from kvoffload_async.types import JobMetadata, ReqContext, as_block_ids, make_offload_key

BLOCK = 4096
KEY_TEXT = "do-not-tell-anybody"
OPTIONS = {"fs": {}, "slab": {"capacity_bytes": "1MiB"}}


@pytest.fixture(params=["fs", "slab"])
def kind(request):
    return request.param


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "key"
    path.write_text(f"{KEY_TEXT}\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def view():
    buffer = PrimaryBuffer(4, BLOCK)
    yield buffer.view
    assert buffer.release()


def tier(kind, root, **options):
    return {"type": kind, "model": "m", "root_dir": str(root), **OPTIONS[kind], **options}


def settings_of(manager, options):
    identity = identity_of(TierOptions.take(options), None, BLOCK)
    return manager.tier_class.declares.of(options, identity)


def refusal(kind, view, root, **options):
    with pytest.raises(ConfigError) as raised:
        SecondaryTierFactory.create_secondary_tier(tier(kind, root, **options), view, None)
    assert not root.exists(), "nothing is touched before everything is checked"
    return str(raised.value)


@pytest.mark.parametrize("value", [KEY_TEXT, "key", "", 7, True, b"/key", ["/key"]])
def test_what_is_no_absolute_path_is_refused_and_not_shown(kind, view, tmp_path, value):
    message = refusal(kind, view, tmp_path / "root", integrity_key_file=value)
    assert message == "integrity_key_file: it must be the absolute path of a file"


def test_a_file_that_is_not_there_is_refused(kind, view, tmp_path):
    message = refusal(kind, view, tmp_path / "root", integrity_key_file=str(tmp_path / "none"))
    assert "integrity_key_file: " in message
    assert "No such file" in message


def test_a_file_that_everybody_can_read_is_refused_and_not_shown(kind, view, tmp_path, key_file):
    key_file.chmod(0o644)
    message = refusal(kind, view, tmp_path / "root", integrity_key_file=str(key_file))
    assert "accessible to all users" in message
    assert KEY_TEXT not in message


def test_a_key_does_not_go_without_verification(kind, view, tmp_path, key_file):
    message = refusal(kind, view, tmp_path / "root", integrity_key_file=str(key_file), verify="off")
    assert message.startswith("verify: 'off' does not go with integrity_key_file")
    assert "leave one of them out" in message


def test_a_check_of_the_configuration_finds_it_too(kind, tmp_path, key_file):
    config = {"block_bytes": BLOCK, "cpu_bytes_to_use": "1MiB"}
    key_file.write_text("short")
    options = tier(kind, tmp_path / "root", integrity_key_file=str(key_file))
    with pytest.raises(ConfigError, match="has only 5 bytes"):
        TieringOffloadingSpec(config | {"secondary_tiers": [options]})
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("verify", ["when_present", "required"])
def test_with_a_key_fs_requires_a_checksum(tmp_path, key_file, verify):
    options = {"root_dir": str(tmp_path), "model": "m", "integrity_key_file": key_file}
    settings = settings_of(FileSystemTierManager, options | {"verify": verify})
    assert settings.verify is Verify.REQUIRED
    assert settings.integrity_key is not None


@pytest.mark.parametrize("manager", [FileSystemTierManager, SlabTierManager])
def test_no_settings_show_the_key(tmp_path, key_file, manager):
    options = {
        "root_dir": str(tmp_path),
        "model": "m",
        "capacity_bytes": "1MiB",
        "integrity_key_file": str(key_file),
    }
    assert KEY_TEXT not in repr(settings_of(manager, options))


def test_a_tier_with_a_key_serves_what_it_has_stored_and_writes_the_key_nowhere(
    kind, view, tmp_path, key_file, caplog
):
    caplog.set_level(logging.DEBUG)
    root = tmp_path / "root"
    keys = tuple(make_offload_key(bytes([number]) * 32) for number in range(4))
    rows = np.asarray(view)
    for is_load in (False, True):
        rows[:] = 0 if is_load else 7
        manager = SecondaryTierFactory.create_secondary_tier(
            tier(kind, root, integrity_key_file=str(key_file)), view, None
        )
        job = JobMetadata(1, keys, as_block_ids(range(4)), is_load, ReqContext("r"))
        (manager.submit_load if is_load else manager.submit_store)(job)
        assert manager.drain_jobs(30.0)
        (result,) = manager.get_finished_jobs()
        assert result.success
        assert KEY_TEXT not in f"{manager.stats()}{manager.ownership}{vars(manager)}"
        manager.shutdown()
    assert (rows == 7).all()
    del rows
    for path in root.rglob("*"):
        assert not path.is_file() or KEY_TEXT.encode() not in path.read_bytes()
    assert KEY_TEXT not in caplog.text
