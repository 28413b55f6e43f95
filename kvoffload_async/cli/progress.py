"""How far a long job has come: a progress bar on a terminal, never where the results go."""

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
    """Show how much has been done; yields what is to be called once a step."""
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
    # By itself as well: the first step may come late, and a person looks whether it is alive.
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
    """Counts what is done of what is to be done; both grow.

    Attributes:
        on_change: Called after every change.
    """

    def __init__(self) -> None:
        self._total = 0
        self._done = 0
        self.on_change: Callable[[], None] = lambda: None

    def expect(self, amount: int) -> None:
        """There is more to do."""
        self._total += amount
        self.on_change()

    def advance(self, amount: int) -> None:
        """Some of it is done."""
        self._done += amount
        self.on_change()

    @property
    def fraction_done(self) -> float:
        """The share, from 0 to 1; 0 while nothing is known."""
        return self._done / self._total if self._total else 0.0
