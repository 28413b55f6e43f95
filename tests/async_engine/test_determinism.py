"""Equal draws have equal histories: nothing that hypothesis does not draw has a part in them.

Neither the order of sets, which follows from addresses and the interpreter's hash seed, nor helper
threads, nor how long anything takes. Else an example that has failed is not found again.
"""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from async_engine import histories

SCRIPT = Path(histories.__file__)


def history_of_another_process():
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[2]), "PYTHONHASHSEED": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.fixture
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.usefixtures("quiet")
def test_the_machine_sees_the_same_again_in_this_process_and_in_another():
    first = histories.history()
    assert len(first) > 100
    assert histories.history() == first
    assert history_of_another_process() == first
