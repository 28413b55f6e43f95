"""Pictures of a replay, and the page with them: whole, closed to the network, safe from names."""

import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib import image

from kvoffload_async.replay.source import ChatWorkload

HOSTILE = "<script>alert(1)</script>\"'&$x^$\n\U0001f600\udcff.jsonl".replace("/", "\u2215")
PANELS = (
    "Hit ratio",
    "Bytes and blocks of the tiers",
    "Promotion latency",
    "Primary occupancy",
    "Evictions",
)


class Page(HTMLParser):
    """What a page consists of."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.ids, self.references, self.words = [], [], [], []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.tags.append((tag, values))
        self.ids += [values["id"]] if "id" in values else []
        named = ("src", "href", "xlink:href", "action", "data", "srcset", "poster")
        self.references += [values[name] for name in named if name in values]
        for value in values.values():
            self.references += re.findall(r"url\(([^)]*)\)", value or "")

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(self.words)


def page_of(command, *arguments, exit_code=0):
    path = command.directory / "report.html"
    result = command.run("replay", *arguments, "--report", path)
    assert result.exit_code == exit_code, result.output
    return Page(path)


@pytest.mark.slow
@pytest.mark.measured
def test_a_report_is_one_page_with_every_picture_and_figure(command):
    page = page_of(
        *(command, "--limit", 60, "--primary-blocks", 100, "--passes", 2),
        *("--tier", "example", "--policy", "arc"),
    )
    labels = [values["aria-label"] for tag, values in page.tags if tag == "svg"]
    assert labels == list(PANELS)
    for text in ("first pass", "warm pass", "policy arc", "100 blocks of 16 KiB", "example"):
        assert text in page.text


def test_a_report_loads_nothing_and_its_parts_do_not_mix_up(command):
    page = page_of(command, "--limit", 20, "--tier", "example", "--tier", "example")
    assert page.references
    assert {reference for reference in page.references if not reference.startswith("#")} == set()
    assert len(page.ids) == len(set(page.ids))
    assert {reference.removeprefix("#") for reference in page.references} <= set(page.ids)
    assert not {"script", "link", "img", "iframe", "object", "base"} & {tag for tag, _ in page.tags}
    (policy,) = [each["content"] for tag, each in page.tags if "http-equiv" in each]
    assert policy.startswith("default-src 'none'")


@pytest.mark.slow
@pytest.mark.measured
def test_a_hostile_name_of_a_trace_is_text(command):
    trace = command.trace(list(ChatWorkload(5)))
    hostile = trace.rename(trace.with_name(HOSTILE))
    picture = command.directory / "replay.png"
    page = page_of(command, hostile, "--tier", "example", "--plot", picture)
    assert "script" not in {tag for tag, _ in page.tags}
    assert "<script>alert(1)" in page.text
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.measured
def test_a_picture_of_a_replay_is_drawn_and_not_blank(command):
    picture = command.directory / "replay.png"
    result = command.run("replay", "--limit", 40, "--tier", "example", "--plot", picture)
    assert result.exit_code == 0, result.output
    pixels = image.imread(picture)
    assert min(pixels.shape[:2]) > 1000
    assert 0.01 < np.mean(pixels[..., :3].min(axis=2) < 0.9) < 0.9


@pytest.mark.slow
@pytest.mark.measured
@pytest.mark.parametrize("tiers", [(), ("--tier", "example")])
def test_a_replay_without_a_tier_or_a_promotion_has_pictures(command, tiers):
    trace = command.trace([[1, 2, 3]])
    page = page_of(command, trace, *tiers)
    assert [tag for tag, _ in page.tags].count("svg") == len(PANELS)


@pytest.mark.slow
@pytest.mark.measured
def test_what_was_replayed_before_an_interruption_is_drawn(command, faulty_tiers):
    page = page_of(
        *(command, "--tier", f"Interrupting:module_path={faulty_tiers}"),
        exit_code=130,
    )
    assert "Interrupted" in page.text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--plot", "replay.mp3"), "--plot replay.mp3: '.mp3' is not an image format; use one of"),
        (("--report", "replay.txt"), "--report replay.txt: '.txt' is not a page format; use .html"),
        (("--report", "-"), "--report -: '' is not a page format; use .html"),
        (("--report", "/no/such/r.html"), "--report /no/such/r.html: cannot be written"),
        (("--plot", "/no/such/r.png"), "--plot /no/such/r.png: cannot be written"),
    ],
)
def test_a_place_for_no_picture_is_refused_before_anything_starts(command, arguments, expected):
    folder = command.directory / "new"
    assert expected in command.refusal("replay", "--tier", f"fs:root_dir={folder}", *arguments)
    assert list(command.directory.iterdir()) == []


@pytest.mark.parametrize(("option", "name"), [("--plot", "r.png"), ("--report", "r.html")])
def test_without_matplotlib_the_extra_is_named_before_anything_starts(
    command, monkeypatch, option, name
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "kvoffload_async.replay.plot", raising=False)
    for module in [module for module in sys.modules if module.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, module)
    folder = command.directory / "new"
    message = command.refusal(
        "replay", "--tier", f"fs:root_dir={folder}", option, command.directory / name
    )
    assert f"{option} needs matplotlib" in message
    assert "install kvoffload-async[plot]" in message
    assert list(command.directory.iterdir()) == []


@pytest.mark.slow
@pytest.mark.measured
def test_a_page_that_cannot_be_written_in_the_end_is_an_error(command):
    full = command.directory / "full.html"
    full.symlink_to("/dev/full")
    result = command.run("replay", "--limit", 2, "--tier", "example", "--report", full)
    assert result.exit_code == 2
    assert f"--report {full}: cannot be written: No space left on device" in result.stderr
