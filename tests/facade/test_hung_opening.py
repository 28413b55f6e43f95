"""A tier on a mount that does not answer: the opening ends, says why, and so can the process."""

import subprocess
import sys
from pathlib import Path

import pytest

DEADLINE_S = 60


@pytest.mark.parametrize(
    ("way", "prefix"),
    [("manager", ""), ("spec", "secondary_tiers[1]: "), ("engine", "secondary_tiers[1]: ")],
)
def test_a_hung_opening_names_tier_path_and_option_and_the_process_ends(way, prefix, tmp_path):
    script = Path(__file__).with_name("hung_opening.py")
    done = subprocess.run(
        [sys.executable, str(script), way, str(tmp_path)],
        capture_output=True,
        check=True,
        cwd=script.parents[2],
        env={"PYTHONPATH": ":".join(sys.path)},
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.stdout == (
        f"{prefix}tier fs (files below {tmp_path}): did not open within 0.2 s; look whether its "
        "place answers, or give it more as open_timeout_s"
    )
    assert "Traceback" not in done.stderr
    assert "primary buffer is still in use" not in done.stderr
