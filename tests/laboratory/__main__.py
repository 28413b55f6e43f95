"""Runs the laboratory's command from a checkout: `python -m tests.laboratory --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from laboratory.app import app

app(prog_name="python -m tests.laboratory")
