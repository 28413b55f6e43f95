"""The parts of a bench: the pass, the baseline, and the places that they write in."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload_async.bench import baseline as baseline_module
from kvoffload_async.bench.baseline import (
    Payload,
    PlainBaseline,
    RecyclingBaseline,
    extents,
    measure_memcpy,
)
from kvoffload_async.bench.contender import Place, UnfitError
from kvoffload_async.bench.plan import Jobs, Plan
from kvoffload_async.bench.rounds import drive, time_at_rest
from kvoffload_async.types import JobResult, LookupResult

BLOCK = 4096
PLAN = Plan.parse(
    "4KiB", "4KiB", keys_per_job=1, one_job=0, in_flight=2, rounds=1, threads=2, steady=True
)


@dataclass
class ScriptedTier:
    """Ends jobs in the drawn order; it is tier and manager in one."""

    draw: object = None
    fails: frozenset = frozenset()
    never_ends: bool = False
    answers: dict = field(default_factory=dict)
    under_way: list = field(default_factory=list)
    most: int = 0
    calls: list = field(default_factory=list)
    request: object = "request"
    step: object = "step"

    @property
    def manager(self):
        return self

    def submit_store(self, job):
        self._submit("store", job)

    def submit_load(self, job):
        self._submit("load", job)

    def _submit(self, kind, job):
        self.calls.append((kind, job))
        self.under_way.append(job)
        self.most = max(self.most, len(self.under_way))

    def on_schedule_end(self, context):
        assert context == self.step

    def get_finished_jobs(self):
        if self.never_ends or not self.under_way:
            return ()
        job = self.draw(st.sampled_from(self.under_way))
        self.under_way.remove(job)
        error = OSError("broken") if job in self.fails else None
        return [JobResult(job, success=error is None, error=error)]

    def lookup(self, key, request):
        assert request == self.request
        answers = self.answers[key]
        return answers.pop(0) if len(answers) > 1 else answers[0]


@given(data=st.data(), num_jobs=st.integers(1, 12), in_flight=st.integers(1, 6))
def test_every_job_is_submitted_once_and_never_more_than_allowed_are_under_way(
    data, num_jobs, in_flight
):
    fails = data.draw(st.frozensets(st.integers(1, num_jobs)))
    tier = ScriptedTier(data.draw, fails)
    jobs = {job_id: job_id for job_id in range(1, num_jobs + 1)}
    shape = Jobs(num_jobs, 2, BLOCK)
    sample, failures = drive(tier, jobs, shape, is_load=False, in_flight=in_flight)
    assert tier.calls == [("store", job_id) for job_id in jobs]
    assert tier.most == min(in_flight, num_jobs)
    assert failures == ["broken"] * len(fails)
    assert sample["wall_us_per_job"] > 0


def test_a_pass_in_which_nothing_ends_is_given_up(monkeypatch):
    monkeypatch.setattr("kvoffload_async.bench.rounds.STALL_S", 0.001)
    tier = ScriptedTier(never_ends=True)
    with pytest.raises(UnfitError, match=r"no job has ended for 0\.001 s; 1 were to end"):
        drive(tier, {1: 1}, Jobs(1, 1, BLOCK), is_load=True, in_flight=1)
    assert tier.calls == [("load", 1)]


def test_only_keys_that_are_found_are_timed_and_answers_are_waited_for():
    hit, miss, retry = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY
    tier = ScriptedTier(answers={b"a": [retry, retry, hit], b"b": [miss]})
    assert time_at_rest(tier, [b"a", b"b"])["lookup_us"] > 0
    assert tier.answers == {b"a": [hit], b"b": [miss]}
    assert "lookup_us" not in time_at_rest(ScriptedTier(answers={b"b": [miss]}), [b"b"])


@pytest.mark.parametrize(
    ("num_jobs", "keys_per_job", "block_bytes", "num_extents"),
    [(3, 5, BLOCK, 1), (300, 1, BLOCK, 2), (5, 3, 3 * BLOCK * 32, 8), (2, 1, 2 << 20, 2)],
)
def test_the_baseline_moves_every_byte_in_large_pieces_of_whole_blocks(
    tmp_path, num_jobs, keys_per_job, block_bytes, num_extents
):
    jobs = Jobs(num_jobs, keys_per_job, block_bytes)
    starts = extents(jobs)
    assert len(starts) == num_extents
    assert starts[0] == 0
    assert starts[-1] < jobs.num_bytes <= starts[-1] + starts.step
    assert starts.step % block_bytes == 0
    with Payload(jobs.num_keys, block_bytes) as payload, Place(str(tmp_path), "here") as place:
        samples = PlainBaseline(place).measure(PLAN, payload, jobs)
        assert samples.keys() == {"store", "load"}
        assert payload.wrong_rows(jobs.num_keys) == 0
        payload.wipe()
        measure_memcpy(PLAN, payload, jobs)
        assert payload.wrong_rows(jobs.num_keys) == 0


def test_a_baseline_that_moves_too_little_is_no_baseline(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "preadv", lambda *_: 1)
    jobs = Jobs(1, 1, BLOCK)
    with (
        Payload(1, BLOCK) as payload,
        Place(str(tmp_path), "here") as place,
        pytest.raises(UnfitError, match="a plain call moved 1 of 4096 bytes"),
    ):
        PlainBaseline(place).measure(PLAN, payload, jobs)


def test_a_baseline_that_returns_other_bytes_is_no_baseline(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "preadv", lambda _file, extents, _start: extents[0].nbytes)
    jobs = Jobs(1, 1, BLOCK)
    with (
        Payload(1, BLOCK) as payload,
        Place(str(tmp_path), "here") as place,
        pytest.raises(UnfitError, match="other bytes than were written"),
    ):
        PlainBaseline(place).measure(PLAN, payload, jobs)


def test_the_recycling_baseline_overwrites_and_renames_the_same_files(tmp_path):
    jobs = Jobs(3, 5, BLOCK)
    with Payload(jobs.num_keys, BLOCK) as payload, Place(str(tmp_path), "here") as place:
        baseline = RecyclingBaseline(place)
        with baseline._open(PLAN, payload, jobs) as moves:
            created = files_below(tmp_path)
            assert len(created) == jobs.num_keys
            payload.fill()
            moves["store"]()
            recycled = files_below(tmp_path)
            assert sorted(created.values()) == sorted(recycled.values()), "no inode is new"
            assert not created.keys() & recycled.keys()
            assert {path.read_bytes() for path in recycled} == {
                payload.truth[start : start + BLOCK].tobytes()
                for start in range(0, jobs.num_bytes, BLOCK)
            }
        assert baseline.measure(PLAN, payload, jobs).keys() == {"store", "load"}
        assert payload.wrong_rows(jobs.num_keys) == 0


def files_below(folder):
    """Return the inode of each file of a block."""
    return {path: path.stat().st_ino for path in folder.rglob("*_g0.bin")}


@pytest.mark.parametrize("defect", ["another link", "a marker"])
def test_a_recycling_baseline_whose_checks_fail_is_no_baseline(tmp_path, defect):
    jobs = Jobs(1, 1, BLOCK)
    with (
        Payload(1, BLOCK) as payload,
        Place(str(tmp_path), "here") as place,
        RecyclingBaseline(place)._open(PLAN, payload, jobs) as moves,
    ):
        ((file, _),) = files_below(tmp_path).items()
        if defect == "another link":
            os.link(file, file.with_suffix(".link"))
        else:
            (file.parents[1] / "00/unverified").touch()
        with pytest.raises(UnfitError, match=r"the file is another one|was found"):
            moves["store"]()


def test_a_jobs_latency_begins_when_the_one_that_made_way_for_it_ends():
    assert baseline_module._latencies([1.0, 2.0, 4.0, 7.0], in_flight=4) == [1.0, 2.0, 4.0, 7.0]
    assert baseline_module._latencies([1.0, 2.0, 4.0, 7.0], in_flight=1) == [1.0, 1.0, 2.0, 3.0]
    assert baseline_module._latencies([2.0, 1.0, 4.0, 7.0], in_flight=2) == [2.0, 1.0, 3.0, 5.0]


def test_a_job_ends_with_the_last_of_its_pieces():
    mib = 1 << 20
    jobs = Jobs(num_jobs=2, keys_per_job=3, block_bytes=mib // 2)  # 1.5 extents a job
    assert baseline_module._job_ends(jobs, range(0, 3 * mib, mib), [5.0, 3.0, 4.0]) == [5.0, 4.0]


def test_only_right_bytes_count_as_right():
    with Payload(3, BLOCK) as payload:
        payload.fill()
        assert payload.wrong_rows(3) == 0
        payload.flat[BLOCK] ^= 1
        payload.flat[3 * BLOCK - 1] ^= 1
        assert payload.wrong_rows(3) == 2
        assert payload.wrong_rows(2) == 1
        payload.wipe()
        assert payload.wrong_rows(3) == 3


def test_a_used_directory_holds_no_bytes_but_all_of_its_files_until_the_end(tmp_path):
    with Place(str(tmp_path / "a" / "b"), "here") as place:
        with place.new_directory() as name:
            folder = Path(name)
            (folder / "deep").mkdir()
            (folder / "deep" / "file").write_bytes(bytes(100))
        assert (folder / "deep" / "file").stat().st_size == 0
    assert list(tmp_path.iterdir()) == []
