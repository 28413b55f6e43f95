"""Generates reference pages from the code; `--check` only compares them.

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
from kvoffload_async.cli.app import app, common_options, tier_entries
from kvoffload_async.config import REQUIRED, Option
from kvoffload_async.integrations.vllm.settings import classified_settings
from kvoffload_async.observe.prometheus import METRICS as METRIC_LIST
from kvoffload_async.statistics import BUCKET_BOUNDS_S
from kvoffload_async.system_calls import CALLS

REFERENCE = Path(__file__).parents[1] / "reference"
NOTE = "<!-- Made from the code by docs/_tools/reference.py. -->\n\n"

CONFIGURATION = """# Configuration

A configuration is one object: a JSON object in a file, or a `dict` in Python. Two keys are
required. A size is an integer in bytes or text such as `"4GiB"`. Keys that end in `_s` are in
seconds. An unknown key is an error, whose message names the most similar key. Defaults are in
brackets.

`kvoffload check-config FILE` validates a configuration and prints the derived settings, without
creating anything. It also checks that the primary fits into this machine's memory, that the
capacities fit onto their disks, and that the tiers' directories do not overlap.

See [Choose tiers and policies](../howto/choosing.md) and
[Size primary and tiers](../howto/sizing.md) for advice. [Identity of a block](../kv-identity.md)
explains how `model`, `fingerprint`, `namespace`, `rank` and `run_config` keep blocks apart.

## The engine

"""
TIERS = """
## Every tier

A tier is an object in `secondary_tiers`. Its `type` is one of the types below, or that of
[your own tier](../howto/tier.md). All tiers have these options:

"""
METRICS = """# Metrics

These metrics are exported by [`OffloadCollector`](../howto/observe.md#prometheus). Every metric has
the label `engine`, the name under which the engine was registered. Counters start at 0 with the
engine. A histogram has `_bucket`, `_sum` and `_count`; its bucket bounds are {bounds} seconds. A
metric without a value is omitted, for instance the size of a tier that does not report it. In
brackets are a metric's type and its further labels.

A [dashboard](../metrics/dashboard.json) for Grafana and [alert rules](../metrics/alerts.yml) are
provided. Under vLLM, [other names](../howto/vllm.md#metrics) apply.

"""
CLI = """# Command line

Run `kvoffload` or `python -m kvoffload_async`. An error is printed as one line on standard error.

| exit status | meaning |
|---|---|
| 0 | success |
| 1 | a check failed |
| 2 | bad input |
| 130 | interrupted |
| 143, 129 | ended by SIGTERM, SIGHUP |

"""

SYSTEM_CALLS = """# System calls

The seccomp profile of a container, or a kernel such as gVisor's, may refuse a system call. These
are the calls beyond opening, reading, writing, mapping and naming files. The current default
profiles of Docker and containerd permit all of them. Where a start fails, the error names the call.

"""

VLLM_SETTINGS = """# Settings of vLLM

The settings of vLLM 0.32 and 0.33 that change the bytes of a block, and how each keeps blocks apart
(see [Identity of a block](../kv-identity.md#under-vllm)):

* *block hash*, *identity*, *layout*, *fingerprint*: it is part of vLLM's hash of a block, of the
  directory name of vLLM's own `fs` tier, of the layout's digest, or of the fingerprint.
* *resolved*: its effect is part of the fingerprint.
* *process*: if it is set, the content is not known, and blocks are kept for this process only.
* *refused*: if it is set, a tier without a `fingerprint` is refused.

All other fields are listed as neutral in `kvoffload_async/integrations/vllm/settings.toml`, and
environment variables in `environment.toml` next to it. A field or variable that is in neither
becomes part of the fingerprint.
"""


def main() -> None:
    """Write the stale pages, or with `--check` only name them."""
    stale = [path for path, text in pages().items() if not _says(path, text)]
    if "--check" in sys.argv:
        sys.exit("stale: " + ", ".join(path.name for path in stale) if stale else 0)
    for path in stale:
        path.write_text(pages()[path], encoding="utf-8")


def pages() -> dict[Path, str]:
    """Return the expected text of each page."""
    return {
        REFERENCE / "configuration.md": NOTE + "".join(_configuration()),
        REFERENCE / "cli.md": NOTE + CLI + "\n".join(_commands()),
        REFERENCE / "system-calls.md": NOTE + "".join(_system_calls()),
        REFERENCE / "metrics.md": NOTE + "".join(_metrics()),
        REFERENCE / "vllm-settings.md": NOTE + "".join(_vllm_settings()),
    }


def _says(path: Path, text: str) -> bool:
    return path.exists() and path.read_text(encoding="utf-8") == text


def _configuration() -> Iterator[str]:
    yield CONFIGURATION
    yield from _options(OffloadConfig.described())
    yield TIERS
    yield from _options(common_options())
    for entry in tier_entries():
        yield f"\n## `{entry.name}`\n\n{entry.summary}\n"
        if entry.options:
            yield "\n"
            yield from _options(entry.options)


def _options(options: Iterable[Option]) -> Iterator[str]:
    for each in options:
        yield _item(f"`{each.name}` ({_value(each.default)})", _as_json(each.summary))


def _value(default: object) -> str:
    return "required" if default is REQUIRED else f"`{json.dumps(default)}`"


def _as_json(summary: str) -> str:
    """Return a docstring's text with JSON's literals, and with links to the pages that it names."""
    summary = summary.replace("][", "]&#91;")  # Markdown would read a reference link
    for word, said in {"None": "`null`", "True": "`true`", "False": "`false`"}.items():
        summary = re.sub(rf"\b{word}\b", said, summary)
    return re.sub(r"docs/([\w/-]+\.md)", r"[\1](../\1)", summary)


def _list(numbers: Sequence[float]) -> str:
    *most, last = (f"{number:g}" for number in numbers)
    return f"{', '.join(most)} and {last}"


def _metrics() -> Iterator[str]:
    yield METRICS.replace("{bounds}", _list(BUCKET_BOUNDS_S))
    for metric in METRIC_LIST:
        labels = "".join(f", `{label}`" for label in metric.labels)
        yield _item(f"`{metric.name}` ({metric.kind}{labels})", metric.documentation)


def _system_calls() -> Iterator[str]:
    yield SYSTEM_CALLS
    for name, call in CALLS.items():
        instead = call.instead or "tiers that need it do not start"
        yield _item(f"`{name}`", f"{call.purpose}. Without it: {instead}.")


def _vllm_settings() -> Iterator[str]:
    """Yield a list for each class: what keeps its settings apart, and why, equal reasons joined."""
    yield VLLM_SETTINGS
    for name, fields in classified_settings().items():
        ways: dict[str, dict[str, list[str]]] = {}
        for field, (way, why) in fields.items():
            if way != "neutral":
                ways.setdefault(way, {}).setdefault(why, []).append(f"`{field}`")
        if ways:
            yield f"\n## {name}\n\n"
        for way, reasons in ways.items():
            settings = (f"{', '.join(names)} ({why})" for why, names in reasons.items())
            yield f"* *{way}*: {'; '.join(settings)}\n"


def _commands() -> Iterator[str]:
    command = typer.main.get_command(app)
    yield from _pages_of(command, "kvoffload", None)


def _pages_of(command: Any, path: str, parent: Any) -> Iterator[str]:  # noqa: ANN401 - click's
    context = command.context_class(command, info_name=path, parent=parent)
    children = getattr(command, "commands", None)
    if children:
        lists = [list(_parameters(child)) for child in children.values()]
        common = [line for line in lists[0] if all(line in lines for lines in lists)]
        if parent is not None:
            yield f"## `{path}`\n\n{command.help}\n"
            yield f"All of its commands take:\n\n{''.join(common)}"
        for name, child in children.items():
            for page in _pages_of(child, f"{path} {name}", context):
                yield "".join(line for line in page.splitlines(True) if line not in common)
        return
    arguments = [p for p in _shown(command) if p.param_type_name == "argument"]
    options = [p for p in _shown(command) if p.param_type_name == "option"]
    usage = " ".join([path, *(_argument(a) for a in arguments), "[OPTIONS]" if options else ""])
    yield f"## `{usage.strip()}`\n\n{inspect.cleandoc(command.help)}\n"
    yield "".join(_parameters(command))


def _shown(command: Any) -> list[Any]:  # noqa: ANN401 - click's
    return [p for p in command.params if not getattr(p, "hidden", False)]


def _parameters(command: Any) -> Iterator[str]:  # noqa: ANN401 - click's
    """Yield a line for each argument, then for each option."""
    for parameter in sorted(_shown(command), key=lambda each: each.param_type_name):
        if parameter.param_type_name == "argument":
            yield _item(f"`{_argument(parameter)}`", parameter.help or "")
        else:
            default = _default(parameter)
            more = f" Default: {default}." if default else ""
            yield _item(f"`{_spelling(parameter)}`", (parameter.help or "") + more)


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


def _item(name: str, text: str) -> str:
    return f"* {name}: {' '.join(text.split())}\n"


if __name__ == "__main__":
    main()
