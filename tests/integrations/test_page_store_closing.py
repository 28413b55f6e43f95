"""Closing a `PageStore` from several threads beside running copies."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sweeps import sizes

DEADLINE_S = 900


@pytest.mark.slow
@sizes("schedules", 20, 400)
def test_no_closer_returns_or_unmaps_a_row_before_all_copies_have_ended(schedules):
    script = Path(__file__).with_name("closers.py")
    done = subprocess.run(
        [sys.executable, script, str(schedules)],
        env=os.environ | {"PYTHONPATH": str(script.parent)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{schedules} schedules, ")
