"""Every example runs as a user would run it, and prints what it shows."""

import subprocess
from pathlib import Path

import preloaded
import pytest

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 60
SHOWN = {
    "sync_scheduler.py": "tokens loaded from host memory",
    "custom_tier.py": "8 blocks of 4096 bytes came back",
    "custom_policy.py": "lfu: ",
}


@pytest.mark.parametrize("name", SHOWN)
def test_an_example_runs_and_says_what_it_shows(name, tmp_path):
    done = subprocess.run(
        [preloaded.python(), str(ROOT / "examples" / name)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert SHOWN[name] in done.stdout
    assert not done.stderr


def test_the_tier_of_the_example_passes_the_conformance_suite():
    done = subprocess.run(
        [
            preloaded.python(),
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "examples/custom_tier.py",
        ],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def test_no_example_is_forgotten():
    found = {path.name for path in (ROOT / "examples").glob("*.py")}
    elsewhere = {"quickstart.py", "async_server.py"}  # test_readme, test_async_server
    assert found - elsewhere == set(SHOWN)
