"""Asking an engine how it is: what is refused of an answer."""

import contextlib
import json
import socket
import threading
from dataclasses import asdict

import pytest

from kvoffload_async import CPUPrimaryTierOffloadingManager
from kvoffload_async.errors import InputError
from kvoffload_async.statistics import EngineStatistics, HistogramStatistics
from kvoffload_async.status import client as status
from kvoffload_async.status.client import NoAnswerError, ask, parse_report
from kvoffload_async.timeline import SlowRequest

DEADLINE_S = 60.0


def answer(**changes):
    stats = CPUPrimaryTierOffloadingManager(3).stats()
    whole = {
        "version": 1,
        "pid": 7,
        "model": None,
        "time_s": 1.5,
        "uptime_s": 2,
        "kind": "OffloadingStatistics",
        "statistics": asdict(stats),
        "slowest": None,
    }
    return json.dumps(whole | changes)


def parsed(**changes):
    return parse_report(answer(**changes), "/s")


def test_fields_of_later_releases_are_passed_over():
    assert parsed(of_later=[1]) == parsed()


def test_slow_requests_are_read_where_an_engine_records_them():
    slow = {"req_id": "r", "seconds": 0.5, "longest_phase": "fs: load"}
    assert parsed(slowest=[slow]).slowest == (SlowRequest(**slow),)


def test_an_engines_own_statistics_are_told_apart():
    stats = asdict(CPUPrimaryTierOffloadingManager(3).stats())
    copies = asdict(HistogramStatistics())
    own = dict.fromkeys(
        ("copies", "waiting_loads", "waiting_stores", "missed_events", "failed_copies"), 0
    )
    own |= {"load_copy_seconds": copies, "store_copy_seconds": copies}
    report = parsed(kind="EngineStatistics", statistics=stats | own)
    assert isinstance(report.statistics, EngineStatistics)


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "Nothing"},
        {"kind": "EngineStatistics"},
        {"statistics": {}},
        {"statistics": []},
        {"statistics": {"primary": 3}},
        {"pid": "7"},
        {"pid": None},
        {"time_s": []},
        {"slowest": {}},
        {"slowest": [3]},
        {"uptime_s": float("inf")},
        {"uptime_s": float("nan")},
        {"uptime_s": 1e300},
        {"uptime_s": 1e12},
        {"uptime_s": -1},
        {"pid": 10**400},
    ],
)
def test_what_is_no_status_is_refused(changes):
    with pytest.raises(InputError, match="/s: not the status of an engine"):
        parsed(**changes)


def test_a_histogram_of_other_buckets_is_refused():
    text = json.loads(answer())
    stats = text["statistics"]
    stats["runtime"] = {
        "version": "1",
        "python": "3",
        "loop_lag_seconds": {"counts": [1], "sum_s": 0.0},
        "step_seconds": {},
        "wake_ups": 0,
    }
    with pytest.raises(InputError, match="a histogram of 1 buckets"):
        parse_report(json.dumps(text), "/s")


@pytest.mark.parametrize("line", ["", "[]", "3", "{}", "[" * 100_000])
def test_what_is_no_object_of_json_is_refused(line):
    with pytest.raises(InputError, match="not the status"):
        parse_report(line, "/s")


def test_a_later_version_is_named():
    with pytest.raises(InputError, match="status of version 2, this is 1"):
        parsed(version=2)


def test_an_error_of_the_engines_is_passed_on():
    with pytest.raises(NoAnswerError, match="/s: the engine is not open"):
        parse_report('{"error": "the engine is not open"}', "/s")


# -- whoever listens there ----------------------------------------------------------------------


@pytest.fixture
def listening(tmp_path_factory):
    """A socket on which a test listens, and what it answers with."""
    path = str(tmp_path_factory.mktemp("s") / "kv.sock")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(1)
    listener.settimeout(DEADLINE_S)
    threads = []

    def answering(given, *, stays=False):
        def serve():
            peer, _ = listener.accept()
            with peer:
                peer.recv(100)
                with contextlib.suppress(BrokenPipeError):
                    peer.sendall(given)
                    if stays:
                        peer.recv(1)  # until the other side goes away

        threads.append(threading.Thread(target=serve))
        threads[0].start()
        return path

    yield answering
    for thread in threads:
        thread.join(DEADLINE_S)
    listener.close()


@pytest.mark.parametrize("given", [b"", b"half a line", b"x" * 300])
def test_an_answer_that_is_no_line_is_refused(listening, given, monkeypatch):
    monkeypatch.setattr(status, "MAX_STATUS_BYTES", 200)
    with pytest.raises(InputError, match="no line of at most 200 bytes"):
        ask(listening(given))


def test_an_answer_without_an_end_is_not_read_to_it(listening, monkeypatch):
    monkeypatch.setattr(status, "MAX_STATUS_BYTES", 200)
    with pytest.raises(InputError, match="no line of at most 200 bytes"):
        ask(listening(b"x" * 300 + b"\n", stays=True))


def test_an_answer_that_is_no_text_is_refused(listening):
    with pytest.raises(InputError, match="no text"):
        ask(listening(b"\xff\n"))


def test_one_that_never_answers_is_not_waited_for(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("s") / "kv.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)
        with pytest.raises(NoAnswerError, match=r"nobody answers within 0.01 s"):
            ask(path, timeout_s=0.01)


def test_one_that_answers_byte_by_byte_is_not_waited_for(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("s") / "kv.sock")

    def drip():
        peer, _ = listener.accept()
        with peer, contextlib.suppress(OSError):
            pause = threading.Event()
            while True:  # until the other side goes away
                peer.sendall(b"x")
                pause.wait(0.005)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)
        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(NoAnswerError, match=r"nobody answers within 0.05 s"):
            ask(path, timeout_s=0.05)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def test_a_path_that_is_too_long_is_no_engine():
    with pytest.raises(NoAnswerError, match=r"no engine answers: .*too long"):
        ask("/" + "x" * 200)
