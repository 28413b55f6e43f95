"""What runs in a process of a fleet, in this one."""

import io
import json
from dataclasses import asdict

import pytest

from laboratory.fleet.member import PipedRequests, serve
from laboratory.fleet.process import Start


def said_by_a_member(tmp_path, *requests, **settings):
    config = {
        "cpu_bytes_to_use": "64KiB",
        "block_bytes": 4096,
        "model": "replay",
        "secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path)}],
    }
    start = Start(config=config | settings, most_blocks=8, verify=True, layers=2)
    lines = [asdict(start), *requests]
    said = []
    serve(io.BytesIO(b"".join(json.dumps(line).encode() + b"\n" for line in lines)), said.append)
    return [json.loads(line) for line in said]


def test_it_answers_each_request_with_all_figures_so_far(tmp_path):
    said = said_by_a_member(tmp_path, [1, 2, 3], [1, 2, 4], [1, 2, 3, 5])
    assert [one["what"] for one in said] == ["ready", "done", "done", "done", "ended"]
    reports = [one["report"] for one in said[1:]]
    assert [report["requests"] for report in reports] == [1, 2, 3, 3]
    assert [sum(report["hits"].values()) for report in reports] == [0, 2, 5, 5]
    for report in reports:
        assert report["jobs_submitted"] == report["job_results"] > 0
        assert report["leaked_pins"] == report["corrupt_blocks"] == 0
        assert report["tiers"]["fs"]["stored_blocks"] > 0, "it has come to rest"


def test_without_a_request_it_ends(tmp_path):
    assert [one["what"] for one in said_by_a_member(tmp_path)] == ["ready", "ended"]


@pytest.mark.parametrize(
    ("settings", "requests", "message", "is_input"),
    [
        ({"block_bytes": -1}, (), "block_bytes", True),
        ({"secondary_tiers": [{"type": "fs", "root_dir": "/proc/x"}]}, (), "/proc", True),
        ({}, (list(range(9)),), "9", True),
    ],
)
def test_what_goes_wrong_is_told(tmp_path, settings, requests, message, is_input):
    *_, last = said_by_a_member(tmp_path, *requests, **settings)
    assert last["what"] == "failed"
    assert message in last["error"]
    assert last["is_input"] is is_input


def test_how_far_its_requests_are_nobody_can_tell():
    source = PipedRequests(io.BytesIO(b"[1]\n"), lambda _line: None, most_blocks=3)
    assert list(source) == [[1]]
    assert (source.most_blocks(), source.fraction_done) == (3, 0.0)
