"""The native engine without Python: its tests in C, compiled with what this machine has."""

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

from kvoffload_async.block_io import build

TESTS = Path(__file__).parents[1] / "native"
NATIVE = Path(build.__file__).with_name("native")

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="there is no C compiler"
)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    target = tmp_path_factory.mktemp("native") / "test_engine"
    sources = [NATIVE / f"{name}.c" for name in ("pool", "blocks", "sealing")]
    sources += TESTS.glob("*.c")
    command = [*build.compiler(), *build.FLAGS, "-O1", f"-I{NATIVE}", *map(str, sources)]
    subprocess.run([*command, "-o", str(target)], check=True)
    return target


@pytest.mark.parametrize("arguments", [("unit",), ("old-kernel",), ("fuzz", "20", "1")])
def test_the_engine_without_python(program, arguments):
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "passed" in done.stdout


# -- building --------------------------------------------------------------------------------------


@pytest.fixture
def _no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)


def loaded(path):
    spec = importlib.util.spec_from_file_location("_native", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_built_can_be_imported(monkeypatch, tmp_path):
    monkeypatch.setenv("KVOFFLOAD_NATIVE", "require")
    assert build.build_if_wanted(tmp_path / build.FILE_NAME)
    assert loaded(tmp_path / build.FILE_NAME).Engine
    assert list(tmp_path.iterdir()) == [tmp_path / build.FILE_NAME]


@pytest.mark.usefixtures("_no_compiler")
def test_without_a_compiler_the_module_is_left_out_and_that_is_said(capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("KVOFFLOAD_NATIVE", raising=False)
    assert not build.build_if_wanted(tmp_path / build.FILE_NAME)
    assert "there is no C compiler; install gcc or clang, or set CC" in capsys.readouterr().err


@pytest.mark.usefixtures("_no_compiler")
def test_without_a_compiler_a_module_that_is_required_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("KVOFFLOAD_NATIVE", "require")
    with pytest.raises(build.UnavailableError, match="there is no C compiler"):
        build.build_if_wanted(tmp_path / build.FILE_NAME)


def test_the_environment_can_leave_the_module_out(monkeypatch, tmp_path):
    monkeypatch.setenv("KVOFFLOAD_NATIVE", "0")
    assert not build.build_if_wanted(tmp_path / build.FILE_NAME)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("KVOFFLOAD_NATIVE", "yes", "KVOFFLOAD_NATIVE='yes': give 0, require, or nothing"),
        ("CC", "no-such-compiler", "did not run: .*no-such-compiler"),
        ("CC", "false", "failed:"),
        ("CC", "cc '", 'CC="cc \'": No closing quotation'),
    ],
)
def test_what_the_environment_says_wrongly(monkeypatch, tmp_path, variable, value, words):
    monkeypatch.setenv("KVOFFLOAD_NATIVE", "require")
    monkeypatch.setenv(variable, value)
    with pytest.raises(build.UnavailableError, match=words):
        build.build_if_wanted(tmp_path / build.FILE_NAME)
    assert list(tmp_path.iterdir()) == []


def test_without_the_headers_of_python_the_module_cannot_be_built(monkeypatch, tmp_path):
    monkeypatch.setattr(build.sysconfig, "get_path", lambda name: f"/no/such/{name}")
    with pytest.raises(build.UnavailableError, match=r"no Python.h in /no/such/include; install"):
        build.build(tmp_path / build.FILE_NAME)
