"""`kvoffload top`: a running engine, live."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from kvoffload_async.cli.ending import EXIT_INTERRUPTED, errors_as_one_line
from kvoffload_async.cli.top_view import picture
from kvoffload_async.errors import InputError
from kvoffload_async.facade.status import SOCKET_VARIABLE
from kvoffload_async.observe.changes import Readings
from kvoffload_async.observe.status import NoAnswerError, ask, parse_report


def top(
    socket: Annotated[
        Path,
        typer.Argument(
            envvar=SOCKET_VARIABLE, help="The engine's status_socket.", show_default=False
        ),
    ],
    *,
    interval: Annotated[
        float,
        typer.Option(min=0.1, max=3600, metavar="SECONDS", help="Seconds between two readings."),
    ] = 1.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one reading as JSON, and end.")
    ] = False,
) -> None:
    """Show a running engine: its tiers, rates, hit ratios, latencies and breakers.

    Rates are those since the last reading, everything else is of the last minute; at first, both
    are since the engine's begin. Where the output is no terminal, one picture is printed. Ctrl-C
    ends it.
    """
    path = str(socket)
    try:
        with errors_as_one_line():
            line = ask(path)
            readings = Readings()
            readings.add(parse_report(line, path))
            if as_json:
                sys.stdout.write(json.dumps(json.loads(line), indent=2) + "\n")
                return
            console = Console()
            if not console.is_terminal:
                console.print(
                    picture(readings, width=console.width, height=console.height, path=path)
                )
                return
            _watch(console, readings, path, interval)
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from interrupt


def _watch(console: Console, readings: Readings, path: str, interval_s: float) -> None:
    """Show one reading after the other; an engine that does not answer may come back."""
    pause = threading.Event()
    complaint = ""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            width, height = console.size
            shown = picture(readings, width=width, height=height, path=path, complaint=complaint)
            live.update(shown, refresh=True)
            pause.wait(interval_s)
            complaint = _read_again(readings, path)


def _read_again(readings: Readings, path: str) -> str:
    """Take another reading, and return an empty text, or why there is none."""
    try:
        readings.add(parse_report(ask(path), path))
    except (NoAnswerError, InputError) as error:
        return f"no reading: {error}"
    return ""
