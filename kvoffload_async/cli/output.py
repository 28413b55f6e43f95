"""Output of the commands: files, tables and texts for people, and the progress bar."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

from rich.console import Console, RenderableType
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvoffload_async.abc.maintenance import StoreMaintenance, Summary
from kvoffload_async.errors import InputError

STDOUT: Final = "-"


def check_writable(option: str, name: str | None) -> None:
    """Check, before a long run, that an output file can be written.

    Raises:
        InputError: The name is a directory, its parent directory does not exist, or this process
            may not write there.
    """
    if name is None or name == STDOUT:
        return
    path, reason = Path(name), ""
    with as_unwritable(option, name):
        if path.is_dir():
            reason = "it is a directory"
        elif not path.parent.is_dir():
            reason = "the directory does not exist"
        elif not os.access(path if path.exists() else path.parent, os.W_OK):
            reason = "no permission to write there"
    if reason:
        raise InputError(f"{option} {name}: cannot be written: {reason}")


def write_text(option: str, name: str, text: str) -> None:
    """Write a text to standard output or to a file; raises InputError if that fails."""
    if name == STDOUT:
        sys.stdout.write(text + "\n")
        return
    with as_unwritable(option, name):
        Path(name).write_text(text + "\n", encoding="utf-8")


def publish(json: str | None, print_tables: Callable[[Console], None], text: str) -> None:
    """Print tables unless standard output is for JSON; write the figures if `json` names a file.

    Raises:
        InputError: The figures cannot be written.
    """
    if json != STDOUT:
        print_tables(Console())
    if json is not None:
        write_text("--json", json, text)


@contextmanager
def as_unwritable(option: str, name: str) -> Iterator[None]:
    """Context manager: turns an OSError into an InputError that names the option."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{option} {name}: cannot be written: {error.strerror}") from error


_PAGES: Final = (".html", ".htm")


def drawing_module(option: str, name: str) -> Any:  # noqa: ANN401 - a module
    """Import a module that draws with matplotlib.

    Raises:
        InputError: matplotlib is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(
            f"{option} needs matplotlib ({error}); install kvoffload-async[plot]"
        ) from error


def check_picture(option: str, path: Path | None, module: str) -> None:
    """Check that a plot can be drawn and written to a path; None is accepted.

    Raises:
        InputError: The path cannot be written, its suffix is not a known image format, or
            matplotlib is not installed.
    """
    if path is None:
        return
    check_writable(option, str(path))
    known = drawing_module(option, module).check_suffix(path)
    if known is not None:
        raise InputError(
            f"{option} {path}: {path.suffix!r} is not an image format; use one of {known}"
        )


def check_page(option: str, path: Path | None, module: str) -> None:
    """Check that an HTML page with plots can be written to a path; None is accepted.

    Raises:
        InputError: The path cannot be written, its suffix is not that of HTML, or matplotlib is
            not installed.
    """
    if path is None:
        return
    check_writable(option, str(path))
    if path.suffix.lower() not in _PAGES:
        raise InputError(f"{option} {path}: {path.suffix!r} is not a page format; use .html")
    drawing_module(option, module)


def figures_table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table of named rows of figures; without a header if all column names are empty."""
    table = Table(title=title, title_justify="left", show_header=any(head))
    table.add_column(head[0], style="bold")
    for name in head[1:]:
        table.add_column(Text(shown(name)), justify="right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(shown(value)) for value in row))
    return table


def summary_tables(summaries: Sequence[tuple[StoreMaintenance, Summary]]) -> Iterator[Table]:
    """Yield a table of the summaries per kind of store, with one column per store."""
    for kind in dict.fromkeys(type(store) for store, _ in summaries):
        columns = [(store.name, found) for store, found in summaries if type(store) is kind]
        rows = zip(*(found.rows for _, found in columns), strict=True)
        yield figures_table(
            columns[0][1].title,
            ["namespace", *(name for name, _ in columns)],
            ([each[0][0], *(value for _, value in each)] for each in rows),
        )


_MIB: Final = 1 << 20
_GIB: Final = 1 << 30


def size_text(num_bytes: float) -> str:
    """Return a size with a unit."""
    if num_bytes < _MIB:
        return f"{num_bytes / 1024:,.0f} KiB"
    return f"{num_bytes / _MIB:,.1f} MiB" if num_bytes < _GIB else f"{num_bytes / _GIB:,.2f} GiB"


def shown(name: str) -> str:
    """Return a text with unprintable characters replaced, safe for every terminal."""
    return "".join(c if c.isprintable() else "\ufffd" for c in name)


def progress_bar(
    console: Console, fraction_done: Callable[[], float], title: str
) -> AbstractContextManager[object]:
    """Return a context manager that shows a progress bar if the console is a terminal.

    Args:
        console: Where to show it.
        fraction_done: Returns the progress, from 0 to 1; also called by the thread that draws.
        title: Text in front of the bar.
    """
    return _Bar(console, fraction_done, title) if console.is_terminal else nullcontext()


class _Bar(Progress):
    """Progress bar that calls `fraction_done` whenever it is drawn."""

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
