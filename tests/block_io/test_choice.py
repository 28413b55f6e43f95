"""Which implementation moves bytes, and what is said of it."""

import asyncio
import errno
import importlib
import os
import ssl
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import uvloop
from block_io.worlds import DIGESTER, is_built
from faulty_files import FaultyFileOps

from kvoffload_async.block_io import choice, hashes, native_io
from kvoffload_async.block_io.choice import create_block_io, implementation
from kvoffload_async.errors import ConfigError, TierUnavailableError
from kvoffload_async.testing.fakes import VirtualLoop
from kvoffload_async.tiers.files.digests import IntegrityKey, KeyedDigester
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.files.sealing import EncryptionKey
from kvoffload_async.tiers.slab.encryption import BlockCipher

native = pytest.mark.skipif(not is_built(), reason="the native module is not built")


@pytest.fixture(autouse=True)
def _asked_anew(monkeypatch):
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    choice._obstacle.cache_clear()
    choice._log_choice.cache_clear()
    choice._cipher_obstacle.cache_clear()
    choice._log_python_encryption.cache_clear()
    yield
    choice._obstacle.cache_clear()
    choice._cipher_obstacle.cache_clear()


@pytest.fixture
def unbuilt(monkeypatch):
    """There is no native module."""
    import_module = importlib.import_module

    def import_other(name):
        if name.endswith("_native"):
            raise ImportError(f"No module named {name!r}")
        return import_module(name)

    monkeypatch.setattr(choice.importlib, "import_module", import_other)


@native
def test_the_native_one_is_used_where_it_is_built(monkeypatch):
    assert str(implementation()) == "native"
    monkeypatch.setenv(choice.VARIABLE, "require")
    assert implementation() == ("native", "")


def test_the_environment_switches_it_off(monkeypatch):
    monkeypatch.setenv(choice.VARIABLE, "0")
    assert str(implementation()) == "python (KVOFFLOAD_NATIVE=0)"


def test_another_value_of_the_environment_is_an_error(monkeypatch):
    monkeypatch.setenv(choice.VARIABLE, "yes")
    with pytest.raises(ConfigError, match=r"KVOFFLOAD_NATIVE: 'yes' .* 0, require"):
        implementation()


@pytest.mark.usefixtures("unbuilt")
def test_where_it_is_not_built_python_moves_the_blocks_and_says_why(monkeypatch):
    chosen = implementation()
    assert chosen.name == "python"
    assert "was not built" in chosen.why
    assert "install a C compiler" in chosen.why
    monkeypatch.setenv(choice.VARIABLE, "require")
    with pytest.raises(ConfigError, match=r"required, but it was not built .* C compiler"):
        implementation()


@native
def test_a_module_of_other_sources_is_not_used_and_the_remedy_builds_it(monkeypatch):
    monkeypatch.setattr(choice.build, "source_digest", lambda: "of newer sources")
    why = implementation().why
    assert why.startswith("it was built from other sources; run ")
    assert why.endswith("build.py")
    monkeypatch.setenv(choice.VARIABLE, "require")
    with pytest.raises(ConfigError, match="built from other sources"):
        implementation()


@native
@pytest.mark.parametrize("missing", ["XXH3_freeState", "no spec"])
def test_without_a_function_of_xxhash_it_cannot_be_used(monkeypatch, missing):
    if missing == "no spec":
        monkeypatch.setattr(hashes.importlib.util, "find_spec", lambda name: None)
    else:
        monkeypatch.setattr(hashes, "_NAMES", (*hashes._NAMES[:-1], f"{missing}_"))
    assert "does not work with the xxhash package" in implementation().why


@native
def test_functions_that_compute_something_else_are_found_out(monkeypatch):
    names = list(hashes._NAMES)
    names[0] = "XXH3_64bits_reset_withSeed"
    names[0] = "XXH32_createState"  # takes no argument, and returns no hash
    monkeypatch.setattr(hashes, "_NAMES", tuple(names))
    assert "do not compute XXH3" in implementation().why


SHORT_OF_DESCRIPTORS = r"""
import os, resource
from kvoffload_async.block_io import choice
from kvoffload_async.errors import ConfigError

def look():
    try:
        return str(choice.implementation())
    except ConfigError as error:
        return str(error)

_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
limit = os.dup(0)  # descriptors below it are used
for spare in range(30):
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit + spare, most))
        first = look()
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        os.write(1, f"{first}|{look()}\n".encode())
        os._exit(0)
    os.waitpid(child, 0)
"""


@native
@pytest.mark.parametrize("variable", ["", "require"])
def test_a_shortage_of_descriptors_is_named_and_not_remembered(variable):
    done = subprocess.run(
        [sys.executable, "-c", SHORT_OF_DESCRIPTORS],
        capture_output=True,
        text=True,
        env=os.environ | {choice.VARIABLE: variable},
        timeout=120,
        check=True,
    )
    looks = [line.split("|") for line in done.stdout.splitlines()]
    assert len(looks) == 30, done.stderr
    assert {second for _, second in looks} == {"native"}
    short = [first for first, _ in looks if first != "native"]
    assert 2 < len(short) < 30, "each step of the check is tried, and the whole check"
    assert all("Too many open files" in first and "ulimit -n" in first for first in short)
    assert not any("xxhash package" in first or "not built" in first for first in short)
    if variable:
        assert all(first.startswith("KVOFFLOAD_NATIVE: the native mod") for first in short)
    else:
        assert all(first.startswith("python (its check needs more res") for first in short)


@native
@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (OSError(errno.ENFILE, "table"), "fs.file-max"),
        (OSError(errno.EAGAIN, "threads"), "ulimit -u"),
        (MemoryError(), "more memory"),
        (ImportError("_native.so: cannot open: Too many open files"), "ulimit -n"),
        (OSError("_xxhash.so: failed to map segment: Cannot allocate memory"), "more memory"),
    ],
)
def test_any_shortage_is_named_with_its_remedy(monkeypatch, error, remedy):
    def fail():
        raise error

    monkeypatch.delenv("KVOFFLOAD_NATIVE", raising=False)
    with monkeypatch.context() as shortage:
        shortage.setattr(choice, "addresses", fail)
        for _ in range(2):
            chosen = implementation()
            assert chosen.name == "python"
            assert remedy in chosen.why
            assert "xxhash package" not in chosen.why
    assert implementation().name == "native"


@native
def test_threads_that_cannot_be_started_are_an_error_of_the_tier_with_a_remedy(monkeypatch):
    assert implementation().name == "native"

    def fail(*_arguments):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(native_io, "open_engine", fail)
    with pytest.raises(TierUnavailableError, match=r"2 native threads cannot.*ulimit -u"):
        created()


def created(
    digests=DIGESTER,
    calls=None,
    *,
    row_bytes=4096,
    slot_bytes=4096,
    new_loop=asyncio.new_event_loop,
    **options,
):
    """Return which class is used in an environment."""

    async def create():
        rows = np.zeros((4, row_bytes), dtype=np.uint8)
        calls_or_system = calls or FileOps()
        env = SimpleNamespace(io=InlineIo(), kv_view=memoryview(rows))
        made = create_block_io(
            env,
            calls_or_system,
            digests,
            slot_bytes=slot_bytes,
            threads=2,
            piece_bytes=1 << 20,
            is_system=calls is None,
            **options,
        )
        await made.close()
        env.kv_view.release()
        return made.name

    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(create())


class InlineIo:
    async def run(self, direction, call, **_options):
        return call()


@native
def test_an_integrity_key_and_rows_that_are_not_aligned_for_direct_io_need_python():
    assert created() == created(calls=FaultyFileOps()) == "native"
    key = IntegrityKey(bytes(32))
    assert created(KeyedDigester("layout", key)) == "python"
    assert created(row_bytes=4000, is_direct=True) == "python"
    assert created(row_bytes=4000) == "native"


def encrypting() -> BlockCipher:
    return BlockCipher("layout", (EncryptionKey(bytes(32)),))


@native
def test_native_code_encrypts_where_the_interpreter_has_loaded_openssl(caplog):
    assert created(encrypting(), slot_bytes=8192) == "native"
    assert created(encrypting(), slot_bytes=8192, is_direct=True) == "python"
    assert "OpenSSL" not in caplog.text


@native
@pytest.mark.parametrize("missing", ["linked statically", "HMAC", "other functions"])
def test_python_encrypts_where_openssl_is_not_found_and_that_is_logged_once(
    missing, monkeypatch, caplog
):
    if missing == "linked statically":
        no_file = importlib.machinery.ModuleSpec("_hashlib", None, origin="built-in")
        find_spec = importlib.util.find_spec
        monkeypatch.setattr(
            hashes.importlib.util,
            "find_spec",
            lambda name: no_file if name == "_hashlib" else find_spec(name),
        )
    elif missing == "HMAC":
        monkeypatch.setattr(hashes, "_CIPHER_NAMES", (*hashes._CIPHER_NAMES[:-1], "HMAC_"))
    else:
        names = [name.replace("256_gcm", "128_gcm") for name in hashes._CIPHER_NAMES]
        monkeypatch.setattr(hashes, "_CIPHER_NAMES", tuple(names))
    for _ in range(2):
        assert created(encrypting(), slot_bytes=8192) == "python"
    assert created() == "native"
    assert caplog.text.count("Python threads encrypt, which is slower") == 1


def test_the_version_of_openssl_is_that_of_the_interpreter():
    assert hashes.openssl_version() == ssl.OPENSSL_VERSION_INFO[:2]


@native
@pytest.mark.parametrize(
    ("version", "row_bytes", "expected"),
    [
        ((1, 1), 256 << 10, "python"),
        ((3, 0), 256 << 10, "python"),
        ((3, 0), 252 << 10, "native"),
        ((3, 1), 1 << 20, "native"),
    ],
)
def test_an_old_openssl_encrypts_no_large_blocks(version, row_bytes, expected, monkeypatch):
    monkeypatch.setattr(choice, "openssl_version", lambda: version)
    sizes = {"row_bytes": row_bytes, "slot_bytes": row_bytes + 4096}
    assert created(encrypting(), **sizes) == expected
    assert created(**sizes) == "native"


@native
def test_a_shortage_in_the_check_of_openssl_is_not_remembered(monkeypatch):
    def fail():
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as shortage:
        shortage.setattr(choice, "cipher_addresses", fail)
        assert created(encrypting(), slot_bytes=8192) == "python"
    assert created(encrypting(), slot_bytes=8192) == "native"


def test_on_a_loop_that_watches_no_descriptors_python_moves_blocks():
    assert created(new_loop=VirtualLoop) == "python"


@native
def test_on_uvloop_native_code_moves_blocks():
    assert created(new_loop=uvloop.new_event_loop) == "native"


@pytest.mark.usefixtures("unbuilt")
def test_what_is_missing_is_told_once(caplog):
    assert created() == created() == "python"
    assert caplog.text.count("block I/O is python (it was not built") == 1


def test_where_it_is_switched_off_that_is_no_warning(caplog, monkeypatch):
    monkeypatch.setenv(choice.VARIABLE, "0")
    assert created() == "python"
    assert not caplog.text


def test_the_command_says_which(command):
    result = command.run("--version")
    assert result.exit_code == 0
    assert f"block I/O: {implementation()}" in result.stdout


def test_the_command_says_what_is_wrong_with_the_environment(command, monkeypatch):
    monkeypatch.setenv(choice.VARIABLE, "2")
    result = command.run("--version")
    assert result.exit_code == 2
    assert "KVOFFLOAD_NATIVE: '2'" in result.stderr
