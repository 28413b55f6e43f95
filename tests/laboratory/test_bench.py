"""`bench` of the laboratory: peers, the table that compares with them, and the plot."""

import json
import sys

import pytest
from bench.witnesses import SMALL
from rich.console import Console

from kvoffload_async.bench import Plan, run_bench
from kvoffload_async.bench.contender import Contender, OpenTier
from kvoffload_async.facade.secondary import ExampleSecondaryTierManager
from laboratory.bench import relative_table
from laboratory.peers import PEERS, Entry

PLAN = Plan.parse("4KiB,8KiB", "8KiB", keys_per_job=1, one_job=2, in_flight=2, rounds=1, threads=2)


class FakePeer(Contender):
    """Another engine's tier, though it is one of this package's."""

    def __init__(self, name, options, place):
        self.name, self.options, self.place = name, options, place

    def capacity_bytes(self, stored_bytes):
        return None

    def open(self, view, directory, stored_bytes):
        return OpenTier(ExampleSecondaryTierManager(None, view))


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setitem(PEERS, "fake", Entry(FakePeer, ("speed",), "buy one"))


def test_a_peer_is_measured_beside_and_compared_with(command, fake):
    result = command.run(
        *("bench", "--block-bytes", "4KiB", *SMALL, "--json", command.directory / "bench.json"),
        *("--tier", "example", "--peer", "fake:speed=3"),
    )
    assert result.exit_code == 0, result.output
    report = json.loads((command.directory / "bench.json").read_text())
    assert report["contenders"]["fake"]["options"] == {"speed": 3}
    ours, theirs = (
        report["sizes"][0]["contenders"][name]["passes"] for name in ("example", "fake")
    )
    assert ours.keys() == theirs.keys()
    (line,) = (line for line in result.stdout.splitlines() if "example / fake" in line)
    first = ours["store"]["gib_per_s"]["median"] / theirs["store"]["gib_per_s"]["median"]
    assert line.split("fake")[1].split()[0] == f"{first:.3g}"


def test_without_a_tier_the_peer_alone_is_measured_and_compared_with_nothing(command, fake):
    small = ("--block-bytes", "4KiB", *SMALL, "--rounds", "1")
    result = command.run("bench", *small, "--peer", "fake")
    assert result.exit_code == 0, result.output
    assert "fake" in result.stdout
    assert "/ fake" not in result.stdout
    assert "slab" not in result.stdout


def test_every_contender_is_compared_with_every_other_that_is_a_peer():
    report = run_bench(PLAN, [{"type": "example"}], [FakePeer("a", {}, None)])
    console = Console(width=200)
    with console.capture() as captured:
        console.print(relative_table(report, ["a"]))
    rows = [line for line in captured.get().splitlines() if " / " in line]
    assert [row.split()[:5] for row in rows] == [
        ["4", "KiB", "example", "/", "a"],
        ["8", "KiB", "example", "/", "a"],
    ]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--peer", "vllm-fss"], "did you mean 'vllm-fs'?"),
        (["--peer", "vllm-fs:verify=off"], "unknown key 'verify'"),
        (["--peer", "vllm-fs:root_dir=3"], "root_dir: 3 is not valid; give a path"),
        (["--peer", ":a=1"], "--peer: no type"),
        (["--plot", "picture.mp3"], "'.mp3' is not an image format; use one of"),
        (["--plot", "picture"], "'' is not an image format"),
        (["--plot", "/no/such/folder/bench.png"], "--plot /no/such/folder/bench.png: cannot be"),
    ],
)
def test_nonsense_is_refused_with_the_key_and_the_remedy(command, monkeypatch, arguments, reason):
    monkeypatch.setattr("tempfile.tempdir", str(command.directory))
    assert reason in command.refusal("bench", *arguments)
    assert list(command.directory.iterdir()) == []


def test_without_vllm_its_peer_says_how_to_install_it(command, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not installed
    message = command.refusal("bench", "--peer", "vllm-fs")
    assert "--peer vllm-fs cannot be measured here" in message
    assert "pip install vllm" in message


def test_without_matplotlib_the_extra_is_named_before_anything_starts(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "laboratory.plot", raising=False)
    for name in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, name)
    folder = command.directory / "new"
    message = command.refusal(
        *("bench", "--tier", f"fs:root_dir={folder}"),
        *("--plot", command.directory / "bench.png"),
    )
    assert "install kvoffload-async[plot]" in message
    assert list(command.directory.iterdir()) == []


@pytest.mark.slow
def test_a_plot_is_a_picture(command):
    path = command.directory / "bench.png"
    result = command.run(
        *("bench", "--block-bytes", "4KiB,8KiB", *SMALL, "--tier", "example", "--tier", "fs"),
        *("--plot", path, "--json", command.directory / "bench.json"),
    )
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG")
    assert json.loads((command.directory / "bench.json").read_text())["sizes"]


def test_the_legend_of_a_plot_is_outside_the_panels_and_hides_no_point(monkeypatch, tmp_path):
    plot = pytest.importorskip("laboratory.plot")
    drawn = []

    class Kept(plot.Canvas):
        def __init__(self, **options):
            super().__init__(**options)
            drawn.append(self)

    monkeypatch.setattr(plot, "Canvas", Kept)
    plot.draw(run_bench(PLAN, [{"type": "example"}]), tmp_path / "bench.png")
    (canvas,) = drawn
    (legend,) = canvas.legends
    box = legend.get_window_extent()
    assert [text.get_text() for text in legend.get_texts()].count("example") == 1
    for axes in canvas.axes:
        assert axes.get_legend() is None
        assert not box.overlaps(axes.get_tightbbox())
