"""A tier with a probed index: every job one result, every probe one answer, verdicts that last."""

from collections import Counter

import pytest
from core.machines import AS_THE_PROFILE
from core.terms import HIT, MISS, RETRY, figures_of, job, k, released, results
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvoffload_async.abc.events import (
    BlocksAppeared,
    BlocksEvicted,
    JobFinished,
    JobOverdue,
    ProbeAnswered,
)
from kvoffload_async.core.eventlog import EventLog
from kvoffload_async.core.index import ProbedIndex
from kvoffload_async.core.ledger import JobState, StartJob, StartProbe
from kvoffload_async.core.tier_state import TierState
from kvoffload_async.errors import BlockMissingError, TierTimeoutError, TierUnavailableError
from kvoffload_async.types import Medium, ReqContext

pytestmark = pytest.mark.stateful

NAMES = st.sampled_from("abcde")
REQUESTS = st.sampled_from(["r", "s", "t"])
KEY_SETS = st.frozensets(NAMES.map(k), max_size=5)
LATE = TierTimeoutError("late")


class TierStateMachine(RuleBasedStateMachine):
    """`verdicts` is the last word on each key that a live request has asked for."""

    @initialize(concurrent=st.integers(1, 3), batch=st.integers(1, 4))
    def build(self, concurrent, batch):
        self.concurrent = concurrent
        self.tier = TierState(
            "tier", ProbedIndex(concurrent, batch), 1, EventLog(Medium.STORAGE, enabled=True)
        )
        self.accepted = self.finished = 0
        self.waiting: dict = {}
        self.flying: dict = {}
        self.late: dict = {}
        self.results: Counter = Counter()
        self.released: Counter = Counter()
        self.orphaned: set = set()
        self.probes: dict = {}
        self.old_generations: list = []
        self.asked: dict = {}
        self.verdicts: dict = {}
        self.is_closed = False
        self.contexts = {req_id: ReqContext(req_id) for req_id in "rst"}

    # -- jobs -----------------------------------------------------------------------------------

    @rule(names=st.lists(NAMES, max_size=3, unique=True), promotion=st.booleans())
    def submit(self, names, promotion):
        self.waiting[self.accepted] = job(self.accepted, names, promotion=promotion)
        self.tier.submit(self.waiting[self.accepted])
        if self.is_closed:
            del self.waiting[self.accepted]
        self.accepted += 1

    @rule(ends_step=st.booleans())
    def take_effects(self, ends_step):
        if ends_step:
            self.tier.end_step()
        for effect in self.tier.take_effects():
            if isinstance(effect, StartJob):
                self.flying[effect.job.job_id] = self.waiting.pop(effect.job.job_id)
            elif isinstance(effect, StartProbe):
                pending = {key for keys in self.probes.values() for key in keys}
                assert not pending & set(effect.keys), "a key is probed twice at once"
                assert effect.generation not in self.probes
                self.probes[effect.generation] = effect.keys
                assert len(self.probes) <= self.concurrent
        assert not self.waiting or self.is_closed

    @precondition(lambda self: self.flying or self.late)
    @rule(data=st.data(), how=st.sampled_from(["ok", "gone", "error", "overdue"]))
    def end_a_job(self, data, how):
        jobs = {**self.flying, **self.late}
        job_id = data.draw(st.sampled_from(sorted(jobs)))
        ending = jobs[job_id]
        if how == "overdue":
            self.tier.handle(JobOverdue(job_id, LATE))
            self.orphaned.add(job_id)
            self.late[job_id] = self.flying.pop(job_id, ending)
            self.say(ending.keys if ending.is_promotion else (), present=False)
            return
        self.flying.pop(job_id, None)
        self.late.pop(job_id, None)
        self.finished += 1
        if how == "error":
            self.tier.handle(JobFinished(job_id, job_error=TierUnavailableError("down")))
            self.say(ending.keys if ending.is_promotion else (), present=False)
            return
        failed = range(len(ending.keys)) if how == "gone" else ()
        self.tier.handle(JobFinished(job_id, {i: BlockMissingError("gone") for i in failed}))
        if ending.is_promotion:
            self.say([ending.keys[i] for i in failed], present=False)
        elif not failed:
            self.say(ending.keys, present=True)

    @rule()
    def take_results(self):
        self.results.update(result.job_id for result in results(self.tier))
        self.released.update(released(self.tier))

    # -- probes ---------------------------------------------------------------------------------

    @rule(req_id=REQUESTS, name=NAMES)
    def look_up(self, req_id, name):
        key = k(name)
        answer = self.tier.index.lookup(key, self.contexts[req_id])
        self.asked.setdefault(key, set()).add(req_id)
        expected = {None: RETRY, True: HIT, False: MISS}[self.verdicts.get(key)]
        assert answer is expected

    @precondition(lambda self: self.probes)
    @rule(data=st.data(), present=KEY_SETS)
    def answer_a_probe(self, data, present):
        """Those that are never drawn hang."""
        generation = data.draw(st.sampled_from(sorted(self.probes)))
        keys = self.probes.pop(generation)
        self.old_generations.append(generation)
        self.tier.handle(ProbeAnswered(generation, present))
        for key in keys:
            if self.asked.get(key):
                self.verdicts[key] = key in present

    @precondition(lambda self: self.old_generations)
    @rule(data=st.data(), present=KEY_SETS)
    def answer_a_probe_again(self, data, present):
        self.tier.handle(ProbeAnswered(data.draw(st.sampled_from(self.old_generations)), present))

    @rule(req_id=REQUESTS)
    def forget_a_request(self, req_id):
        self.tier.finish_request(self.contexts[req_id])
        for key, requests in list(self.asked.items()):
            requests.discard(req_id)
            if not requests:
                del self.asked[key]
                self.verdicts.pop(key, None)

    @rule(keys=KEY_SETS, appeared=st.booleans())
    def the_tier_changes(self, keys, appeared):
        event = BlocksAppeared if appeared else BlocksEvicted
        self.tier.handle(event(tuple(keys)))
        self.say(keys, present=appeared)

    @rule(really=st.sampled_from([False, False, False, False, True]))
    def close(self, really):
        if really:
            self.tier.close()
            self.waiting.clear()
            self.is_closed = True

    def say(self, keys, *, present):
        self.verdicts.update({key: present for key in keys if key in self.verdicts})

    # -- always ---------------------------------------------------------------------------------

    @invariant()
    def nothing_is_reported_twice_or_remembered_for_ever(self):
        if not hasattr(self, "tier"):
            return
        assert all(count == 1 for count in self.results.values())
        assert set(self.released) <= self.orphaned
        in_flight = {key for keys in self.probes.values() for key in keys}
        if not self.is_closed:
            queued = {key for key in self.asked if key not in self.verdicts}
            assert len(self.tier.index) == len(self.asked.keys() | in_flight)
            assert self.tier.index.is_waiting == bool(queued | in_flight or self.probes)
        running = self.tier.jobs.ids_in(JobState.FLYING, JobState.ORPHANED)
        assert sorted(running) == sorted(self.flying | self.late)
        read = figures_of(self.tier)
        assert read.submitted_jobs == self.accepted
        assert read.finished_jobs == self.results.total() + len(self.tier.jobs.ended)
        assert read.jobs_in_flight == self.accepted - read.finished_jobs
        assert read.load_seconds.total.count + read.store_seconds.total.count == self.finished

    def teardown(self):
        if not hasattr(self, "tier"):
            return
        self.tier.close()
        late = set(self.tier.abandon_rest())
        assert late == set(self.flying) | set(self.late)
        for job_id in late:
            self.tier.handle(JobFinished(job_id))
        self.take_results()
        assert self.results == Counter(range(self.accepted))
        assert set(self.released) == self.orphaned | late
        assert not self.tier.has_pending_work


class TestTierState(TierStateMachine.TestCase):
    settings = AS_THE_PROFILE
