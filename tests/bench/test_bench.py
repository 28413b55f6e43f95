"""`kvoffload bench`: its figures, what they stand beside, and what it leaves behind."""

import functools
import json
from datetime import datetime, timedelta

import pytest
from bench.witnesses import SMALL
from command_line import Command

from kvoffload_async.block_io.choice import implementation
from kvoffload_async.config import suitable_threads
from kvoffload_async.facade.secondary import FileSystemTierManager, SecondaryTierManager

PASSES = {"store", "load", "store_one_job", "load_one_job"}
KINDS = ["native", "plain"] if implementation().name == "native" else ["plain"]
"""Of baselines; the first is the one that counts."""
FLOOR_FIGURES = {
    *("gib_per_s", "cpu_s_per_gib", "wall_us_per_job", "wall_us_per_key"),
    *("job_ms_p50", "job_ms_p90", "job_ms_p99"),
}
OWNER_FIGURES = {
    *("owner_us_per_job", "owner_us_per_key", "submit_us_per_job", "submit_us_per_key"),
}


def test_every_figure_is_there_for_every_block_size_and_pass(bench, place):
    report = bench("--tier", f"fs:root_dir={place}", "--block-bytes", "4KiB,8KiB")
    assert not report["interrupted"]
    assert report["settings"] == {
        "total_bytes": 128 * 1024,
        "keys_per_job": 4,
        "one_job": 8,
        "in_flight": 16,
        "rounds": 2,
        "threads": 2,
        "steady": False,
        "warm_up": True,
    }
    machine = report["machine"]
    assert machine["processors"] > 0
    assert machine["processor"]
    assert machine["load_average"] >= 0
    assert machine["block_io"] == str(implementation())
    assert datetime.fromisoformat(machine["date"]).utcoffset() == timedelta(0)
    assert report["contenders"] == {
        "fs": {
            "options": {"root_dir": str(place)},
            "directory": str(place),
            "baseline": {"directory": str(place), "kind": KINDS[0]},
        }
    }
    assert [size["block_bytes"] for size in report["sizes"]] == [4096, 8192]
    assert [size["num_jobs"] for size in report["sizes"]] == [8, 4]
    for size in report["sizes"]:
        assert size["keys_per_job"] == 4
        assert size["one_job_keys"] == 8
        assert size["memcpy"].keys() == FLOOR_FIGURES
        baselines = size["baselines"][str(place)]
        assert list(baselines) == KINDS
        for passes in baselines.values():
            assert {what: f.keys() for what, f in passes.items()} == dict.fromkeys(
                PASSES, FLOOR_FIGURES
            )
        standing = size["contenders"]["fs"]
        assert standing["verified_blocks"] == 2 * (size["num_jobs"] * 4 + 8)
        assert standing["wrong_blocks"] == standing["failed_jobs"] == 0
        passes = standing["passes"]
        assert passes.keys() == PASSES | {"at_rest"}
        for what in PASSES:
            assert passes[what].keys() == FLOOR_FIGURES | OWNER_FIGURES | {"switches_per_job"}
        assert passes["at_rest"].keys() == {"idle_poll_us", "lookup_us"}
        measured = [figures for kind in baselines.values() for figures in kind.values()]
        for figures in (*passes.values(), size["memcpy"], *measured):
            for figure in figures.values():
                assert figure["low"] <= figure["median"] <= figure["high"]


def test_a_ratio_is_the_quotient_of_the_two_medians_that_it_names(bench, place):
    (size,) = bench("--tier", f"fs:root_dir={place}")["sizes"]
    baselines = size["baselines"][str(place)]
    for what in PASSES:
        figures = size["contenders"]["fs"]["passes"][what]
        beside = {
            "of_baseline": baselines[KINDS[0]][what],
            "of_plain": baselines["plain"][what],
            "of_memcpy": size["memcpy"],
        }
        assert figures.pop("switches_per_job")["of_baseline"] is None
        for name, figure in figures.items():
            other = name.replace("owner_", "wall_").replace("submit_", "wall_")
            for ratio, parts in beside.items():
                assert figure[ratio] == pytest.approx(figure["median"] / parts[other]["median"])
        for passes in baselines.values():
            for name, figure in passes[what].items():
                assert figure["of_baseline"] is figure["of_plain"] is figure["of_recycling"] is None
                memcpy = size["memcpy"][name]["median"]
                assert figure["of_memcpy"] == pytest.approx(figure["median"] / memcpy)


def test_without_native_code_the_plain_baseline_counts(bench, place, monkeypatch):
    monkeypatch.setenv("KVOFFLOAD_NATIVE", "0")
    report = bench("--tier", f"fs:root_dir={place}", "--rounds", "1")
    assert report["machine"]["block_io"] == "python (KVOFFLOAD_NATIVE=0)"
    assert report["contenders"]["fs"]["baseline"] == {"directory": str(place), "kind": "plain"}
    (size,) = report["sizes"]
    assert list(size["baselines"][str(place)]) == ["plain"]
    speed = size["contenders"]["fs"]["passes"]["load"]["gib_per_s"]
    assert speed["of_baseline"] == speed["of_plain"]


def test_figures_agree_with_each_other(bench):
    (size,) = bench("--tier", "example", "--rounds", "1")["sizes"]
    for passes in (size["contenders"]["example"]["passes"], {"copy": size["memcpy"]}):
        for what in passes.keys() - {"at_rest"}:
            figures = {name: figure["median"] for name, figure in passes[what].items()}
            num_keys, num_jobs = (8, 1) if what.endswith("one_job") else (32, 8)
            wall_s = num_keys * 4096 / 2**30 / figures["gib_per_s"]
            assert figures["wall_us_per_job"] == pytest.approx(wall_s / num_jobs * 1e6)
            assert figures["wall_us_per_key"] == pytest.approx(wall_s / num_keys * 1e6)
            assert figures["job_ms_p50"] <= figures["job_ms_p90"] <= figures["job_ms_p99"]
            assert figures["job_ms_p99"] <= wall_s * 1e3 * 1.000001
            if "owner_us_per_job" in figures:
                keys = num_keys / num_jobs
                assert figures["owner_us_per_job"] <= figures["wall_us_per_job"]
                assert figures["submit_us_per_job"] <= figures["owner_us_per_job"] * num_jobs
                for kind in ("owner", "submit"):
                    assert figures[f"{kind}_us_per_key"] * keys == pytest.approx(
                        figures[f"{kind}_us_per_job"]
                    )


def test_a_tier_in_memory_stands_beside_memcpy(bench):
    report = bench("--tier", "example")
    (size,) = report["sizes"]
    assert size["baselines"] == {}
    assert report["contenders"]["example"]["baseline"] is None
    speed = size["contenders"]["example"]["passes"]["load"]["gib_per_s"]
    assert speed["of_baseline"] == speed["of_memcpy"]


@pytest.mark.slow
def test_tiers_on_one_filesystem_stand_beside_one_baseline(bench, place):
    (place / "a").mkdir()
    report = bench("--tier", f"fs:root_dir={place}/a", "--tier", f"fs:root_dir={place}/b")
    assert list(report["sizes"][0]["baselines"]) == [f"{place}/a"]
    assert [facts["baseline"] for facts in report["contenders"].values()] == [
        {"directory": f"{place}/a", "kind": KINDS[0]}
    ] * 2


@pytest.mark.slow
def test_tiers_of_one_name_are_numbered(bench, place):
    tier = f"fs:root_dir={place},verify="
    report = bench("--tier", tier + "off", "--tier", "example", "--tier", tier + "required")
    assert list(report["contenders"]) == ["fs#1", "example", "fs#2"]
    assert report["contenders"]["fs#2"]["options"]["verify"] == "required"


def test_without_a_large_job_there_are_no_figures_of_one(bench):
    (size,) = bench("--tier", "example", "--one-job", "0")["sizes"]
    assert size["one_job_keys"] == 0
    assert size["contenders"]["example"]["passes"].keys() == {"store", "load", "at_rest"}


def test_a_large_job_has_no_more_blocks_than_the_total_has(bench):
    (size,) = bench("--tier", "example", "--one-job", "1000")["sizes"]
    assert size["one_job_keys"] == 32


@pytest.mark.slow
def test_every_turn_begins_on_an_empty_directory_of_its_own(bench, place, witnesses):
    options = f"module_path={witnesses},root_dir={place}"
    bench("--tier", f"Witness:{options}", "--tier", f"Second:{options}")
    opened = __import__(witnesses).opened
    # One rehearsal, then round after round: everybody in turn.
    assert [name for name, _, _ in opened] == ["Witness", "Second"] * 3
    assert [found for _, _, found in opened] == [[]] * 6
    assert len({folder for _, folder, _ in opened}) == 6


@pytest.mark.slow
@pytest.mark.parametrize("given", ["", ",capacity_bytes=1MiB"])
def test_a_steady_tier_is_full_before_it_is_measured(bench, place, monkeypatch, given):
    """Once as the bench sizes it: 160 KiB a round, a quarter more, and 16 MiB."""
    count = 0
    submit = SecondaryTierManager.submit_store

    def counting(self, job):
        nonlocal count
        count += len(job.keys) * 4096
        submit(self, job)

    monkeypatch.setattr(SecondaryTierManager, "submit_store", counting)
    options = ("--rounds", "1", "--steady", "--no-warm-up")
    report = bench("--tier", f"slab:root_dir={place},segment_bytes=1MiB{given}", *options)
    assert report["settings"]["steady"]
    assert not report["settings"]["warm_up"]
    capacity = 2**20 if given else 160 * 1024 * 5 // 4 + 2**24
    fills = -(-capacity // (128 * 1024))
    assert count == 4096 + fills * 128 * 1024 + 160 * 1024
    (size,) = report["sizes"]
    standing, baselines = size["contenders"]["slab"], size["baselines"][str(place)]
    assert standing["failed_jobs"] == standing["wrong_blocks"] == 0
    assert list(baselines) == [*KINDS, "recycling"]
    for what in ("store", "load"):
        speed = standing["passes"][what]["gib_per_s"]
        for ratio, kind in (("of_recycling", "recycling"), ("of_plain", "plain")):
            floor = baselines[kind][what]["gib_per_s"]["median"]
            assert speed[ratio] == pytest.approx(speed["median"] / floor)


@pytest.mark.slow
def test_each_round_opens_fills_and_closes_a_store(bench, place, monkeypatch):
    opened, closed, stored = [], [], 0
    manager = FileSystemTierManager
    init, submit, shutdown = manager.__init__, manager.submit_store, manager.shutdown

    def counting(self, job):
        nonlocal stored
        stored += len(job.keys) * 4096
        submit(self, job)

    @functools.wraps(init)
    def opening(self, *args, **options):
        opened.append(options["root_dir"])
        init(self, *args, **options)

    def closing(self, *args, **options):
        closed.append(self)
        return shutdown(self, *args, **options)

    monkeypatch.setattr(manager, "__init__", opening)
    monkeypatch.setattr(manager, "submit_store", counting)
    monkeypatch.setattr(manager, "shutdown", closing)
    options = ("--rounds", "3", "--steady", "--no-warm-up")
    report = bench("--tier", f"fs:root_dir={place},capacity_bytes=1MiB", *options)
    assert len(closed) == len(opened) == 1 + 3, "the rehearsal has its own"
    assert len(set(opened)) == len(opened)
    assert stored == 4096 + 3 * (8 * 128 + 160) * 1024
    standing = report["sizes"][0]["contenders"]["fs"]
    assert standing["failed_jobs"] == standing["wrong_blocks"] == 0
    assert list(place.iterdir()) == []


def test_what_it_wrote_is_gone_and_what_others_wrote_is_not(bench, place, witnesses):
    (place / "precious").write_text("mine")
    bench("--tier", f"Witness:module_path={witnesses},root_dir={place}")
    assert [path.name for path in place.iterdir()] == ["precious"]
    assert (place / "precious").read_text() == "mine"


def test_directories_that_it_made_are_gone_too(bench, place):
    bench("--tier", f"fs:root_dir={place}/new/and/deeper")
    assert list(place.iterdir()) == []


def test_without_a_directory_a_temporary_one_is_used(bench, place, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(place))
    report = bench("--tier", "fs")
    assert report["contenders"]["fs"]["directory"] == str(place)
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("tier", "complaint"),
    [
        ("SoonForgetful", "wrong_blocks loaded blocks were wrong"),
        ("SoonBroken", "failed_jobs jobs failed: worn out"),
    ],
)
def test_a_tier_that_does_wrong_is_reported_with_exit_status_1(command, witnesses, tier, complaint):
    result = command.run(
        *("bench", "--block-bytes", "4KiB", *SMALL, "--json", "-"),
        *("--tier", f"{tier}:module_path={witnesses}"),
    )
    assert result.exit_code == 1
    standing = json.loads(result.stdout)["sizes"][0]["contenders"][tier]
    expected = {"wrong_blocks": "80 loaded", "failed_jobs": "18 jobs"}
    what = complaint.split()[0]
    assert f"{tier}, blocks of 4096 bytes: {expected[what]}" in result.stderr
    assert standing[what] == int(expected[what].split()[0])


def test_after_ctrl_c_it_stops_between_turns_and_cleans_up(command, place, witnesses):
    result = command.run(
        *("bench", "--block-bytes", "4KiB", *SMALL),
        *("--tier", f"Interrupted:module_path={witnesses},root_dir={place}", "--tier", "example"),
    )
    assert result.exit_code == 130
    assert result.stdout == ""
    assert list(place.iterdir()) == []


def test_block_sizes_that_were_done_before_ctrl_c_are_reported(command, place, witnesses):
    result = command.run(
        *("bench", "--block-bytes", "4KiB,8KiB", *SMALL, "--rounds", "1", "--json", "-"),
        *("--tier", f"Interrupted:module_path={witnesses},root_dir={place}"),
    )
    assert result.exit_code == 130
    report = json.loads(result.stdout)
    assert report["interrupted"]
    assert [size["block_bytes"] for size in report["sizes"]] == [4096]


def test_the_packages_own_command_has_the_plans_defaults(tmp_path):
    options = ("--block-bytes", "4KiB", "--total-bytes", "128KiB", "--rounds", "1")
    result = Command(tmp_path).run("bench", *options, "--tier", "example", "--json", "-")
    assert result.exit_code == 0, result.output
    settings = json.loads(result.stdout)["settings"]
    assert settings == {
        "total_bytes": 128 * 1024,
        "keys_per_job": 16,
        "one_job": 256,
        "in_flight": 16,
        "rounds": 1,
        "threads": suitable_threads(),
        "steady": False,
        "warm_up": True,
    }


def test_for_people_there_are_tables(command):
    small = ("--block-bytes", "4KiB,16KiB", *SMALL, "--rounds", "1")
    result = command.run("bench", *small, "--tier", "fs")
    assert result.exit_code == 0, result.output
    for text in (
        "Store",
        "Load, one large job",
        "memcpy",
        *(f"base, {kind}" for kind in KINDS),
        "switches",
        "16 KiB",
    ):
        assert text in result.stdout
    assert "compared with the stored one" in " ".join(result.stdout.split())
