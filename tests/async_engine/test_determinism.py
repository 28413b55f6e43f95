"""Equal draws have equal histories: nothing that hypothesis does not draw has a part in them.

Neither the order of sets, which follows from addresses and the interpreter's hash seed, nor helper
threads, nor how long anything takes. Else an example that has failed is not found again.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("histories.py")


def histories(hash_seed):
    """Return the two histories that a new process tells."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[2]), "PYTHONHASHSEED": hash_seed},
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.slow
def test_the_machine_sees_the_same_again_in_this_process_and_in_another():
    first, *others = histories("1") + histories("2")
    assert len(first) > 250
    for other in others:
        assert other == first
