"""What is recorded of requests, under whatever hypothesis can think of; see `world`."""

from collections import defaultdict

import pytest
from core.machines import AS_THE_PROFILE
from core.test_planner_machine import PlannerMachine
from core.test_recorder import check_timeline
from hypothesis.stateful import invariant

from kvoffload_async.core.recorder import MAX_EVENTS, RecordingPlanner, RequestRecorder
from kvoffload_async.timeline import JobEnded, JobStarted

pytestmark = pytest.mark.stateful

NUM_KEPT = 3


class WatchedPlanner(RecordingPlanner):
    """Notes the jobs of each request by itself."""

    def __init__(self, primary, tiers, limits):
        super().__init__(primary, tiers, limits, RequestRecorder(NUM_KEPT))
        self.recorder.keep_complete()
        self.started = defaultdict(set)
        self.reported = defaultdict(set)

    def _submit(self, index, ctx, *args, **kwargs):
        self.started[ctx.req_id].add((self.tiers[index].name, self._next_job_id))
        super()._submit(index, ctx, *args, **kwargs)

    def _job_ended(self, index, job, result):
        self.reported[job.req_context.req_id].add((self.tiers[index].name, job.job_id))
        super()._job_ended(index, job, result)


class RecordedMachine(PlannerMachine):
    create_planner = WatchedPlanner

    @invariant()
    def each_job_of_a_request_has_one_begin_and_one_end(self):
        if not hasattr(self, "world"):
            return
        planner = self.world.planner
        assert len(planner.recorder) <= NUM_KEPT
        for timeline in planner.recorder.timelines():
            self.check(timeline)

    def check(self, timeline):
        check_timeline(timeline, MAX_EVENTS)
        planner = self.world.planner
        started = [(e.tier, e.job_id) for e in timeline.events if isinstance(e, JobStarted)]
        ended = [(e.job.tier, e.job.job_id) for e in timeline.events if isinstance(e, JobEnded)]
        assert len(set(started)) == len(started)
        assert len(set(ended)) == len(ended)
        if not timeline.dropped_events:
            assert set(started) == planner.started[timeline.req_id]
            assert set(ended) == planner.reported[timeline.req_id]

    def teardown(self):
        super().teardown()
        if not hasattr(self, "world"):
            return
        recorder = self.world.planner.recorder
        for timeline in (*recorder.take_complete(), *recorder.timelines()):
            if timeline.ended_s is not None:
                self.check(timeline)
                assert timeline.finished_s is not None
                assert timeline.unfinished_jobs == ()
        assert all(timeline.ended_s is not None for timeline in recorder.timelines())


class TestRecordedPlanner(RecordedMachine.TestCase):
    settings = AS_THE_PROFILE
