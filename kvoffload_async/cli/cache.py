"""`kvoffload cache`: manage the cached blocks of a running engine through its status socket."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from kvoffload_async.cli.command import errors_as_one_line, finish
from kvoffload_async.errors import InputError
from kvoffload_async.facade.commands import ACTIONS, MOST_HASHES, MOST_TOKENS
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
    tokens: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Instead of hashes: a file with the token ids of a prompt, as numbers, which the "
            "engine's vLLM hashes.",
            show_default=False,
        ),
    ] = None,
    salt: Annotated[
        str | None, typer.Option(metavar="SALT", help="The cache_salt of the prompt of --tokens.")
    ] = None,
    lora: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="NAME PATH", help="The adapter of the prompt of --tokens."),
    ] = None,
    duration: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long `pin` keeps the blocks.")
    ] = 600.0,
    older_than: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Let `list` leave out blocks that were stored later; for fs and object.",
            show_default=False,
        ),
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The tenant of the blocks; `delete` without hashes deletes all of its blocks. "
            "Default: the default tenant, for `list` all.",
            show_default=False,
        ),
    ] = None,
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
        deletes_all = action == "delete" and tenant is not None and not (hashes or tokens)
        if bool(hashes or tokens) is not (action in _OF_BLOCKS) and not deletes_all:
            raise InputError(
                f"{action}: needs block hashes, or --tokens"
                if action in _OF_BLOCKS
                else f"{action}: takes no block hashes"
            )
        prompt = {"cache_salt": salt, "lora": lora}
        parts = _parts(
            str(socket), hashes or (), tokens, prompt, groups=group or [], timeout_s=timeout
        )
        request: dict[str, Any] = {"do": action}
        if place:
            request["places"] = place
        if tenant is not None:
            request["tenant"] = tenant
        if older_than is not None:
            request["older_than_s"] = older_than
        if action == "pin":
            request["duration_s"] = duration
        answers: list[dict[str, Any]] = []
        for groups, some in parts:
            named = None if deletes_all else some
            answers += _execute(str(socket), {**request, "groups": groups}, named, timeout)
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


def _parts(
    path: str,
    hashes: Sequence[str],
    tokens: Path | None,
    prompt: Mapping[str, object],
    *,
    groups: list[int],
    timeout_s: float,
) -> list[tuple[list[int], list[str]]]:
    """Return the blocks to name: KV-cache groups, and block hashes in these groups."""
    given = list(_read(hashes))
    if tokens is None:
        return [(groups or [0], given)]
    if given:
        raise InputError("--tokens: give it instead of block hashes, not with some")
    found = _hash(path, tokens, prompt, timeout_s)
    parts = [([group], found[group]) for group in groups or found if found.get(group)]
    if not parts:
        raise InputError(f"{tokens}: the prompt has no full block")
    return parts


def _hash(
    path: str, file: Path, options: Mapping[str, object], timeout_s: float
) -> dict[int, list[str]]:
    """Return the block hashes of a prompt by KV-cache group, computed part by part."""
    try:
        numbers = file.read_text().strip().removeprefix("[").removesuffix("]")
        tokens = [int(number) for number in numbers.replace(",", " ").split()]
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: it has no list of token ids: {error}") from error
    found: dict[int, dict[str, None]] = {}
    request = {name: value for name, value in options.items() if value is not None}
    while tokens:
        state = command(path, {**request, "do": "hash", "tokens": tokens[:MOST_TOKENS]}, timeout_s)
        try:
            step = int(state["num_tokens"])
            for group, hashes in state["hashes"].items():
                found.setdefault(int(group), {}).update(dict.fromkeys(hashes))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"{path}: not the answer of an engine: {error!r}") from error
        if step <= 0:
            break
        tokens, request["parent"] = tokens[step:], state.get("parent")
    if len(tokens) >= MOST_TOKENS:
        raise InputError(f"{file}: a block has more than {MOST_TOKENS} tokens; give hashes")
    return {group: list(hashes) for group, hashes in found.items()}


def _execute(
    path: str, request: dict[str, Any], hashes: Sequence[str] | None, timeout_s: float
) -> Iterator[dict[str, Any]]:
    """Send a command in parts, as many as its hashes or its answer need; yield the reports."""
    step = MOST_HASHES // len(request["groups"])
    for first in range(0, max(1, len(hashes or ())), max(1, step)):
        some = {} if hashes is None else {"hashes": hashes[first : first + step]}
        while True:
            state = command(path, request | some, timeout_s)
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
