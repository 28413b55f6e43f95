"""Tests with an installed SGLang; they are collected where it is."""

import importlib.util
import sys
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # sglang_world and stand_ins

_HAS_SGLANG = importlib.util.find_spec("sglang") is not None
collect_ignore_glob = [] if _HAS_SGLANG else ["test_*.py"]

if _HAS_SGLANG:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's and torch's own, when they are imported
        import sglang_world


@pytest.fixture
def rank():
    """Return what makes a `Rank`; all of them are closed at the end."""
    made = []

    def make(*args, **kwargs):
        made.append(sglang_world.Rank(*args, **kwargs))
        return made[-1]

    yield make
    for one in reversed(made):
        one.close()
