"""A tier on a mount that does not answer: the opening ends, says why, and so can the process."""

import subprocess
import sys
from pathlib import Path

DEADLINE_S = 60


def test_a_hung_opening_names_tier_path_and_option_and_the_process_ends(tmp_path):
    script = Path(__file__).with_name("hung_opening.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        check=True,
        cwd=script.parents[2],
        env={"PYTHONPATH": ":".join(sys.path)},
        text=True,
        timeout=DEADLINE_S,
    )
    said = (
        f"tier fs (files below {tmp_path}): did not open within 0.2 s; check that its "
        "storage responds, or raise open_timeout_s"
    )
    in_a_configuration = f"secondary_tiers[1]: {said}"
    assert done.stdout.splitlines() == [said, in_a_configuration, in_a_configuration]
    assert "Traceback" not in done.stderr
    assert "primary buffer is still in use" not in done.stderr
