"""The progress bar of long commands; shown only if standard error is a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_REFRESH_S = 0.1


@contextmanager
def progress_bar(
    console: Console, fraction_done: Callable[[], float], title: str
) -> Iterator[Callable[[], None]]:
    """Show a progress bar; yields the function to call after each step."""
    if not console.is_terminal:
        yield lambda: None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    # The bar also refreshes itself, because the first step may take long.
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=1.0)
        due_s = 0.0

        def update() -> None:
            nonlocal due_s
            now_s = time.monotonic()
            if now_s >= due_s:
                due_s = now_s + _REFRESH_S
                progress.update(task, completed=fraction_done(), refresh=True)

        yield update


class Gauge:
    """Counts expected work and work done; both only grow.

    Attributes:
        on_change: Called after every change.
    """

    def __init__(self) -> None:
        self._total = 0
        self._done = 0
        self.on_change: Callable[[], None] = lambda: None

    def expect(self, amount: int) -> None:
        """Add to the expected work."""
        self._total += amount
        self.on_change()

    def advance(self, amount: int) -> None:
        """Add to the work done."""
        self._done += amount
        self.on_change()

    @property
    def fraction_done(self) -> float:
        """Work done as a fraction of the expected work, from 0 to 1; 0 if none is expected."""
        return self._done / self._total if self._total else 0.0
