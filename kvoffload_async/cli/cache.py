"""`kvoffload cache`: manage the cached blocks of a running engine through its status socket."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from kvoffload_async.cli.command import errors_as_one_line, finish
from kvoffload_async.errors import InputError
from kvoffload_async.facade.commands import ACTIONS, MOST_HASHES
from kvoffload_async.status.client import command
from kvoffload_async.status.server import SOCKET_VARIABLE

_OF_BLOCKS: Final = ("delete", "count", "pin", "unpin", "copy", "move")


def cache(
    socket: Annotated[
        Path,
        typer.Argument(
            envvar=SOCKET_VARIABLE, help="The engine's status_socket.", show_default=False
        ),
    ],
    action: Annotated[
        str, typer.Argument(help=f"One of {', '.join(ACTIONS)}.", show_default=False)
    ],
    hashes: Annotated[
        list[str] | None,
        typer.Argument(
            help="Block hashes in hexadecimal digits, or keys as `list` prints them; - reads "
            "standard input, one on a line.",
            show_default=False,
        ),
    ] = None,
    *,
    place: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Name of a tier, or primary; repeat it for several. By default all, for `list` "
            "the primary; `clear` needs tiers, `copy` a tier, `move` the source and then a tier.",
            show_default=False,
        ),
    ] = None,
    group: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N", help="KV-cache group of the hashes; repeat it for several. Default: 0."
        ),
    ] = None,
    duration: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long `pin` keeps the blocks.")
    ] = 600.0,
    timeout: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="How long to wait for the end."),
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Delete, count, pin, copy or list cached blocks of a running engine, or clear its tiers.

    The engine must have the option status_socket_commands. It executes the commands at the ends of
    its steps: an idle scheduler, at the next one. The exit status is 1 if blocks are left, because
    a tier did not answer in time; the engine goes on with them.
    """
    with errors_as_one_line():
        if action not in ACTIONS:
            raise InputError(f"{action}: expected {', '.join(ACTIONS)}")
        named = list(_read(hashes or ()))
        if bool(named) is not (action in _OF_BLOCKS):
            raise InputError(f"{action}: {'needs' if not named else 'takes no'} block hashes")
        request: dict[str, Any] = {"do": action, "groups": group or [0]}
        if place:
            request["places"] = place
        if action == "pin":
            request["duration_s"] = duration
        answers = list(_execute(str(socket), request, named, timeout))
        keys = [key for answer in answers for key in answer["keys"]]
        total: dict[str, Any] = {
            name: dict(sum((Counter(answer[name]) for answer in answers), Counter()))
            for name in ("done", "left")
        }
        total["errors"] = {name: text for each in answers for name, text in each["errors"].items()}
        if as_json:
            typer.echo(json.dumps({"do": action, "keys": keys, **total}, indent=2))
        elif action == "list":
            typer.echo("".join(f"{key}\n" for key in keys), nl=False)
        else:
            Console().print(_table(action, total))
    left = [
        f"{name}: {n} left {total['errors'].get(name, '')}" for name, n in total["left"].items()
    ]
    finish(left, interrupted=False)


def _read(hashes: Sequence[str]) -> Iterator[str]:
    """Yield block hashes, and those on standard input in the place of "-"."""
    for one in hashes:
        if one != "-":
            yield one
        else:
            yield from (line.strip() for line in typer.get_text_stream("stdin") if line.strip())


def _execute(
    path: str, request: dict[str, Any], hashes: Sequence[str], timeout_s: float
) -> Iterator[dict[str, Any]]:
    """Send a command in parts, as many as its hashes or its answer need; yield the reports."""
    step = MOST_HASHES // len(request["groups"])
    for first in range(0, max(1, len(hashes)), max(1, step)):
        some = hashes[first : first + step]
        while True:
            state = command(path, {**request, "hashes": some}, timeout_s)
            if "report" not in state:
                raise InputError(f"{path}: no step of the engine has executed the command yet")
            yield state["report"]
            request["cursor"] = state["report"]["cursor"]
            if request["cursor"] is None:
                del request["cursor"]
                break


def _table(action: str, total: dict[str, Any]) -> Table:
    table = Table("place", {"count": "found", "pin": "pinned"}.get(action, "done"), "left")
    for name in dict.fromkeys((*total["done"], *total["left"])):
        table.add_row(name, *(f"{total[column].get(name, 0):,}" for column in ("done", "left")))
    return table
