"""What a replay says of the engine, against caches simple enough to be right by inspection."""

import json
import signal
import tempfile
from collections import OrderedDict

import pytest
from command_line import interrupt_workload

from kvoffload_async.replay.source import NUM_REQUESTS, ChatWorkload

SMALL = ("--limit", 60, "--primary-blocks", 96)
"""Few requests of the built-in workload, and a primary that is too small for them."""


def lru_hits(requests, capacity):
    """One cache of `capacity` blocks; hits are the blocks of the contiguous head."""
    cache, hits = OrderedDict(), 0
    for blocks in requests:
        present = [block in cache for block in blocks]
        hits += present.index(False) if False in present else len(present)
        for block in reversed(blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


def unbounded_hits(requests):
    return lru_hits(requests, 10**9)


@pytest.mark.parametrize("primary_blocks", [70, 150, 400])
def test_a_primary_alone_has_the_hits_of_one_lru_cache(command, primary_blocks):
    requests = list(ChatWorkload(150, seed=3))
    assert max(map(len, requests)) <= 70
    trace = command.trace(requests)
    report = command.figures(trace, "--primary-blocks", primary_blocks, "--block-bytes", 4096)
    assert report["block_refs"] == sum(map(len, requests))
    assert report["hits"] == {"primary": lru_hits(requests, primary_blocks)}
    assert report["verified_blocks"] == report["hits"]["primary"]
    assert report["jobs_submitted"] == report["job_results"] == 0


@pytest.mark.parametrize(
    ("policy", "concurrency"), [("lru", 1), pytest.param("arc", 16, marks=pytest.mark.slow)]
)
def test_an_unlimited_tier_makes_up_for_a_small_primary(command, policy, concurrency):
    report = command.figures(
        *("--tier", "example", "--policy", policy, "--concurrency", concurrency)
    )
    requests = list(ChatWorkload())
    assert report["requests"] == NUM_REQUESTS
    allowed = 0 if concurrency == 1 else 0.01 * report["block_refs"]
    assert sum(report["hits"].values()) == pytest.approx(unbounded_hits(requests), abs=allowed)
    assert report["hits"]["primary"] > 1000
    assert report["hits"]["example"] > 500
    assert report["hits"]["example"] <= report["tiers"]["example"]["loaded_blocks"]
    assert report["jobs_submitted"] == report["job_results"] > 0
    assert report["job_failures"] == report["corrupt_blocks"] == report["leaked_pins"] == 0


def test_with_four_blocks_per_chunk_a_tier_is_given_and_asked_for_a_quarter_of_the_blocks(command):
    moved = {}
    for per_chunk in (1, 4):
        report = command.figures(
            *("--tier", "example", "--limit", 120, "--primary-blocks", 256 // per_chunk),
            *("--blocks-per-chunk", per_chunk),
        )
        tier = report["tiers"]["example"]
        moved[per_chunk] = tier["stored_blocks"] + tier["loaded_blocks"]
        full_chunks = [len(blocks) // per_chunk for blocks in ChatWorkload(120)]
        assert report["block_refs"] == sum(full_chunks)
        assert report["corrupt_blocks"] == 0
    assert 0 < 4 * moved[4] <= moved[1]


def test_the_built_in_workload_is_the_same_every_time(command):
    def repeatable(report):
        timing = ("wall_s", "block_refs_per_s", "owner_us_per_step", "steps")
        return {key: value for key, value in report.items() if key not in timing}

    first, second = (command.figures("--passes", 1, *SMALL) for _ in range(2))
    assert first["hits"]["fs"] > 0
    assert repeatable(first) == repeatable(second)


def test_figures_agree_with_each_other(command):
    report = command.figures("--tier", "example", "--block-bytes", 100, *SMALL)
    hits = sum(report["hits"].values())
    assert report["hit_ratio"] == hits / report["block_refs"]
    assert report["verified_blocks"] == hits
    assert report["row_bytes"] % 4096 == 0
    assert report["primary_blocks"] == 96
    assert report["bytes_loaded"] == hits * report["row_bytes"]
    stored = report["block_refs"] - hits
    assert report["bytes_stored"] == stored * report["row_bytes"]
    assert report["tiers"]["example"]["stored_blocks"] == stored
    owner = report["owner_us_per_step"]
    assert 0 < owner["p50"] <= owner["p99"] <= owner["max"]
    assert report["block_refs_per_s"] == pytest.approx(report["block_refs"] / report["wall_s"])


def test_evictions_are_counted(command):
    trace = command.trace([[1, 2, 3], [4, 5], [1]])
    report = command.figures(trace, "--primary-blocks", 4)
    assert report["evictions"] == 1
    assert report["hits"] == {"primary": 1}


def test_repeated_blocks_of_a_request_count_as_references_each(command):
    trace = command.trace([[1, 1, 2], [1, 1, 2, 3]])
    report = command.figures(trace)
    assert report["block_refs"] == 7
    assert report["hits"] == {"primary": 3}
    assert report["verified_blocks"] == 2


def test_blocks_behind_the_first_missing_one_are_no_hits(command):
    report = command.figures(command.trace([[1, 2, 3], [9, 2, 3]]))
    assert report["hits"] == {"primary": 0}


def test_a_request_larger_than_the_primary_stores_its_head(command):
    report = command.figures(command.trace([range(10), range(10)]), "--primary-blocks", 4)
    assert report["hits"] == {"primary": 4}
    assert report["stores_refused"] == 2  # the tail of each: the primary is full of its own head


def test_a_request_without_blocks_is_a_request(command):
    report = command.figures(command.trace([[], [1]]))
    assert (report["requests"], report["block_refs"]) == (2, 1)


def test_limit_cuts_the_trace(command):
    assert command.figures(command.trace([[1], [2], [3]]), "--limit", 2)["requests"] == 2


def test_two_tiers_of_one_type_are_told_apart(command):
    report = command.figures("--tier", "example", "--tier", "example", *SMALL)
    assert list(report["hits"]) == ["primary", "example", "example#2"]
    assert report["hits"]["example"] > 0
    assert report["hits"]["example#2"] == 0
    assert report["tiers"]["example#2"]["stored_blocks"] > 0


@pytest.mark.parametrize("tier", ["BitFlip", "Swapped", "Stale"])
def test_a_tier_that_hands_back_wrong_bytes_is_found_out(command, faulty_tiers, tier):
    spec = f"{tier}:module_path={faulty_tiers}"
    result = command.run("replay", "--tier", spec, "--json", "-", *SMALL)
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    assert report["corrupt_blocks"] > 0
    assert "loaded blocks had wrong bytes" in result.stderr
    assert report["leaked_pins"] == 0


def test_a_tier_that_fails_costs_hits_and_nothing_else(command, faulty_tiers):
    report = command.figures("--tier", f"Unplugged:module_path={faulty_tiers}", *SMALL)
    assert report["job_failures"] > 0
    assert report["hits"]["Unplugged"] == 0
    assert report["jobs_submitted"] == report["job_results"]
    assert report["corrupt_blocks"] == report["leaked_pins"] == 0


def test_a_tier_that_cannot_be_opened_is_one_line(command, faulty_tiers):
    line = command.refusal("replay", "--tier", f"Closed:module_path={faulty_tiers}")
    assert "nobody there" in line


def test_a_tier_that_cannot_be_closed_fails_the_replay(command, faulty_tiers):
    tier = f"Jammed:module_path={faulty_tiers}"
    result = command.run("replay", "--tier", tier, "--json", "-", *SMALL)
    assert result.exit_code == 1
    assert "jammed" in result.stderr


def test_the_table_says_what_the_json_says(command):
    path = command.directory / "report.json"
    result = command.run("replay", "--json", path, *SMALL)
    report = json.loads(path.read_text())
    assert result.exit_code == 0
    assert f"{report['block_refs']:,}" in result.stdout
    assert f"{report['hit_ratio']:.4f}" in result.stdout
    assert f"{report['hits']['fs']:,}" in result.stdout
    assert f"{report['warm']['hits']['fs']:,}" in result.stdout
    assert result.stderr == ""


def test_the_table_of_a_primary_alone_has_no_tiers(command):
    result = command.run("replay", command.trace([[1], [1]]))
    assert result.exit_code == 0
    assert "0.5000" in result.stdout
    assert "Secondary tiers" not in result.stdout


def test_ctrl_c_before_the_first_request(command, faulty_tiers):
    tier = f"Interrupting:module_path={faulty_tiers}"
    report = command.figures("--tier", tier, exit_code=130)
    assert report["interrupted"]
    assert report["requests"] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_it_leaves_no_temporary_directory(command, monkeypatch, number):
    monkeypatch.setattr(tempfile, "tempdir", str(command.directory))
    interrupt_workload(monkeypatch, number)
    before = signal.signal(number, signal.SIG_DFL)  # whoever runs the tests may ignore it
    try:
        result = command.run("replay", "--json", "-")
    finally:
        signal.signal(number, before)
    assert result.exit_code == 128 + number
    assert json.loads(result.stdout)["requests"] == 5
    assert list(command.directory.iterdir()) == []


def test_the_queue_and_its_prefetch_are_printed(command):
    trace = command.file('{"timestamp": 0, "hash_ids": [1]}\n' * 3, "timed.jsonl")
    options = ("replay", trace, "--tier", "example", "--arrivals", 1)
    shown = command.run(*options).stdout
    assert "in the queue" in shown
    assert "prefetched / used / in vain" in shown
    shown = command.run(*options, "--no-prefetch").stdout
    assert "in the queue" in shown
    assert "prefetched" not in shown
    assert "in the queue" not in command.run(*options[:-2]).stdout


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--arrivals", "2"), "--arrivals: these requests have no timestamps; give a trace"),
        (("--no-prefetch",), "--no-prefetch: no request waits; give --arrivals, too"),
        (("--arrivals", "0"), "--arrivals"),
    ],
)
def test_a_queue_that_cannot_be_is_refused(command, options, complaint):
    assert complaint in command.refusal("replay", "--limit", "2", *options)


@pytest.mark.parametrize("engine", ["sync", "async"])
def test_a_time_of_arrival_that_decreases_names_its_line(command, engine):
    times = '{"timestamp": 5, "hash_ids": [1]}\n{"timestamp": 4, "hash_ids": [1]}\n'
    options = (command.file(times, "timed.jsonl"), "--arrivals", "9", "--engine", engine)
    complaint = "line 2: timestamp 4 is less than the one before, 5; sort the trace"
    assert complaint in command.refusal("replay", *options)
