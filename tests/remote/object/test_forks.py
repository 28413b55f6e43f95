"""A forked child and the threads of the object store library, which it does not have."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
DEADLINE_S = 120


def forked(folder, when):
    script = TESTS / "remote" / "object" / "forked_use.py"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, folder.as_uri(), when],
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("when", ["open", "closed"])
def test_a_child_of_a_process_that_used_an_object_store_is_told_at_once(tmp_path, when):
    said = forked(tmp_path, when)
    assert "used before this process was forked" in said
    assert '"spawn"' in said


def test_a_child_of_a_process_that_only_checked_its_configuration_uses_one(tmp_path):
    assert forked(tmp_path, "unused") == "loaded"
