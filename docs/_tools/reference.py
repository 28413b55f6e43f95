"""Writes the pages of the reference that are made from the code; `--check` only compares them.

python docs/_tools/reference.py
"""

import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer.main

from kvoffload_async import OffloadConfig
from kvoffload_async.cli.app import app
from kvoffload_async.cli.catalogue import common_options, tier_entries
from kvoffload_async.config import REQUIRED, Option
from kvoffload_async.observe.metrics import METRICS as METRIC_LIST
from kvoffload_async.statistics import BUCKET_BOUNDS_S

REFERENCE = Path(__file__).parents[1] / "reference"
NOTE = "<!-- Made from the code by docs/_tools/reference.py. -->\n\n"

CONFIGURATION = """# Configuration

One object, of which two keys are required: a JSON object in a file, a `dict` in Python. Sizes are
integers or text such as `"4GiB"`; what ends in `_s` is seconds. An unknown key is an error that
names the nearest one.

`kvoffload check-config FILE` checks a configuration as everything that opens it does, shows what
follows from it, and creates nothing. Beside each tier's own options it compares the primary with
this machine's memory, capacities with their disks, and the tiers' directories with each other.

Which tier and policy to take is in [Choose tiers and policies](../howto/choosing.md), how much
memory and disk in [Size primary and tiers](../howto/sizing.md), and what `model`, `fingerprint`,
`namespace`, `rank` and `run_config` mean for whose blocks are served in
[Identity of a block](../kv-identity.md).

## The engine

"""
TIERS = """
## Every tier

A tier is an object in `secondary_tiers` with a `type`, one of those below or that of a
[tier of your own](../howto/tier.md), and these options:

"""
METRICS = """# Metrics

What a scrape of [`OffloadCollector`](../howto/metrics.md) gives. Every metric has the label
`engine`, the name that it was registered under. Counters begin at 0 with the engine. A histogram
has `_bucket`, `_sum` and `_count`, and its buckets end at {bounds} seconds. What has no value is
left out: the size of a tier that does not say, the copies of a manager without a device.

To begin with, there are a [dashboard](../metrics/dashboard.json) for Grafana and
[alert rules](../metrics/alerts.yml).

"""
CLI = """# Command line

`kvoffload`, or `python -m kvoffload_async`. What is wrong with the input is said in one line on
standard error.

| exit status | meaning |
|---|---|
| 0 | fine |
| 1 | a check failed |
| 2 | bad input |
| 130 | interrupted |

"""


def main() -> None:
    """Write the pages, or name those that are stale."""
    stale = [path for path, text in pages().items() if not _says(path, text)]
    if "--check" in sys.argv:
        sys.exit("stale: " + ", ".join(path.name for path in stale) if stale else 0)
    for path in stale:
        path.write_text(pages()[path], encoding="utf-8")


def pages() -> dict[Path, str]:
    """Return what each page must say."""
    return {
        REFERENCE / "configuration.md": NOTE + "".join(_configuration()),
        REFERENCE / "cli.md": NOTE + CLI + "\n".join(_commands()),
        REFERENCE / "metrics.md": NOTE + "".join(_metrics()),
    }


def _says(path: Path, text: str) -> bool:
    return path.exists() and path.read_text(encoding="utf-8") == text


def _configuration() -> Iterator[str]:
    yield CONFIGURATION
    yield _option_table(OffloadConfig.described())
    yield TIERS
    yield _option_table(common_options())
    for entry in tier_entries():
        yield f"\n## `{entry.name}`\n\n{entry.summary}\n"
        if entry.options:
            yield "\n" + _option_table(entry.options)


def _option_table(options: Iterable[Option]) -> str:
    rows = ((f"`{o.name}`", _value(o.default), _as_json(o.summary)) for o in options)
    return _table(("key", "default", "meaning"), rows)


def _value(default: object) -> str:
    return "required" if default is REQUIRED else f"`{json.dumps(default)}`"


def _as_json(summary: str) -> str:
    """Return a docstring's text for people who write JSON; a page that it names becomes a link."""
    summary = summary.replace("][", "]&#91;")  # else a reference of Markdown
    for word, said in {"None": "`null`", "True": "`true`", "False": "`false`"}.items():
        summary = re.sub(rf"\b{word}\b", said, summary)
    return re.sub(r"docs/([\w/-]+\.md)", r"[\1](../\1)", summary)


def _list(numbers: Sequence[float]) -> str:
    *most, last = (f"{number:g}" for number in numbers)
    return f"{', '.join(most)} and {last}"


def _metrics() -> Iterator[str]:
    yield METRICS.replace("{bounds}", _list(BUCKET_BOUNDS_S))
    yield _table(
        ("metric", "type", "labels", "meaning"),
        (
            (f"`{m.name}`", m.kind, ", ".join(f"`{label}`" for label in m.labels), m.documentation)
            for m in METRIC_LIST
        ),
    )


def _commands() -> Iterator[str]:
    command = typer.main.get_command(app)
    yield from _pages_of(command, "kvoffload", None)


def _pages_of(command: Any, path: str, parent: Any) -> Iterator[str]:  # noqa: ANN401 - click's
    context = command.context_class(command, info_name=path, parent=parent)
    if getattr(command, "commands", None):
        if parent is not None:
            yield f"## `{path}`\n\n{command.help}\n"
        for name, child in command.commands.items():
            yield from _pages_of(child, f"{path} {name}", context)
        return
    shown = [p for p in command.params if not getattr(p, "hidden", False)]
    arguments = [p for p in shown if p.param_type_name == "argument"]
    options = [p for p in shown if p.param_type_name == "option"]
    usage = " ".join([path, *(_argument(a) for a in arguments), "[OPTIONS]" if options else ""])
    yield f"## `{usage.strip()}`\n\n{inspect.cleandoc(command.help)}\n"
    if shown:
        yield _table(
            ("argument or option", "default", "meaning"),
            [
                *((_code(_argument(a)), "", a.help or "") for a in arguments),
                *((_code(_spelling(o)), _default(o), o.help or "") for o in options),
            ],
        )


def _argument(argument: Any) -> str:  # noqa: ANN401 - click's
    name = argument.metavar or argument.name.upper()
    return name if argument.required else f"[{name}]"


def _spelling(option: Any) -> str:  # noqa: ANN401 - click's
    names = ", ".join([*option.opts, *option.secondary_opts])
    return names if option.is_flag else f"{names} {option.metavar}"


def _default(option: Any) -> str:  # noqa: ANN401 - click's
    if option.is_flag:
        return f"`{option.opts[0]}`" if option.default else ""
    return f"`{option.default}`" if option.default else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def _code(text: str) -> str:
    """Return a text as code; Markdown's own cannot have a bar within a table everywhere."""
    return f"<code>{text.replace('|', '&#124;')}</code>" if "|" in text else f"`{text}`"


def _cell(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    main()
