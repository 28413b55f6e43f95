"""Sweeps over every call of a run, of which several tests take a share each.

Together the tests of a sweep come to every point. With `KVOFFLOAD_FULL_SWEEPS=1`, as in
`nox -s sweeps`, each comes to all of them.
"""

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

IS_FULL = os.environ.get("KVOFFLOAD_FULL_SWEEPS", "0") != "0"


def swept(points: Sequence[T], number: int, *, of: int) -> Sequence[T]:
    """Return a test's share: every `of`-th point, from its number on."""
    return points if IS_FULL else points[number % of :: of]
