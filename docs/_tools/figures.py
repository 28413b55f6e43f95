"""Writes the figures of a benchmark run into the benchmarks page and the README.

Run `python docs/_tools/figures.py FILE` with the output of `kvoffload bench --json FILE` or of
`examples/vllm_cpu/returning_chats.py --json FILE`; the benchmarks page has the whole commands.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
INDEX = DOCS / "index.md"
PAGE = DOCS / "benchmarks.md"
README = DOCS.parent / "README.md"
PASSES = {
    "store": "store",
    "load": "load",
    "store_one_job": "store, one job of {keys} blocks",
    "load_one_job": "load, one job of {keys} blocks",
}
NAMES = {"vllm-fs": "vLLM's `fs`", "lmcache-fs": "LMCache's files"}
_WHOLE = 100
NOT_MEASURED = "not measured"
_FIGURES = re.compile(r"(?<=<!-- figures -->\n).*?(?=<!-- /figures -->)", re.DOTALL)
_CHATS = re.compile(r"(?<=<!-- chats -->\n).*?(?=<!-- /chats -->)", re.DOTALL)
_SPEED = re.compile(r"^\| (store|load), .*$", re.MULTILINE)

Report = dict[str, Any]


def page(text: str, report: Report) -> str:
    """Return the page with the figures of a report, as `kvoffload bench --json` writes it."""
    return _FIGURES.sub(lambda _: "\n".join(["", *_figures(report), ""]), text)


def readme(text: str, report: Report) -> str:
    """Return the README with the throughput of the smallest and the largest blocks."""
    first, last = report["sizes"][0], report["sizes"][-1]

    def line(found: re.Match[str]) -> str:
        what = found[1]
        suffixes = {
            "slab": ", verified",
            "fs": ", verified",
            "vllm-fs": ", unverified",
            "lmcache-fs": ", unverified",
        }
        cells = [
            _speeds(first, last, name, what, suffix if what == "load" else "")
            for name, suffix in suffixes.items()
        ]
        return _row([f"{what}, {_size(first)} and {_size(last)} blocks", *cells])

    return _SPEED.sub(line, text)


def _speeds(first: Report, last: Report, name: str, what: str, suffix: str) -> str:
    if name not in first["contenders"]:
        return NOT_MEASURED
    low, high = (_number(_median(size["contenders"][name], what)) for size in (first, last))
    return f"{low} and {high} GiB/s{suffix}"


def _figures(report: Report) -> Iterator[str]:
    machine, settings = report["machine"], report["settings"]
    baselines = {name: facts["baseline"] for name, facts in report["contenders"].items()}
    yield (
        f"{machine['date'][:10]}: {machine['processors']} x {machine['processor']}, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, {machine['system']}, load "
        f"{machine['load_average']:.1f}; kvoffload-async {machine['kvoffload_async']}, block "
        f"I/O: {machine['block_io']}. {settings['in_flight']} jobs of "
        f"{settings['keys_per_job']} blocks in flight, medians of {settings['rounds']} rounds."
    )
    (first, *_) = [baseline for baseline in baselines.values() if baseline]
    kinds = list(report["sizes"][0]["baselines"][first["directory"]])
    names = list(report["contenders"])
    for what, template in PASSES.items():
        if what not in report["sizes"][0]["contenders"][names[0]]["passes"]:
            continue
        title = template.format(keys=settings["one_job"])
        yield ""
        yield from _head([f"GiB/s, {title}", *(f"{kind} baseline" for kind in kinds), *names])
        for size in report["sizes"]:
            beneath = size["baselines"][first["directory"]]
            yield _row(
                [
                    _size(size),
                    *(_number(beneath[kind][what]["gib_per_s"]["median"]) for kind in kinds),
                    *(_with_share(size["contenders"][name]["passes"][what]) for name in names),
                ]
            )
    for figure, title in (
        ("cpu_s_per_gib", "CPU seconds per GiB"),
        ("owner_us_per_key", "owner's microseconds per block"),
        ("switches_per_job", "context switches per job"),
    ):
        yield ""
        yield from _head([f"{title}, store / load", *names])
        for size in report["sizes"]:
            yield _row(
                [
                    _size(size),
                    *(
                        " / ".join(
                            _number(_median(size["contenders"][name], what, figure))
                            for what in ("store", "load")
                        )
                        for name in names
                    ),
                ]
            )


def _median(standing: Report, what: str, figure: str = "gib_per_s") -> float:
    median: float = standing["passes"][what][figure]["median"]
    return median


def _with_share(figures: Report) -> str:
    speed = figures["gib_per_s"]
    return f"{_number(speed['median'])} ({speed['of_baseline']:.2f})"


def _head(titles: list[str]) -> Iterator[str]:
    shown = [NAMES.get(title, title) for title in titles]
    yield _row(shown)
    yield "|---" * len(shown) + "|"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= _WHOLE else f"{value:.2g}"


def _size(size: Report) -> str:
    kib = size["block_bytes"] >> 10
    return f"{kib >> 10} MiB" if kib % 1024 == 0 else f"{kib} KiB"


def chats_page(text: str, report: Report) -> str:
    """Return the page with the tables of returning conversations."""
    machine = report["machine"]
    head = (
        f"{machine['date']}: {machine['cores']} x {machine['processor']}, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, {machine['system']}, load "
        f"{machine['load_average']:.1f}; vLLM {machine['vllm']}, kvoffload-async "
        f"{machine['kvoffload_async']}.\n\n"
    )
    head = f"![Time to first token by setup, in each case](images/returning_chats.png)\n\n{head}"
    return _CHATS.sub(lambda _: f"\n{head}{report['table'].strip()}\n\n", text)


def chats_index(text: str, report: Report) -> str:
    """Return the site's first page with the plot and the machine."""
    machine, page = report["machine"], "benchmarks.md#what-a-tier-gains-under-vllm"
    plot = (
        f"[![Time to first token under vLLM, by setup](images/returning_chats.png)]({page})\n\n"
        f"Conversations that return, under vLLM {machine['vllm']} on {machine['cores']} CPU cores. "
        f"A GPU would shorten computing\nand copying; the [benchmarks]({page}) say what carries "
        "over.\n"
    )
    return _CHATS.sub(lambda _: plot, text)


def chats_readme(text: str, report: Report) -> str:
    """Return the README with the median times to the first token, later and after a restart."""
    rows = [row for row in report["figures"] if row["case"] == "steady"]
    most = max(row["concurrency"] for row in rows)
    medians = {
        (row["setup"], row["turns"]): row["p50_s"] for row in rows if row["concurrency"] == most
    }
    none, theirs, fs, slab = (
        f"{medians[setup, 'later turns']:.1f}, {medians[setup, 'after a restart']:.1f}"
        for setup in ("none", "vllm-fs", "fs", "slab")
    )
    cores = report["machine"]["cores"]
    lines = (
        f"First token of returning chats, later, after a restart (vLLM, {cores} cores, "
        f"{most} at once, median seconds):\n"
        f"{none} without a tier; {theirs} with vLLM's host and `fs` tiers; "
        f"{fs} with `fs`, {slab} with `slab` here.\n"
    )
    return _CHATS.sub(lambda _: lines, text)


def main() -> None:
    """Update the benchmarks page and the README."""
    report = json.loads(Path(sys.argv[1]).read_text())
    bench = ((PAGE, page), (README, readme))
    chats = ((PAGE, chats_page), (README, chats_readme), (INDEX, chats_index))
    for path, written in chats if "runs" in report else bench:
        path.write_text(written(path.read_text(), report))


if __name__ == "__main__":
    main()
