"""Without vLLM its integration can be imported, and says what it lacks when it is used."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import kvoffload_async.integrations.vllm as integration
from kvoffload_async.integrations.vllm.version import CONTRACT

ROOT = Path(__file__).parents[2]
NAMES = ["FsTier", "HostTieringOffloadingSpec", "KVOffloadConnector", "KVOffloadSpec", "SlabTier"]


@pytest.fixture
def no_vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_listed_and_asks_for_vllm_only_when_it_is_used(no_vllm, name):
    assert name in dir(integration)
    with pytest.raises(ImportError, match=rf"\.{name} needs vLLM >=0\.32,<0\.34.*not installed"):
        getattr(integration, name)


def test_from_import_names_the_range_too(no_vllm):
    with pytest.raises(ImportError, match=r">=0\.32,<0\.34"):
        from kvoffload_async.integrations.vllm import FsTier  # noqa: F401 - it is not there


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'FileTier'"):
        _ = integration.FileTier


def test_a_folder_that_is_called_vllm_is_no_vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    with pytest.raises(ImportError, match="not installed"):
        CONTRACT.require("x")


def test_a_vllm_of_another_version_is_refused(monkeypatch):
    module = ModuleType("vllm")
    module.__version__ = "0.31.2"
    monkeypatch.setitem(sys.modules, "vllm", module)
    with pytest.raises(ImportError, match=r"needs vLLM >=0\.32,<0\.34, and 0\.31\.2 is installed"):
        CONTRACT.require("x")


def test_a_vllm_that_fails_by_itself_says_why(monkeypatch, tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("import a_module_that_it_needs")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    importlib.invalidate_caches()
    with pytest.raises(ModuleNotFoundError, match="a_module_that_it_needs"):
        CONTRACT.require("x")


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.33.0", "0.33.1.dev7+gabc", "0.33"])
def test_a_supported_version_is_accepted(version):
    CONTRACT.check(version, "x")


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.32.0", "0.3", "dev", ""])
def test_any_other_version_is_refused(version):
    with pytest.raises(ImportError, match=r">=0\.32,<0\.34"):
        CONTRACT.check(version, "x")


def test_the_extra_asks_for_the_supported_range():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["vllm"] == [f"vllm{CONTRACT.supported}"]


def test_importing_the_package_or_its_integrations_imports_no_vllm():
    code = (
        "import sys; sys.modules['vllm'] = None\n"
        "import kvoffload_async, kvoffload_async.integrations.vllm as v\n"
        "dir(v); assert not [n for n in sys.modules if n.startswith('vllm.')]"
    )
    subprocess.run([sys.executable, "-I", "-c", code], check=True, timeout=60)
