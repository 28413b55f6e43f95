"""Paths of a user: what is there and is not ours is refused, stays, and is not waited for."""

import os
import socket
import stat
import threading

import pytest
from command_line import Command

from kvoffload_async.errors import ConfigError
from kvoffload_async.facade.spec import TieringOffloadingSpec

DEADLINE_S = 60
CONFIG = {"cpu_bytes_to_use": "1MiB", "block_bytes": "4KiB", "model": "m"}
VALKEY = {"type": "valkey", "url": "valkeys://127.0.0.1:1"}
OBJECT = {"type": "object", "url": "s3://bucket"}


def directory(path):
    path.mkdir()
    (path / "precious").write_text("a file of the user")


def pipe(path):
    os.mkfifo(path)


def device(path):
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))  # like /dev/null
    except PermissionError:
        pytest.skip("only root can make a device")


def listener(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def text(path):
    path.write_text("a file of the user\n")


def link(path):
    text(path.with_name("target"))
    path.symlink_to("target")


def nowhere(path):
    path.symlink_to("absent")


def beside(path):
    """Nothing is at the path, but its neighbour is somebody else's."""
    text(path.with_name(f"{path.name}.1"))


def engine(option, tier=None):
    def start(path):
        given = {**(tier or {}), option: str(path)}
        config = {**CONFIG, "secondary_tiers": [given]} if tier else {**CONFIG, **given}
        spec = TieringOffloadingSpec(config)
        try:
            spec.get_manager()
        finally:
            spec.shutdown()

    return option, start


def command(*words):
    def start(path):
        arguments = [str(path) if word is None else word for word in words]
        result = Command(path.parent).run(*arguments)
        if result.exit_code:
            assert "Traceback" not in result.output, result.output
            raise ConfigError(result.stderr)

    return "given", start


FILES = [directory, pipe, device, listener, text, link, nowhere]
SLAB = {"type": "slab", "capacity_bytes": "8MiB"}
KEY = {"type": "fs", "root_dir": "/nonexistent/kv"}
NOT_TEXT = [directory, pipe, device, listener, nowhere]
TABLE = {
    "record_trace": (*engine("record_trace"), [*FILES, beside]),
    "status_socket": (*engine("status_socket"), [directory, pipe, device, text, link]),
    "fs": (*engine("root_dir", {"type": "fs"}), [pipe, device, listener, text, link]),
    "slab": (*engine("root_dir", SLAB), [pipe, device, listener, text, link]),
    "integrity key": (*engine("integrity_key_file", KEY), NOT_TEXT),
    "password": (*engine("password_file", VALKEY), NOT_TEXT),
    "certificates": (*engine("tls_ca_file", OBJECT), [directory, pipe, device, listener, nowhere]),
    "store": (*command("store", "inspect", None), FILES),
    "gc": (*command("store", "gc", None), [pipe, device, listener, text, link]),
    "top": (*command("top", "--json", None), FILES),
    "figures": (*command("replay", "--limit", "1", "--json", None), [directory, listener]),
    "picture": (*command("replay", "--plot", None), [directory]),
    "config": (*command("check-config", None), [directory, device, listener, text, link, nowhere]),
    "trace": (*command("replay", None), [directory, device, listener, text, link, nowhere]),
}


def snapshot(folder):
    def facts(path):
        found = path.lstat()
        content = path.read_text() if stat.S_ISREG(found.st_mode) else ""
        return str(path), found.st_ino, found.st_mode, content

    return sorted(facts(path) for path in folder.rglob("*"))


@pytest.mark.parametrize(
    ("name", "make"),
    [(name, make) for name, (_key, _start, kinds) in TABLE.items() for make in kinds],
)
def test_what_is_not_ours_at_a_given_path_is_refused_and_stays(name, make, tmp_path):
    key, start, _kinds = TABLE[name]
    path = tmp_path / "given"
    make(path)
    before, outcome = snapshot(tmp_path), []

    def attempt():
        try:
            start(path)
        except ConfigError as error:
            outcome.append(str(error))

    attempt_ends = threading.Thread(target=attempt, daemon=True)
    attempt_ends.start()
    attempt_ends.join(DEADLINE_S)
    assert not attempt_ends.is_alive(), "it waits for somebody"
    assert outcome, "it was accepted"
    assert key in outcome[0]
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("name", ["record_trace", "status_socket", "integrity key", "password"])
def test_a_path_without_its_folder_is_refused_with_the_key(name, tmp_path):
    key, start, _kinds = TABLE[name]
    with pytest.raises(ConfigError, match=f"{key}: .*No such file"):
        start(tmp_path / "absent" / "given")
    assert list(tmp_path.iterdir()) == []
