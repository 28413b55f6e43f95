"""What the README shows works, and its tables say what the code says."""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from kvoffload_async import OffloadConfig
from kvoffload_async.cli import catalogue

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "examples" / "quickstart.py"
REQUIRED = "required"


@pytest.fixture(scope="module")
def readme():
    return (ROOT / "README.md").read_text(encoding="utf-8")


def code(readme, marker):
    """Return the block behind a marker."""
    (found,) = re.findall(
        rf"^<!-- {marker} -->\n```\w+\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL
    )
    return found


def table(readme, marker):
    """Return key -> default of the table behind a marker; a default as JSON says it."""
    (found,) = re.findall(rf"^<!-- {marker} -->\n((?:\|.*\n)+)", readme, re.MULTILINE)
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in found.splitlines()[2:]]
    return {
        key.strip("`"): default if default == REQUIRED else json.loads(default.strip("`"))
        for key, default in rows
    }


def run(*arguments, cwd):
    """Run Python, with the package found where this one is."""
    return subprocess.run(
        [sys.executable, "-W", "error", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_the_readme_shows_the_example(readme):
    _, _, body = QUICKSTART.read_text(encoding="utf-8").partition('"""\n\n')
    assert code(readme, "quickstart") == body


def test_the_readmes_example_runs(readme, tmp_path):
    script = tmp_path / "quickstart.py"
    script.write_text(code(readme, "quickstart"))
    for path in (script, QUICKSTART):
        done = run(path, cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_the_readmes_tier_keeps_the_contract(readme, tmp_path):
    path = tmp_path / "test_tier.py"
    path.write_text(code(readme, "tier"))
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", path, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert re.search(r"\d\d passed", done.stdout)


def test_the_readmes_program_names_a_corrupt_block(readme, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(code(readme, "maintenance"))
    root = tmp_path / "root"
    options = ("--limit", "3", "--tier", f"fs:root_dir={root}")
    assert run("-m", "kvoffload_async", "replay", *options, cwd=tmp_path).returncode == 0
    victim = next(root.rglob("*.bin"))
    os.truncate(victim, 10)
    done = run(program, root, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert f" corrupt: {victim}: " in done.stdout


def test_the_readme_lists_every_key_of_the_configuration(readme):
    required = {"cpu_bytes_to_use", "block_bytes"}
    defaults = {
        option.name: REQUIRED if option.name in required else option.default
        for option in fields(OffloadConfig)
    }
    assert table(readme, "config-keys") == {**defaults, "secondary_tiers": []}


def listed(options):
    return {
        option.name: REQUIRED if option.default is catalogue.REQUIRED else option.default
        for option in options
    }


def test_the_readme_lists_every_option_of_the_tiers(readme):
    entries = {entry.name: entry for entry in catalogue.tier_entries()}
    for name in ("fs", "slab", "valkey", "object"):
        assert table(readme, f"{name}-options") == listed(entries[name].options)
    assert table(readme, "tier-options") == listed(catalogue.common_options())


def test_commands_are_one_line_each(readme):
    blocks = re.findall(r"^```sh\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    assert all(block.count("\n") == 1 for block in blocks)
