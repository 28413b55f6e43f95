"""Recorded traces: what they contain, and that a disk never stops the owner."""

import json
import stat
import threading

import pytest

from kvoffload_async.errors import ConfigError
from kvoffload_async.runtime import trace_recorder
from kvoffload_async.runtime.trace_recorder import TraceRecorder, check_trace_files
from kvoffload_async.types import ReqContext, make_offload_key


def keys(names, group=0):
    return [make_offload_key(name.encode(), group) for name in names]


def lines(path):
    return [json.loads(line)["hash_ids"] for line in path.read_text().splitlines()]


def recorded(path, *prompts):
    recorder = TraceRecorder(str(path))
    for prompt in prompts:
        recorder.note(ReqContext("r"), keys(prompt))
    recorder.close(10)
    recorder.close(10)
    return recorder


def test_equal_blocks_have_equal_ids_of_which_no_other_run_has_one(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    recorded(first, "abc", "ab", "")
    recorded(second, "abc")
    abc, ab = lines(first)
    assert abc[:2] == ab
    assert len({*abc, *lines(second)[0]}) == 6
    assert all(0 <= each < 2**64 for each in abc)


def test_a_prompt_is_written_whole_and_of_one_kv_group(tmp_path):
    recorder = TraceRecorder(str(tmp_path / "trace"))
    first, other = keys("abc"), keys("abc", 1)
    positions = {key: end for end, key in enumerate(first, 1)}
    positions |= {key: end for end, key in enumerate(other, 1)}
    recorder.note(ReqContext("r", key_positions=positions), first[:1])
    recorder.note(ReqContext("r"), first)
    recorder.close(10)
    whole, used = lines(tmp_path / "trace")
    assert whole == used


def test_a_full_file_is_rotated_and_one_predecessor_kept(tmp_path, monkeypatch):
    path = tmp_path / "trace"
    monkeypatch.setattr(trace_recorder, "MAX_FILE_BYTES", 200)
    recorded(path, *["abcd"] * 7)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["trace", "trace.1"]
    assert len(lines(path)) == 1
    assert len(lines(tmp_path / "trace.1")) == 2
    recorded(path, "a")
    assert len(lines(tmp_path / "trace.1")) == 1


def test_a_file_has_mode_0600_whatever_the_directory_permits(tmp_path):
    tmp_path.chmod(0o777)
    recorded(tmp_path / "trace", "abc")
    assert stat.S_IMODE((tmp_path / "trace").stat().st_mode) == 0o600


def test_a_trace_that_an_engine_writes_is_refused_to_another(tmp_path):
    path = tmp_path / "trace"
    recorder = TraceRecorder(str(path))
    recorder.note(ReqContext("r"), keys("abc"))
    check_trace_files(str(path))  # of its own worker
    with pytest.raises(ConfigError, match=r"record_trace: .*another engine"):
        TraceRecorder(str(path))
    recorder.close(10)
    assert len(lines(path)) == 1
    TraceRecorder(str(path)).close(10)
    assert len(lines(tmp_path / "trace.1")) == 1


def test_starts_that_record_nothing_keep_the_trace_before(tmp_path):
    path = tmp_path / "trace"
    recorded(path, "abc")
    recorded(path)
    recorded(path)
    assert lines(path) == []
    assert len(lines(tmp_path / "trace.1")) == 1


@pytest.mark.parametrize("name", ["trace", "trace.1"])
def test_a_file_that_others_put_in_the_way_ends_the_recording_with_a_warning(
    name, tmp_path, caplog, monkeypatch
):
    path = tmp_path / "trace"
    monkeypatch.setattr(trace_recorder, "MAX_FILE_BYTES", 1)
    recorder = TraceRecorder(str(path))
    path.unlink()
    (tmp_path / name).write_text("of the user")
    while not recorder._has_failed:
        recorder.note(ReqContext("r"), keys("a"))
    for _ in range(3):
        recorder.note(ReqContext("r"), keys("a"))
    recorder.close(10)
    assert (tmp_path / name).read_text() == "of the user"
    assert recorder.dropped_requests >= 3
    failed, lacking = [record.getMessage() for record in caplog.records]
    assert failed.startswith("record_trace: ")
    assert f"{name} cannot be written: the file is not a trace" in failed
    assert lacking.startswith(f"record_trace: {path} lacks {recorder.dropped_requests} requests: ")


def test_requests_beyond_those_that_may_wait_are_dropped_and_counted(tmp_path, caplog, monkeypatch):
    opened, may_write = threading.Event(), threading.Event()

    def hang(self, file, at_s, keys):
        opened.set()
        may_write.wait(10)
        return 1

    monkeypatch.setattr(trace_recorder, "_MAX_WAITING", 2)
    monkeypatch.setattr(TraceRecorder, "_write", hang)
    recorder = TraceRecorder(str(tmp_path / "trace"))
    recorder.note(ReqContext("r"), keys("a"))
    assert opened.wait(10)
    for _ in range(5):
        recorder.note(ReqContext("r"), keys("a"))
    assert recorder.dropped_requests == 3
    recorder.close(0.01)  # the queue is full: it gives up
    assert "lacks 3 requests" in caplog.text
    may_write.set()
    recorder._waiting.put(None)
    recorder._thread.join(10)


@pytest.mark.parametrize("policy", ["lru", "hd"])
def test_a_recorded_trace_predicts_the_engine(tmp_path, policy):
    from kvoffload_async.facade.spec import TieringOffloadingSpec
    from kvoffload_async.replay.drivers import ReplayOptions
    from kvoffload_async.replay.run import replay
    from kvoffload_async.replay.simulation import simulate
    from kvoffload_async.replay.source import ChatWorkload, TraceFile

    path = tmp_path / "trace"
    spec = TieringOffloadingSpec(
        {
            "cpu_bytes_to_use": 120 * 4096,
            "block_bytes": 4096,
            "eviction_policy": policy,
            "record_trace": str(path),
        }
    )
    report = replay(spec, ChatWorkload(120), ReplayOptions())
    trace = TraceFile(path)
    (row,) = simulate(trace, [policy], [120]).rows
    trace.close()
    assert row.prefix_hit_ratio == pytest.approx(report.hit_ratio, abs=0.01)
