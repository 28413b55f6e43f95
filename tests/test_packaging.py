"""What the package's metadata says: its dependencies, its links, and whom to ask."""

import ast
import importlib.util
import io
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import kvoffload_async

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
FOR_DEVELOPERS = {"dev", "docs", "test"}
MODULES = {
    "mooncake-transfer-engine-non-cuda": "mooncake",
    "opentelemetry-api": "opentelemetry",
    "prometheus-client": "prometheus_client",
    "pyyaml": "yaml",
}
"""Distribution -> its module, where they are not called the same."""
NOT_DECLARED = {
    "huggingface_hub",  # comes with vLLM
    "lmcache",  # loads the package, like SGLang
    "sglang",
    "typing_extensions",  # for type checkers alone
}


def modules_of(extras):
    """Return the modules of what these extras and the package itself require, but for the own."""
    required = [*PROJECT["dependencies"], *(line for extra in extras for line in EXTRAS[extra])]
    names = {canonicalize_name(Requirement(line).name) for line in required}
    return {MODULES.get(name, name) for name in names - {canonicalize_name(PROJECT["name"])}}


def imported():
    """Return the third-party modules that the package imports, wherever it does."""
    found = set()
    for path in Path(kvoffload_async.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            match node:
                case ast.Import(names=aliases):
                    found |= {alias.name for alias in aliases}
                case ast.ImportFrom(module=str(name), level=0):
                    found.add(name)
                case ast.Call(
                    func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name))]
                ):
                    found.add(name)
    top = {name.partition(".")[0] for name in found}
    return top - sys.stdlib_module_names - {"kvoffload_async"}


def test_what_is_declared_is_imported():
    assert modules_of(EXTRAS.keys() - FOR_DEVELOPERS) <= imported()


def test_what_is_imported_is_declared():
    assert imported() <= modules_of(EXTRAS) | NOT_DECLARED


@pytest.fixture
def hatch_build(monkeypatch):
    """The build's hooks, without what they are called by."""
    bases = SimpleNamespace(BuildHookInterface=object, MetadataHookInterface=object)
    for name in ("builders.hooks", "metadata"):
        monkeypatch.setitem(sys.modules, f"hatchling.{name}.plugin.interface", bases)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readmes_links_work_away_from_the_repository(hatch_build):
    hook = hatch_build.ReadmeHook()
    hook.root = str(ROOT)
    metadata = {"urls": {"Source": "https://forge.test/project"}, "version": "1.2"}
    hook.update(metadata)
    assert metadata["readme"]["content-type"] == "text/markdown"
    text = metadata["readme"]["text"]
    targets = re.findall(r'(?:\]\(|\b(?:href|src)=")([^)"\s]+)', text)
    assert targets
    assert all(re.match(r"https?://|#", target) for target in targets)
    links = re.findall(r"https://forge\.test/project/(?:blob|raw)/v1\.2/([\w./-]+)", text)
    assert all((ROOT / link).is_file() for link in links)
    assert "https://forge.test/project/raw/v1.2/docs/images/tiers.svg" in text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("[a\nb](docs/a.md#c)", "[a\nb](S/blob/v1/docs/a.md#c)"),
        ("![a](a.png)", "![a](S/raw/v1/a.png)"),
        ("[![a](a.svg)](b.md)", "[![a](S/raw/v1/a.svg)](S/blob/v1/b.md)"),
        ('<img src="a.svg" alt="a">', '<img src="S/raw/v1/a.svg" alt="a">'),
        ("[a](https://b.test/c) [d](#e) [f](mailto:g@h.test)", None),
        ("```python\na[0](b)\n```", None),
    ],
)
def test_a_relative_link_leads_to_the_tag(hatch_build, before, after):
    assert hatch_build.with_absolute_links(before, "S", "1") == (after or before)


def artifacts(folder, metadata):
    """Make a wheel and an sdist with this metadata; return their paths."""
    wheel, sdist = folder / "a-1-py3-none-any.whl", folder / "a-1.tar.gz"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("a-1.dist-info/METADATA", metadata)
    with tarfile.open(sdist, "w:gz") as archive:
        for name, content in (("a-1/PKG-INFO", metadata), ("a-1/b/PKG-INFO", "")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content.encode()))
    return [wheel, sdist]


def publish(*paths):
    command = [sys.executable, str(ROOT / ".ci/publishable.py"), *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize(
    "line",
    [
        "Author-email: Somebody <somebody@project.invalid>",
        "Project-URL: Source, https://source.project.invalid",
        "\n[Changelog](https://source.project.invalid/blob/v1/CHANGELOG.md)",
    ],
)
def test_placeholders_are_not_published(tmp_path, line):
    for artifact in artifacts(tmp_path, f"Name: a\n{line}\n"):
        done = publish(artifact)
        assert done.returncode == 1
        assert artifact.name in done.stderr
        assert "project.invalid" in done.stderr


def test_what_has_none_is(tmp_path):
    filled = "Author-email: Somebody <somebody@project.test>\n\nInvalid values are refused.\n"
    done = publish(*artifacts(tmp_path, filled))
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_is_not_published():
    assert publish().returncode == 1
