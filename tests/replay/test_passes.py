"""Several passes over the same tiers: the built-in default, and on demand."""

import dataclasses
import json
import signal
import tempfile
from pathlib import Path

import pytest

from kvoffload_async.cli.settings import ReplayFlags, ScratchFolder, resolve
from kvoffload_async.replay.drivers import ReplayOptions
from kvoffload_async.replay.run import PassReports, replay
from kvoffload_async.replay.source import ChatWorkload


@pytest.fixture
def temp_dir(tmp_path, monkeypatch):
    """Where temporary directories are made while the test runs."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


def test_the_built_in_workload_runs_twice_over_files_that_are_gone_afterwards(command, temp_dir):
    report = command.figures("--limit", 100)
    warm = report.pop("warm")
    assert report.keys() == warm.keys()
    assert report["requests"] == warm["requests"] == 100
    assert list(report["hits"]) == list(warm["hits"]) == ["primary", "fs"]
    assert 0.5 < report["hit_ratio"] < 0.9
    assert warm["hit_ratio"] > 0.999
    assert warm["hits"]["fs"] > report["hits"]["fs"] > 0
    for figures in (report, warm):
        assert figures["corrupt_blocks"] == figures["leaked_pins"] == 0
        assert figures["verified_blocks"] == sum(figures["hits"].values())
        assert figures["jobs_submitted"] == figures["job_results"] > 0
    assert list(temp_dir.iterdir()) == []


def test_its_directory_goes_when_a_flag_is_wrong_as_well(command, temp_dir):
    command.refusal("replay", "--policy", "lur")
    assert list(temp_dir.iterdir()) == []


def test_its_directory_goes_when_the_tier_cannot_be_opened(command, temp_dir, monkeypatch):
    def fail(*_arguments, **_options):
        raise OSError("nothing works")

    monkeypatch.setattr("kvoffload_async.facade.spec.PrimaryBuffer", fail)
    assert "nothing works" in command.refusal("replay")
    assert list(temp_dir.iterdir()) == []


@pytest.mark.usefixtures("interrupted_workload")
def test_ctrl_c_ends_the_passes_and_the_directory_goes(command, temp_dir):
    report = command.figures(exit_code=130)
    assert report["interrupted"]
    assert 0 < report["requests"] < 10
    assert "warm" not in report
    assert list(temp_dir.iterdir()) == []


def test_a_second_ctrl_c_leaves_no_directory_either(command, temp_dir, monkeypatch):
    def requests(_source):
        yield [1]
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(ChatWorkload, "_requests", requests)
    assert command.run("replay").exit_code == 130
    assert list(temp_dir.iterdir()) == []


def test_a_scratch_folder_that_nobody_asks_for_is_not_made(temp_dir):
    with ScratchFolder() as scratch:
        assert not scratch.is_used
        assert list(temp_dir.iterdir()) == []
    with ScratchFolder() as scratch:
        assert Path(scratch.path).is_dir()
        assert scratch.path == scratch.path
        assert scratch.is_used
    assert list(temp_dir.iterdir()) == []


@pytest.mark.parametrize(
    "arguments", [["--tier", "example"], ["--passes", "1"], ["--config", "TIERLESS"]]
)
def test_one_pass_is_all_that_others_get_unless_they_ask(command, arguments):
    config = command.config(secondary_tiers=[])
    arguments = [str(config) if a == "TIERLESS" else a for a in arguments]
    assert "warm" not in command.figures("--limit", 20, *arguments)


def test_a_trace_is_read_again_by_every_pass(command):
    trace = command.trace([[1, 2], [3, 4]])
    root = command.directory / "store"
    report = command.figures(trace, "--tier", f"fs:root_dir={root}", "--passes", 3)
    later = report["later_passes"]
    assert [report["hit_ratio"], report["warm"]["hit_ratio"]] == [0, 1]
    assert [figures["hit_ratio"] for figures in later] == [1]
    assert list(root.iterdir())


@pytest.mark.parametrize(
    ("tier", "others"),
    [
        ("fs:root_dir={}", [",namespace=other", ",fingerprint=other", ",model=org/other"]),
        ("slab:capacity_bytes=1MiB,root_dir={}", [",model=org/other"]),
    ],
)
def test_a_later_replay_over_the_same_directory_finds_its_blocks(command, tier, others):
    trace = command.trace([[1, 2], [3, 4]])
    tier = tier.format(command.directory / "store")

    def hit_ratio(option=""):
        return command.figures(trace, "--tier", tier + option)["hit_ratio"]

    assert hit_ratio() == 0
    assert hit_ratio() == 1
    assert not any(hit_ratio(option) for option in others)
    assert hit_ratio() == 1


def test_a_tier_that_forgets_is_cold_in_every_pass(command):
    report = command.figures("--tier", "example", "--passes", 2, "--limit", 50)
    assert report["warm"]["hits"] == report["hits"]


def test_the_table_has_a_column_a_pass(command):
    result = command.run("replay", "--limit", 30, "--passes", 3)
    assert result.exit_code == 0
    for name in ("first pass", "warm pass", "pass 3"):
        assert name in result.stdout
    assert result.stderr == ""


def test_complaints_of_later_passes_say_which_pass():
    spec = resolve(ReplayFlags(tiers=["example"]), ScratchFolder())
    good = replay(spec, ChatWorkload(limit=3), ReplayOptions())
    bad = dataclasses.replace(good, corrupt_blocks=1)
    complaint = "1 loaded blocks had wrong bytes"
    assert PassReports((good, good)).complaints == []
    assert PassReports((bad, good, bad)).complaints == [complaint, f"pass 3: {complaint}"]
    assert json.loads(PassReports((good,)).to_json()) == good.to_dict()


def test_the_tables_of_one_pass_name_no_passes(command):
    result = command.run("replay", "--tier", "example", "--limit", 30)
    assert result.exit_code == 0
    assert "Secondary tiers" in result.stdout
    assert "pass" not in result.stdout
