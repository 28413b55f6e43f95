"""What the project's own files say of each other: workflows, hooks, constraints, sessions."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from kvoffload_async.integrations.vllm.version import CONTRACT

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
VLLM_VERSIONS = [
    f"0.{minor}" for minor in range(100) if f"0.{minor}" in SpecifierSet(CONTRACT.supported)
]
PYTHONS = [
    found[1]
    for classifier in PROJECT["classifiers"]
    if (found := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", classifier))
]


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def jobs(name):
    return yaml.safe_load(read(f".github/workflows/{name}.yml"))["jobs"]


def commands(job):
    return [step["run"] for step in job["steps"] if "run" in step]


def pins(name):
    """Return the requirements in a list of constraints, by distribution."""
    lines = [line for line in read(name).splitlines() if not line.startswith("#")]
    found = [Requirement(line) for line in lines]
    assert all(str(pin.specifier).startswith("==") for pin in found)
    return {
        canonicalize_name(pin.name): str(pin.specifier).removeprefix("==")
        for pin in found
        if pin.marker is None or pin.marker.evaluate()
    }


def test_every_check_runs_on_every_supported_python_and_machine():
    (found,) = re.findall(r"^PYTHONS = (.*)$", read("noxfile.py"), re.MULTILINE)
    checks = jobs("ci")["checks"]
    matrix = checks["strategy"]["matrix"]
    assert PYTHONS == matrix["python"] == ast.literal_eval(found)
    assert matrix["runner"] == ["ubuntu-latest", "ubuntu-24.04-arm"]
    assert commands(checks) == [".ci/run"]


def test_a_release_is_what_the_build_session_makes_and_has_an_sbom_and_no_placeholders():
    release = jobs("release")
    made = commands(release["build"])
    assert {"nox -s build", "nox -s sbom"} < {*made}
    assert "python .ci/publishable.py dist/kvoffload_async-*" in made
    assert "build" in release["publish"]["needs"]


def test_the_weekly_job_resolves_the_pages_commands():
    job = jobs("ci")["vllm"]
    assert "schedule" in job["if"]
    assert "nox -s resolve" in commands(job)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_pins_its_actions_has_deadlines_and_may_only_read(workflow):
    text = workflow.read_text(encoding="utf-8")
    document = yaml.safe_load(text)
    actions = re.findall(r"uses: (.*)", text)
    assert actions
    assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}  # v[\d.]+", action) for action in actions)
    assert document["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] for job in document["jobs"].values())
    sessions = {
        *re.findall(r"nox -s (\w+)", text),
        *jobs("ci")["long"]["strategy"]["matrix"]["session"],
    }
    assert sessions <= set(re.findall(r"^def (\w+)\(session", read("noxfile.py"), re.MULTILINE))


def test_the_hooks_are_the_checks_of_ci_in_the_versions_that_are_pinned():
    config = yaml.safe_load(read(".pre-commit-config.yaml"))
    (repository,) = config["repos"]
    assert repository["repo"] == "local"
    assert {hook["language"] for hook in repository["hooks"]} == {"system"}
    checks = re.sub(r'"?\S*/bin/', "", read(".ci/run").replace('"', "")).replace("python -m ", "")
    for hook in repository["hooks"]:
        tool = hook["entry"].removeprefix("python -m ").removesuffix(" --force-exclude")
        assert f"\n{tool}" in checks, tool
    assert {"ruff", "mypy", "import-linter", "pre-commit"} <= {*pins("constraints.txt")}


@pytest.mark.parametrize("version", VLLM_VERSIONS)
def test_each_supported_vllm_has_constraints_that_meet_what_the_package_asks_for(version):
    found = pins(f"constraints/vllm-{version}.txt")
    assert found["vllm"].startswith(f"{version}.")
    extras = PROJECT["optional-dependencies"]
    asked = [*PROJECT["dependencies"], *extras["vllm"], *extras["object"], *extras["valkey"]]
    for requirement in map(Requirement, asked):
        assert found[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_the_install_page_lists_every_extra():
    section = read("docs/howto/install.md").partition("## Extras")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert sorted(listed) == sorted(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("version", VLLM_VERSIONS)
def test_the_install_page_has_a_command_for_each_supported_vllm(version):
    page = read("docs/howto/install.md")
    (line,) = re.findall(rf"^pip install .*constraints/vllm-{version}.txt.*$", page, re.MULTILINE)
    named = re.findall(r"constraints/\S+", line)
    assert all((ROOT / name).exists() for name in named)
    assert line.endswith(" '.[vllm]'")


def test_what_is_to_be_cited_is_this_version():
    cited = yaml.safe_load(read("CITATION.cff"))
    described = (PROJECT["name"], PROJECT["version"], PROJECT["license"], PROJECT["description"])
    assert (cited["title"], str(cited["version"]), cited["license"], cited["abstract"]) == described


def test_the_changelog_has_each_kind_of_change_once_and_in_order():
    releases = re.split(r"^## ", read("CHANGELOG.md"), flags=re.MULTILINE)[1:]
    assert releases[0].startswith("Unreleased\n")
    for release in releases:
        kinds = re.findall(r"^### (.*)$", release, re.MULTILINE)
        assert kinds == [kind for kind in KINDS if kind in kinds]
