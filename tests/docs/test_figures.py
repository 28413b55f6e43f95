"""The tool that writes a bench's figures into the documentation."""

import json
import re
import runpy
from pathlib import Path

import pytest

from kvoffload_async.bench import Plan, run_bench

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool():
    return runpy.run_path(str(ROOT / "docs/_tools/figures.py"))


@pytest.fixture(scope="module")
def report():
    plan = Plan.parse(
        "64KiB,4MiB", "4MiB", keys_per_job=1, one_job=2, in_flight=2, rounds=1, threads=2
    )
    return json.loads(run_bench(plan, [{"type": "slab"}, {"type": "fs"}]).to_json())


def test_the_page_gets_a_table_of_every_pass_and_the_same_again(tool, report):
    text = (ROOT / "docs/benchmarks.md").read_text()
    written = tool["page"](text, report)
    figures = written.split("<!-- figures -->")[1].split("<!-- /figures -->")[0]
    assert written.replace(figures, "\n") == text.replace(
        text.split("<!-- figures -->")[1].split("<!-- /figures -->")[0], "\n"
    )
    for title in (
        "store |",
        "load |",
        "store, one job of 2 blocks |",
        "load, one job of 2 blocks |",
    ):
        assert f"| GiB/s, {title} " in figures
    speed = report["sizes"][1]["contenders"]["slab"]["passes"]["load"]["gib_per_s"]
    assert f"| {speed['median']:.2g} ({speed['of_baseline']:.2f}) |" in figures
    assert figures.count("| 64 KiB |") == figures.count("| 4 MiB |") == 7
    assert report["machine"]["date"][:10] in figures
    assert tool["page"](written, report) == written


def test_figures_of_returning_chats_are_written_into_the_page_and_the_readme(tool):
    machine = {"date": "2026-01-02", "cores": 2, "processor": "P", "memory_bytes": 2**34}
    machine |= {"system": "S", "load_average": 1.0, "vllm": "0.32.0", "kvoffload_async": "9"}
    rows = [
        {"case": case, "turns": turns, "setup": setup, "concurrency": 4, "p50_s": factor * seconds}
        for case, turns, factor in (
            *(("steady", "later turns", 1), ("steady", "after a restart", 2)),
            ("bound", "later turns", 9),
        )
        for setup, seconds in (("none", 8), ("vllm-fs", 4), ("fs", 3), ("slab", 2))
    ]
    report = {"machine": machine, "table": "A table\n", "figures": rows, "runs": []}
    text = (ROOT / "docs/benchmarks.md").read_text()
    written = tool["chats_page"](text, report)
    assert "2 x P, 16 GiB, S, load 1.0; vLLM 0.32.0" in written
    assert "\nA table\n" in written
    assert tool["chats_page"](written, report) == written
    first = tool["chats_index"]((ROOT / "docs/index.md").read_text(), report)
    assert "images/returning_chats.png" in first
    assert "vLLM 0.32.0 on 2 CPU cores" in first
    line = tool["chats_readme"]((ROOT / "README.md").read_text(), report)
    assert "8.0, 16.0 without a tier; 4.0, 8.0 with vLLM's" in line
    assert "3.0, 6.0 with `fs`, 2.0, 4.0 with `slab`" in line


def test_every_figure_of_the_readmes_table_belongs_to_one_tier():
    text = (ROOT / "README.md").read_text()
    (head,) = re.findall(r"^\| \| .*\|$", text, re.MULTILINE)
    columns = [cell.strip() for cell in head.strip("|").split("|")]
    assert columns == ["", "`slab` here", "`fs` here", "vLLM 0.33, `fs`", "LMCache 0.5.6, files"]
    rows = re.findall(r"^\| (?:store|load), .*$", text, re.MULTILINE)
    assert [row.count("GiB/s") for row in rows] == [4, 4]


def test_the_readme_gets_the_speeds_of_the_smallest_and_the_largest_blocks(tool, report):
    text = (ROOT / "README.md").read_text()
    written = tool["readme"](text, report)
    expected = "| load, 64 KiB and 4 MiB blocks |"
    for tier in ("slab", "fs"):  # each in its own column
        low, high = (
            f"{size['contenders'][tier]['passes']['load']['gib_per_s']['median']:.2g}"
            for size in report["sizes"]
        )
        expected += f" {low} and {high} GiB/s, verified |"
    lines = written.splitlines()
    (line,) = [each for each in lines if each.startswith("| load, ")]
    assert line == f"{expected} not measured | not measured |"
    assert len(lines) == len(text.splitlines())
    assert sum(a != b for a, b in zip(lines, text.splitlines(), strict=True)) <= 2
