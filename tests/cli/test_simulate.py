"""`kvoffload simulate`: what it prints, and how it ends on bad input."""

import json

import pytest

from kvoffload_async.replay.source import ChatWorkload

TRACE = list(ChatWorkload(80, seed=3))
TIER = ("--tier-blocks", "500")


def test_rows_as_json_equal_a_replay(command):
    trace = command.trace(TRACE)
    options = ("--policy", "lru,hd", "--capacity", "80,200", "--json", "-")
    shown = json.loads(command.run("simulate", trace, *options).stdout)
    assert [(row["policy"], row["capacity"]) for row in shown["rows"]] == [
        *(("lru", 80), ("hd", 80), ("lru", 200), ("hd", 200))
    ]
    for row in shown["rows"]:
        report = command.figures(
            trace,
            *("--primary-blocks", row["capacity"], "--block-bytes", 4096),
            *("--policy", row["policy"]),
        )
        assert report["hit_ratio"] == pytest.approx(row["prefix_hit_ratio"])
        assert report["block_hits"] == round(row["hit_ratio"] * report["block_refs"])


def test_the_table_and_the_least_capacity_are_printed(command):
    shown = command.run("simulate", command.trace(TRACE), "--warm-half").stdout
    assert "gap closed" in shown
    assert "LRU finds 90 % of that from" in " ".join(shown.split())
    assert "40 requests" in shown


def test_blocks_of_the_trace_form_chunks(command):
    options = ("--capacity", "90", "--tier-blocks", "500", "--json", "-")
    chunks = command.trace([blocks[3::4] for blocks in TRACE])
    expected = command.run("simulate", chunks, *options).stdout
    shown = command.run("simulate", command.trace(TRACE), *options, "--blocks-per-chunk", 4)
    assert shown.stdout == expected


def test_a_traffic_is_simulated_without_prefetch_and_with_it(command):
    requests = ({"timestamp": 50 * n, "hash_ids": list(ids)} for n, ids in enumerate(TRACE))
    trace = command.file("\n".join(map(json.dumps, requests)), "timed.jsonl")
    options = (trace, *TIER, "--capacity", "90", "--arrivals", 2, "--concurrency", 2)
    without, prefetching = json.loads(command.run("simulate", *options, "--json", "-").stdout)[
        "rows"
    ]
    assert without["prefetched"] is None
    assert prefetching["prefetched"] > 0 < without["waited_s"]
    shown = command.run("simulate", *options).stdout
    assert "in vain" in shown


def test_a_picture_is_drawn(command, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curve.png"
    result = command.run("simulate", command.trace(TRACE), "--capacity", "90", "--plot", picture)
    assert result.exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("lines", "options", "complaint"),
    [
        ('{"hash_ids": [1]}\n{"timestamp": 3}\n', (), "Malformed line 2: it must be an object"),
        ('{"hash_ids": ["a"]}\n', (), "Malformed line 1: hash_ids[0] is"),
        ('{"hash_ids": [1]}\n{"hash_ids": [1, 2', (), "Malformed line 2: not JSON"),
        ('{"hash_ids": [1]}\n', ("--warm-half",), "a trace of 1 requests leaves no block"),
        ("", (), "no request"),
        ('{"hash_ids": [1]}\n', ("--arrivals", "2"), "--arrivals: nothing can be prefetched; give"),
        ('{"hash_ids": [1]}\n', (*TIER, "--arrivals", "2"), "line 1: it has no"),
        ('{"hash_ids": [1]}\n', ("--capacity", "0"), "--capacity '0' is not valid"),
        ('{"hash_ids": [1]}\n', ("--blocks-per-chunk", "2"), "or a smaller --blocks-per-chunk"),
        ('{"hash_ids": [1]}\n', ("--policy", "mru"), "eviction_policy: 'mru' is unknown"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(command, tmp_path, lines, options, complaint):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(lines)
    assert complaint in command.refusal("simulate", trace, *options)
