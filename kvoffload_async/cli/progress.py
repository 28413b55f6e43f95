"""The progress bar of long commands; shown only if standard error is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

from rich.console import Console, RenderableType
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn


def progress_bar(
    console: Console, fraction_done: Callable[[], float], title: str
) -> AbstractContextManager[object]:
    """Return a context manager that shows a progress bar.

    Args:
        console: Where to show it.
        fraction_done: Returns the progress, from 0 to 1; also called by the thread that draws.
        title: Text in front of the bar.
    """
    return _Bar(console, fraction_done, title) if console.is_terminal else nullcontext()


class _Bar(Progress):
    """Asks for the progress each time that it is drawn."""

    def __init__(self, console: Console, fraction_done: Callable[[], float], title: str) -> None:
        self._fraction_done = fraction_done
        columns = (SpinnerColumn(), *self.get_default_columns(), TimeElapsedColumn())
        super().__init__(*columns, console=console, transient=True)
        self.add_task(title, total=1.0)

    def get_renderables(self) -> Iterable[RenderableType]:
        for task in self.tasks:
            self.update(task.id, completed=self._fraction_done())
        return super().get_renderables()


class Gauge:
    """Counts expected work and work done; both only grow."""

    def __init__(self) -> None:
        self._total = 0
        self._done = 0

    def expect(self, amount: int) -> None:
        """Add to the expected work."""
        self._total += amount

    def advance(self, amount: int) -> None:
        """Add to the work done."""
        self._done += amount

    def fraction_done(self) -> float:
        """Return work done as a fraction of the expected work; 0 if none is expected."""
        return self._done / self._total if self._total else 0.0
