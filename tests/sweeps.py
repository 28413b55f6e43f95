"""Long runs of kills, power cuts and errors.

A share of each is in every run; all of it is a sweep, which runs only with `-m sweep`.
"""

import pytest


def shares(of: int) -> pytest.MarkDecorator:
    """Divide a test's points among as many tests: `points[share::of]` are a test's own."""
    return sizes("share", 0, *range(1, of))


def sizes(name: str, small: int, *large: int) -> pytest.MarkDecorator:
    """Run a test with a small number, and with others in a sweep."""
    sweeps = [pytest.param(size, marks=pytest.mark.sweep) for size in large]
    return pytest.mark.parametrize(name, [small, *sweeps])
