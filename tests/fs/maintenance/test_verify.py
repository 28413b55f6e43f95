"""`kvoffload store verify`: how every block is read and checked, whatever happens meanwhile."""

import json
import os

import pytest
from fs.maintenance.stores import has_digest, truncate

from kvoffload_async.tiers.files.ops import FileOps


def test_verify_counts_files_without_a_digest_and_is_content_with_them(store):
    with_digest = [path for path in store.blocks if has_digest(path)]
    for path in with_digest[:7]:
        os.removexattr(path, "user.kvoffload.xxh3")
    found = store.run("verify")["verification"]
    assert found["checked"] == len(store.blocks)
    assert found["verified"] == max(0, len(with_digest) - 7)
    assert found["verified"] + found["without_digest"] == found["checked"]
    assert "without a digest" in store.command.run("store", "verify", store.root).stdout


def test_without_a_manifest_the_usual_length_checks_files_without_a_digest(store):
    (manifest,) = store.root.glob("*/config.json")
    manifest.unlink()
    for path in store.blocks:
        if has_digest(path):
            os.removexattr(path, "user.kvoffload.xxh3")
    truncate(store.blocks[3])
    found = store.run("verify", exit_code=1)["verification"]
    assert [bad["what"] for bad in found["corrupt"]] == [str(store.blocks[3])]
    assert found["corrupt"][0]["reason"] == "1000 bytes instead of 4096"


def test_a_namespace_of_other_ranks_and_engines_is_verified(store):
    """vLLM's manifest says nothing of the length that could be relied on."""
    (manifest,) = store.root.glob("*/config.json")
    manifest.write_text(json.dumps({"model_name": "m", "block_bytes": 5}))
    found = store.run("verify")
    assert (found["model"], found["block_bytes"]) == ("m", None)


def test_verify_names_what_cannot_be_read(store, monkeypatch):
    victim = str(store.blocks[2])
    reading, listed = FileOps.pread_into, FileOps.open
    descriptors = set()

    def open_(self, path, flags):
        if path == str(store.blocks[4]):
            raise PermissionError(13, "Permission denied", path)
        fd = listed(self, path, flags)
        (descriptors.add if path == victim else descriptors.discard)(fd)
        return fd

    def pread_into(self, fd, buffer, offset):
        if fd in descriptors:
            raise OSError(5, "Input/output error")
        return reading(self, fd, buffer, offset)

    monkeypatch.setattr(FileOps, "open", open_)
    monkeypatch.setattr(FileOps, "pread_into", pread_into)
    reasons = {
        bad["what"]: bad["reason"]
        for bad in store.run("verify", exit_code=1)["verification"]["unreadable"]
    }
    assert reasons == {victim: "Input/output error", str(store.blocks[4]): "Permission denied"}
    lines = store.complaints("gc", "--corrupt")
    assert len(lines) == 2


class TestChecker:
    """What happens between the walk and the reading."""

    @pytest.fixture
    def check(self, store, monkeypatch):
        """Verify, with something done to a block's file once it is open."""

        def run(meanwhile, *arguments):
            victim = store.blocks[0]
            get_xattr = FileOps.get_xattr
            num_blocks = len(store.blocks)

            def and_meanwhile(self, fd, name):
                value = get_xattr(self, fd, name)
                if victim.exists() and os.path.samestat(os.fstat(fd), victim.stat()):
                    meanwhile(victim)
                return value

            monkeypatch.setattr(FileOps, "get_xattr", and_meanwhile)
            found = store.run("verify", *arguments)["verification"]
            assert found["checked"] + found["gone"] == num_blocks
            return found

        return run

    def test_a_block_that_is_gone_when_it_is_opened_is_no_problem(self, store, monkeypatch):
        victim = str(store.blocks[0])
        open_ = FileOps.open

        def gone(self, path, flags):
            if path == victim:
                raise FileNotFoundError(path)
            return open_(self, path, flags)

        monkeypatch.setattr(FileOps, "open", gone)
        assert store.run("verify")["verification"]["gone"] == 1

    def test_a_block_that_is_removed_while_it_is_read_is_no_problem(self, check):
        def remove(path):
            truncate(path)
            path.unlink()

        assert check(remove)["gone"] == 1

    def test_a_block_that_is_replaced_while_it_is_read_is_no_problem(self, check):
        def replace(path):
            good = path.with_suffix(".new")
            good.write_bytes(path.read_bytes())
            truncate(path)
            good.rename(path)

        assert check(replace)["gone"] == 1

    def test_a_block_that_shrinks_while_it_is_read_is_corrupt(self, store, monkeypatch):
        fstat = FileOps.fstat
        victim = store.blocks[0].stat()

        def before_it_shrank(self, fd):
            status = fstat(self, fd)
            if os.path.samestat(status, victim):
                os.ftruncate(os.open(f"/proc/self/fd/{fd}", os.O_WRONLY), 100)
            return status

        monkeypatch.setattr(FileOps, "fstat", before_it_shrank)
        (bad,) = store.run("verify", exit_code=1)["verification"]["corrupt"]
        assert bad["reason"] == "ends after 100 bytes"

    @pytest.mark.parametrize("error", [FileNotFoundError("gone"), PermissionError(13, "refused")])
    def test_a_corrupt_block_that_cannot_be_removed(self, store, monkeypatch, error):
        truncate(store.blocks[0])
        victim = str(store.blocks[0])
        unlink = FileOps.unlink

        def refuse(self, path):
            if path == victim:
                raise error
            unlink(self, path)

        monkeypatch.setattr(FileOps, "unlink", refuse)
        failed = isinstance(error, PermissionError)
        collected = store.run("gc", "--corrupt", exit_code=int(failed))
        assert collected["corrupt"] == []
        assert len(collected["failures"]) == failed
