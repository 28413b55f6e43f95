"""What requests found is told to the tiers, once a step."""

from itertools import pairwise

from core.terms import PENDING, k, ks

from kvoffload_async.abc.events import BlocksEvicted, JobSettled, ProbeAnswered
from kvoffload_async.core.effects import StartJob, StartProbe, TouchBlocks
from kvoffload_async.core.eventlog import EventLog
from kvoffload_async.core.index import ExactIndex, ProbedIndex
from kvoffload_async.core.invariants import check_state
from kvoffload_async.core.planner import Planner
from kvoffload_async.core.primary import Primary
from kvoffload_async.core.shares import PlannerLimits
from kvoffload_async.core.tier_state import TierState
from kvoffload_async.core.touches import RecentKeys
from kvoffload_async.policies.lru import LruPolicy
from kvoffload_async.types import ENGINE_REQ_ID, Medium, ReqContext

LIMITS = PlannerLimits(promotion_slots=100, cascade_blocks=100, deferral_s=100.0)


class Own:
    """A planner over tiers of its own, whose jobs all end well at once."""

    def __init__(self, *indices, num_slots=8):
        self.states = [
            TierState(f"tier{i}", index, 1, EventLog(Medium.STORAGE, enabled=False))
            for i, index in enumerate(indices)
        ]
        self.planner = Planner(Primary(num_slots, LruPolicy(num_slots)), self.states, LIMITS)
        self.touched = []
        self.stored = []
        self.now_s = 0.0
        self.has = set()

    def begin(self, req_id, names=""):
        ctx = ReqContext(req_id, key_positions={k(name): i for i, name in enumerate(names, 1)})
        self.planner.on_new_request(ctx)
        return ctx

    def store(self, names, req_id="writer"):
        ctx = self.begin(req_id, names)
        self.planner.prepare_store(ks(names), ctx)
        self.planner.complete_store(ks(names), ctx, success=True)
        self.planner.on_request_finished(ctx)
        self.step()
        self.step()
        self.touched.clear()
        self.stored.clear()

    def find(self, names, req_id="reader"):
        ctx = self.begin(req_id, names)
        self.planner.prepare_load(ks(names), ctx)
        self.planner.complete_load(ks(names), ctx)
        self.planner.on_request_finished(ctx)

    def step(self, seconds=1.0):
        self.planner.end_step()
        check_state(self.planner)
        self.now_s += seconds
        for index, state in enumerate(self.states):
            state.end_step()
            for effect in state.take_effects():
                match effect:
                    case TouchBlocks(keys):
                        self.touched.append((index, list(keys)))
                    case StartJob(job):
                        if not job.is_promotion:
                            self.stored.append((index, list(job.keys), job.req_context.req_id))
                        state.handle(JobSettled(job.job_id))
                    case StartProbe(generation, keys):
                        state.handle(ProbeAnswered(generation, self.has & set(keys)))
        self.planner.begin_step(self.now_s)
        self.planner.collect()


def test_what_a_request_found_is_touched_in_every_tier_head_to_tail():
    own = Own(ExactIndex(), ExactIndex())
    own.store("abc")
    own.find("abc")
    assert own.touched == [], "at the end of the step"
    own.step()
    assert own.touched == [(0, ks("abc")), (1, ks("abc"))]
    own.step()
    assert len(own.touched) == 2


def test_all_requests_of_a_step_are_told_together_the_latest_first():
    own = Own(ExactIndex())
    own.store("abcd")
    own.find("abc", "first")
    own.find("ad", "second")
    own.step()
    assert own.touched == [(0, ks("adbc"))]


def test_what_a_request_has_stored_itself_is_not_touched():
    own = Own(ExactIndex())
    ctx = own.begin("r", "a")
    own.planner.prepare_store(ks("a"), ctx)
    own.planner.complete_store(ks("a"), ctx, success=True)
    own.planner.on_request_finished(ctx)
    own.step()
    assert own.touched == []


def test_a_use_by_nobody_in_particular_is_told_too():
    own = Own(ExactIndex())
    own.store("a")
    own.planner.touch(ks("a"), ReqContext("unknown"))
    own.step()
    assert own.touched == [(0, ks("a"))]


def test_what_an_exact_tier_has_lost_is_offered_to_it_again():
    own = Own(ExactIndex(), ExactIndex())
    own.store("abc")
    own.states[1].handle(BlocksEvicted(tuple(ks("b"))))
    own.find("abc")
    own.step()
    assert own.touched == [(0, ks("abc")), (1, ks("ac"))]
    assert own.stored == [(1, ks("b"), ENGINE_REQ_ID)]
    own.find("abc", "again")
    own.step()
    assert own.touched[-1] == (1, ks("abc"))


def test_what_is_on_its_way_to_a_tier_or_gone_from_the_primary_is_not_offered():
    own = Own(ExactIndex(), num_slots=2)
    ctx = own.begin("r", "ab")
    own.planner.prepare_store(ks("ab"), ctx)
    own.planner.complete_store(ks("ab"), ctx, success=True)
    own.find("a", "reader")
    own.planner.touch(ks("x"), ReqContext("unknown"))
    own.planner.end_step()
    assert [b.count for b in own.planner.cascades.backlogs] == [0]
    own.planner.on_request_finished(ctx)


def test_a_probed_tier_hears_of_a_key_once_a_minute_and_is_asked_nothing():
    own = Own(ProbedIndex(1))
    own.store("a")
    for number in range(240):
        own.find("a", f"r{number}")
        own.step(1.0)
    assert len(own.touched) == 2
    assert not own.states[0].index.is_waiting


def test_a_promoted_block_is_offered_to_the_faster_tiers_that_lack_it():
    own = Own(ExactIndex(), ProbedIndex(1), ProbedIndex(1), ExactIndex())
    own.states[3].index.appeared(ks("ab"))
    own.planner.tiers[2].health.loads.permits = lambda now_s: False  # never asked
    ctx = own.begin("r", "ab")
    while own.planner.lookup(k("a"), ctx) is not PENDING:
        own.step()
    own.step()
    own.planner.lookup(k("a"), ctx)
    own.step()
    assert [(index, keys) for index, keys, _ in own.stored] == [(0, ks("a")), (1, ks("a"))]


# -- once a minute ------------------------------------------------------------------------------


def test_a_key_passes_at_most_once_in_a_minute_and_at_least_once_in_two():
    recent = RecentKeys()
    passed = {name: [] for name in "abc"}
    for second in range(600):
        for name, every in (("a", 1), ("b", 7), ("c", 45)):
            if second % every == 0 and recent.admitted(ks(name), float(second)):
                passed[name].append(second)
    for times in passed.values():
        gaps = [later - earlier for earlier, later in pairwise(times)]
        assert min(gaps) >= 60
        assert max(gaps) <= 180


def test_after_a_long_silence_everything_passes():
    recent = RecentKeys()
    assert recent.admitted(ks("a"), 0.0) == ks("a")
    assert recent.admitted(ks("b"), 1000.0) == ks("b")
    assert len(recent) == 1


def test_no_more_keys_are_remembered_than_the_tables_hold():
    recent = RecentKeys(most_keys=100)
    for second in range(0, 600, 10):
        recent.admitted(ks(range(second * 100, second * 100 + 60)), float(second))
        assert len(recent) <= 200
    assert recent.admitted(ks(range(70)), 5000.0) == ks(range(70))
    assert recent.admitted(ks(range(70, 140)), 5000.0) == ks(range(70, 100))
