"""`kvoffload store` on an object store: here a directory, whose objects can be made old."""

import json
import os
from pathlib import Path

import obstore
import pytest
from remote.object.tiers import damage, names_in, set_environment, tier_on
from remote.tampering import KEYS
from servers import seaweedfs
from typer.testing import CliRunner

from kvoffload_async.cli.app import app
from kvoffload_async.testing import TierHarness
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.files.digests import IntegrityKey
from kvoffload_async.tiers.object.client import key_of_name, name_of, renewal_name_of
from kvoffload_async.tiers.object.maintenance import ObjectJudge
from kvoffload_async.tiers.object.tier import ObjectOptions

K = [key_of(number) for number in range(10)]
BLOCK_BYTES = 4096
VALUE_BYTES = BLOCK_BYTES + 128


class Store:
    """A directory with blocks, and the command on it."""

    def __init__(self, folder, **options):
        self.folder = folder
        self.connection = ObjectOptions(url=f"file://{folder}")
        with TierHarness(tier_on(self.connection, **options)) as harness:
            assert harness.store(K) == {}
            self.namespace = harness.tier._client._namespace

    def run(self, *arguments):
        done = CliRunner().invoke(
            app, ["store", arguments[0], self.connection.url, "--json", *arguments[1:]]
        )
        figures = json.loads(done.stdout) if done.stdout.startswith("{") else {}
        (namespace,) = figures.get("object_namespaces", [{}])
        return done.exit_code, namespace, done.stderr

    def path(self, name):
        return self.folder / name

    def add(self, name, content=b"?", *, age_s=0.0):
        obstore.put(self.connection.open(), name, content)
        self.age(name, age_s)

    def age(self, name, age_s):
        path = self.path(name)
        now_s = path.stat().st_mtime
        os.utime(path, (now_s - age_s, now_s - age_s))

    def names(self):
        return {name for name in names_in(self.connection) if not name.endswith(".json")}


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "blocks")


def test_names_say_which_block_it_is(store):
    assert {key_of_name(name, store.namespace) for name in store.names()} == set(K)
    name = name_of(store.namespace, K[0])
    for other in (name[:-1], name + "9" * 10, name.replace("_g", "0_g"), "x", f"{name}/x"):
        assert key_of_name(other, store.namespace) is None


def test_inspect_counts_blocks_bytes_ages_and_what_is_unknown(store):
    store.add(f"{store.namespace}/notes.txt", b"12345")
    store.age(name_of(store.namespace, K[3]), 5000.0)
    status, found, _ = store.run("inspect")
    assert status == 0
    assert found["objects"] == 10
    assert found["object_bytes"] == 10 * VALUE_BYTES
    assert (found["unknown_files"], found["unknown_file_bytes"]) == (1, 5)
    assert 5000 <= found["oldest_s"] < 5100


@pytest.mark.parametrize(
    ("content", "model"),
    [
        (None, "unknown"),
        (b'{"model": "org/a"}', "org/a"),
        (b'{"model": 5}', "unknown"),
        (b"[]", "unknown"),
        (b"\xff", "unknown"),
        (b"[" * 100_000, "unknown"),
    ],
)
def test_inspect_names_the_model_if_its_description_is_readable(store, content, model):
    description = store.path(f"{store.namespace}.json")
    description.unlink()
    if content is not None:
        description.write_bytes(content)
    assert store.run("inspect")[1]["model"] == (None if model == "unknown" else model)
    done = CliRunner().invoke(app, ["store", "inspect", store.connection.url])
    assert model in done.stdout


def test_verify_names_the_corrupt_blocks_and_changes_nothing(store):
    damage(store.connection, K[2])
    store.add(name_of(store.namespace, K[4]), b"short")
    before = store.names()
    status, found, said = store.run("verify")
    assert status == 1
    assert found["verification"]["verified"] == 8
    assert found["verification"]["corrupt_blocks"] == 2
    assert name_of(store.namespace, K[2]) in said
    assert store.names() == before


def test_a_newer_block_is_no_fault(store):
    path = store.path(name_of(store.namespace, K[0]))
    path.write_bytes(b"KVOB\x09\0" + path.read_bytes()[6:])
    status, found, _ = store.run("verify")
    assert status == 0
    assert found["verification"]["newer"] == 1


def test_blocks_with_an_integrity_key_are_verified_with_it(tmp_path):
    store = Store(tmp_path / "blocks", integrity_key=IntegrityKey(b"k" * 32))
    key_file = tmp_path / "key"
    key_file.write_bytes(b"k" * 32)
    key_file.chmod(0o600)
    assert store.run("verify")[1]["verification"]["other_key"] == 10
    _, found, _ = store.run("verify", "--integrity-key-file", str(key_file))
    assert found["verification"]["verified"] == 10


def test_encrypted_blocks_are_of_another_key_and_stay(tmp_path):
    store = Store(tmp_path / "blocks", encryption_keys=KEYS[:1])
    before = store.names()
    status, found, _ = store.run("verify")
    assert (status, found["verification"]["other_key"]) == (0, 10)
    assert store.run("inspect")[1]["objects"] == 10
    store.run("gc", "--corrupt")
    assert store.names() == before
    path = store.path(name_of(store.namespace, K[0]))
    path.write_bytes(path.read_bytes()[:99])
    assert store.run("verify")[1]["verification"]["corrupt_blocks"] == 1


def test_a_block_that_verifies_elsewhere_is_none_of_a_namespace_with_an_integrity_key(
    store, tmp_path
):
    keyed = Store(tmp_path / "keyed", integrity_key=IntegrityKey(b"k" * 32))
    forged = store.path(name_of(store.namespace, K[0])).read_bytes()
    keyed.path(name_of(keyed.namespace, K[0])).write_bytes(forged)
    status, found, said = keyed.run("verify")
    assert status == 1
    assert found["verification"]["verified"] == 0
    assert found["verification"]["corrupt_blocks"] == 1
    assert name_of(keyed.namespace, K[0]) in said


@pytest.mark.parametrize("at", [6, 7, 56, 63, 127])
def test_a_header_of_which_any_bit_is_another_one_is_corrupt(store, at):
    path = store.path(name_of(store.namespace, K[0]))
    value = bytearray(path.read_bytes())
    value[at] ^= 2
    path.write_bytes(value)
    assert store.run("verify")[1]["verification"]["corrupt_blocks"] == 1


def test_an_object_that_is_larger_than_any_block_is_not_read(store):
    os.truncate(store.path(name_of(store.namespace, K[0])), (1 << 30) + 1)  # takes no space
    status, found, said = store.run("verify")
    assert (status, found["verification"]["verified"]) == (1, 9)
    assert "1073741825 bytes exceed the read limit" in said


def test_a_verification_holds_a_part_of_each_object_alone(store, monkeypatch):
    parts = []
    take = ObjectJudge.take

    def watched(judge, part):
        parts.append(len(part))
        return take(judge, part)

    monkeypatch.setattr(ObjectJudge, "take", watched)
    for key in K[:2]:
        with Path(store.path(name_of(store.namespace, key))).open("r+b") as file:
            file.truncate(100 << 20)  # takes no space
    status, found, said = store.run("verify")
    assert (status, found["verification"]["verified"]) == (1, 8)
    assert said.count("104857600 bytes") == 2
    assert len(parts) >= 2 * 10 + 8
    assert max(parts) <= 16 << 20


def test_gc_removes_what_is_too_old(store):
    for key in K[:4]:
        store.age(name_of(store.namespace, key), 5000.0)
    status, found, _ = store.run("gc", "--max-age", "3600", "--dry-run")
    assert (status, found["expired_objects"], len(store.names())) == (0, 4, 10)
    status, found, _ = store.run("gc", "--max-age", "3600")
    assert (found["expired_objects"], found["freed_bytes"]) == (4, 4 * VALUE_BYTES)
    assert store.names() == {name_of(store.namespace, key) for key in K[4:]}


def test_gc_keeps_the_newest_of_what_is_too_much(store):
    for age, key in enumerate(K):
        store.age(name_of(store.namespace, key), 1000.0 * age)
    _, found, _ = store.run("gc", "--keep", str(4 * VALUE_BYTES + 100))
    assert found["surplus_objects"] == 6
    assert store.names() == {name_of(store.namespace, key) for key in K[:4]}
    assert store.run("gc", "--keep", "1GiB")[1]["surplus_objects"] == 0


def test_blocks_of_a_server_whose_clock_is_ahead_count_as_new(store):
    for key in K[:4]:
        store.age(name_of(store.namespace, key), -7200.0)
    assert store.run("inspect")[1]["oldest_s"] < 100
    assert store.run("gc", "--max-age", "3600")[1]["expired_objects"] == 0
    assert len(store.names()) == len(K)


def test_gc_removes_corrupt_and_unknown_objects_on_demand(store):
    damage(store.connection, K[2])
    store.add(f"{store.namespace}/notes.txt", age_s=9000.0)
    store.add(f"{store.namespace}/new.txt")
    assert store.run("gc")[1]["freed_bytes"] == 0
    _, found, _ = store.run("gc", "--corrupt", "--unknown-files")
    assert (found["corrupt_objects"], found["unknown_files"]) == (1, 1)
    assert len(store.names()) == 10


def test_gc_removes_copies_that_a_renewal_has_left(store):
    copy = renewal_name_of(store.namespace, K[0])
    store.add(copy, age_s=9000.0)
    assert store.run("gc")[1]["unknown_files"] == 1
    assert copy not in store.names()


def test_an_empty_object_is_no_block_and_goes_after_an_hour(store):
    emptied = name_of(store.namespace, K[0])
    store.add(emptied, b"")
    status, figures, _ = store.run("verify")
    assert (status, figures["verification"]["corrupt"]) == (0, [])
    store.run("gc")
    assert emptied in store.names()
    store.age(emptied, 9000.0)
    assert store.run("gc")[1]["unknown_files"] == 1
    assert emptied not in store.names()


@pytest.mark.parametrize("option", ["--max-age=5", "--keep=5"])
def test_bounds_are_for_object_stores_alone(tmp_path, option):
    (tmp_path / "m_0123456789ab_r0").mkdir()
    done = CliRunner().invoke(app, ["store", "gc", str(tmp_path), option])
    assert done.exit_code == 2
    assert "bound a fs store by its tier's capacity_bytes" in done.stderr


@pytest.mark.parametrize("command", ["verify", "gc"])
def test_what_is_not_listed_in_order_is_not_resumed(store, tmp_path, command):
    status, _, said = store.run(command, "--after", "x")
    assert status == 2
    assert "omit --after" in said
    (tmp_path / "m_0123456789ab_r0").mkdir()
    done = CliRunner().invoke(app, ["store", command, str(tmp_path), "--after", "x"])
    assert done.exit_code == 2
    assert "--after is for object stores" in done.stderr


@pytest.mark.parametrize("url", ["file:///not/there/x", "s3://bucket", "ftp://host/x"])
def test_a_url_without_a_store_is_one_line(url, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AK")
    done = CliRunner().invoke(app, ["store", "inspect", url])
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert not Path("/not").exists()
    assert "s3cret" not in done.stderr


@pytest.mark.servers
def test_a_store_on_s3_is_verified_with_what_the_environment_says(server, prefix, monkeypatch):
    connection = server.connection(prefix)
    with TierHarness(tier_on(connection)) as harness:
        harness.store(K)
    set_environment(monkeypatch, connection)
    url = f"s3://{seaweedfs.BUCKET}/{prefix}"
    done = CliRunner().invoke(app, ["store", "verify", url, "--json"])
    assert done.exit_code == 0
    (found,) = json.loads(done.stdout)["object_namespaces"]
    assert found["verification"]["verified"] == 10
    assert seaweedfs.SECRET_ACCESS_KEY not in done.output
