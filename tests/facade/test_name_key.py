"""The option `name_key_file` of every tier."""

import hashlib
import logging
import sys
import threading

import numpy as np
import pytest
from sealed_names import TEXT, found_in, key_file

from kvoffload_async import ConfigError, SecondaryTierFactory
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.testing.harness import content_of
from kvoffload_async.tiers._sealed_names import NameKeys
from kvoffload_async.types import (
    JobMetadata,
    LookupResult,
    ReqContext,
    as_block_ids,
    make_offload_key,
)

BLOCK = 4096
OPTIONS = {
    "fs": lambda root: {"root_dir": root},
    "slab": lambda root: {"root_dir": root, "capacity_bytes": "16MiB"},
    "object": lambda root: {"url": f"file://{root}"},
}


@pytest.fixture(params=sorted(OPTIONS))
def kind(request):
    return request.param


@pytest.fixture
def view():
    buffer = PrimaryBuffer(256, BLOCK)
    yield buffer.view
    assert buffer.release()


def create(kind, root, view, **options):
    config = {"type": kind, "model": "m", **OPTIONS[kind](str(root)), **options}
    return SecondaryTierFactory.create_secondary_tier(config, view, None)


def run(manager, keys, *, is_promotion, job_id):
    job = JobMetadata(
        job_id, tuple(keys), as_block_ids(range(len(keys))), is_promotion, ReqContext("r")
    )
    (manager.submit_load if is_promotion else manager.submit_store)(job)
    assert manager.drain_jobs()
    return list(manager.get_finished_jobs())


def test_files_and_logs_of_1000_prompts_tell_neither_keys_nor_hashes(kind, view, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    root, path = tmp_path / "root", key_file(tmp_path)
    root.mkdir()
    keys = [make_offload_key(hashlib.sha256(b"prompt %d" % i).digest()) for i in range(1000)]
    manager = create(kind, root, view, name_key_file=path)
    for number, first in enumerate(range(0, 1000, 250)):
        (result,) = run(manager, keys[first : first + 250], is_promotion=False, job_id=number)
        assert result.success
    (result,) = run(manager, keys[:250], is_promotion=True, job_id=9)
    assert result.success
    assert manager.shutdown().is_clean
    told = caplog.text.encode() + b"".join(
        str(file).encode() + (file.read_bytes() if file.is_file() else b"")
        for file in sorted(root.rglob("*"))
    )
    assert not found_in(told, [*keys, *(key.hex().encode() for key in keys)])
    assert TEXT.encode() not in told
    assert found_in(told + keys[7], keys) == [keys[7]]
    again = create(kind, root, view, name_key_file=[path])
    (result,) = run(again, keys[750:], is_promotion=True, job_id=1)
    assert result.success
    assert again.shutdown().is_clean
    without = create(kind, root, view)
    (result,) = run(without, keys[:4], is_promotion=True, job_id=1)
    assert not result.success
    assert without.shutdown().is_clean


def test_an_object_store_with_both_keys_has_nothing_of_1000_prompts(view, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    root = tmp_path / "root"
    root.mkdir()
    keys = [make_offload_key(hashlib.sha256(b"prompt %d" % i).digest()) for i in range(1000)]
    given = {
        "name_key_file": key_file(tmp_path),
        "encryption_key_file": [key_file(tmp_path, "a secret to encrypt blocks with")],
    }
    manager = create("object", root, view, **given)
    rows = np.asarray(view)
    contents = [content_of(key, BLOCK) for key in keys]
    for number, first in enumerate(range(0, 1000, 250)):
        rows[:250] = contents[first : first + 250]
        (result,) = run(manager, keys[first : first + 250], is_promotion=False, job_id=number)
        assert result.success
    rows[:] = 0
    (result,) = run(manager, keys[:250], is_promotion=True, job_id=9)
    assert result.success
    assert all(np.array_equal(rows[i], contents[i]) for i in range(250))
    assert manager.shutdown().is_clean
    del rows
    told = caplog.text.encode() + b"".join(
        str(file).encode() + (file.read_bytes() if file.is_file() else b"")
        for file in sorted(root.rglob("*"))
    )
    assert not found_in(told, [*keys, *(key.hex().encode() for key in keys)])
    assert not found_in(told, [content.tobytes() for content in contents])


def test_the_owners_thread_seals_and_opens_nothing(kind, view, tmp_path, monkeypatch):
    threads = set()

    def recorded(method):
        def record(names, *arguments):
            threads.add(threading.get_ident())
            return method(names, *arguments)

        return record

    for name in ("_seal", "_open"):
        monkeypatch.setattr(NameKeys, name, recorded(getattr(NameKeys, name)))
    root = tmp_path / "root"
    root.mkdir()
    for number in (0, 1):
        keys = [make_offload_key(hashlib.sha256(b"%d" % i).digest()) for i in range(200)]
        manager = create(kind, root, view, name_key_file=key_file(tmp_path))
        request = ReqContext("r")
        manager.on_new_request(request)
        found = {manager.lookup(key, request) for key in keys}
        manager.on_schedule_end()
        assert LookupResult.HIT not in found or number
        run(manager, keys, is_promotion=False, job_id=1)
        run(manager, keys, is_promotion=True, job_id=2)
        manager.touch(keys, request)
        manager.poll_tier()
        assert manager.shutdown().is_clean
    assert threads
    assert threading.get_ident() not in threads


def test_an_encryption_key_does_not_go_with_an_integrity_key(view, tmp_path):
    files = {f"{name}_key_file": key_file(tmp_path) for name in ("integrity", "encryption")}
    with pytest.raises(ConfigError, match=r"^integrity_key_file: does not go with encryption_key"):
        create("object", tmp_path / "root", view, **files)
    with pytest.raises(ConfigError, match=r"'verify'"):
        create("object", tmp_path / "root", view, verify="off")
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("value", [TEXT, "", 7, [], ["/a"] * 5, [7]])
def test_what_is_no_list_of_paths_is_refused_and_not_shown(kind, view, tmp_path, value):
    with pytest.raises(ConfigError, match=r"^name_key_file: ") as raised:
        create(kind, tmp_path / "root", view, name_key_file=value)
    assert TEXT not in str(raised.value)
    assert not (tmp_path / "root").exists(), "nothing is touched before everything is checked"


def test_files_that_everybody_may_read_or_that_are_too_short_are_refused(kind, view, tmp_path):
    for text, mode, why in (("x" * 32, 0o644, "accessible to all users"), ("x", 0o600, "only 1")):
        path = tmp_path / "key"
        path.write_text(text)
        path.chmod(mode)
        with pytest.raises(ConfigError, match=f"^name_key_file: .*{why}"):
            create(kind, tmp_path / "root", view, name_key_file=str(path))
    assert not (tmp_path / "root").exists()


def test_a_directory_that_vllm_shares_has_no_sealed_names(view, tmp_path):
    with pytest.raises(ConfigError, match=r"^trust_vllm_directory: does not go with name_key_file"):
        create(
            "fs",
            tmp_path / "root",
            view,
            name_key_file=key_file(tmp_path),
            trust_vllm_directory=True,
        )


def test_without_the_library_the_extra_is_named(kind, view, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(ConfigError, match=r"^name_key_file: needs .*kvoffload-async\[encryption\]"):
        create(kind, tmp_path / "root", view, name_key_file=key_file(tmp_path))
