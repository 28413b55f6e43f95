"""Long runs of kills, power cuts and errors.

A share of each is in every run; all of it is a sweep, which runs only with `-m sweep`.
"""

from collections.abc import Iterable

import pytest


def shares(of: int, rest: pytest.MarkDecorator = pytest.mark.sweep) -> pytest.MarkDecorator:
    """Divide a test's points among as many tests: `points[share::of]` are a test's own."""
    return pytest.mark.parametrize("share", _marked(0, range(1, of), rest))


def sizes(name: str, small: int, large: int) -> pytest.MarkDecorator:
    """Run a test with a small number, and with a large one in a sweep."""
    return pytest.mark.parametrize(name, _marked(small, [large], pytest.mark.sweep))


def _marked(first: int, others: Iterable[int], mark: pytest.MarkDecorator) -> list:
    return [first, *(pytest.param(other, marks=mark) for other in others)]
