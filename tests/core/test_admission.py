"""Which blocks a tier admits that stores only what is likely to be used again."""

from math import inf

import pytest
from policies.naive_hd import known_blocks

from kvoffload_async.core.admission import Admission
from kvoffload_async.core.primary import Primary
from kvoffload_async.facade import primary
from kvoffload_async.facade.primary import create_admission
from kvoffload_async.policies.hd import HdPolicy
from kvoffload_async.policies.lru import LruPolicy
from kvoffload_async.policies.reuse import ReuseModel
from kvoffload_async.types import ReqContext, make_offload_key


def ks(names):
    return [make_offload_key(name.encode()) for name in names]


class Estimates:
    """A key's class is its first letter; likely classes are given; 0 may become 1."""

    def __init__(self, likely):
        self.likely, self.asked, self.recorded = likely, [], []

    def prompt(self, positions, keys):
        return None

    def classes(self, keys, prompt):
        return [key[0] - ord("a") for key in keys]

    def may_become(self, kind, prompt):
        return [1] if kind == 0 else []

    def record(self, keys, prompt, is_cached):
        self.recorded.append(list(keys))

    def reuse_within(self, kind, num_requests):
        self.asked.append((kind, num_requests))
        return 0.2 if kind in self.likely else 0.19


CTX = ReqContext("r")


def test_likely_blocks_are_stored_undecided_ones_wait_and_the_others_are_declined():
    admission = Admission(Estimates(likely={1, 3}), [10.0], feeds=True)
    assert admission.split(0, CTX, ks("abcd"), is_final=False) == (ks("bd"), ks("a"))
    assert admission.split(0, CTX, ks("abcd"), is_final=True) == (ks("bd"), [])
    assert admission.split(0, CTX, [], is_final=True) == ([], ())


def test_a_class_is_stored_if_any_tier_stores_it():
    admission = Admission(Estimates(likely={1}), [5.0, 10.0], feeds=True)
    admission._is_likely = lambda index, kind: index == kind
    assert [admission.stores(kind) for kind in range(3)] == [True, True, False]


def test_what_is_remembered_of_a_large_tier_is_bounded(monkeypatch):
    monkeypatch.setattr(primary, "MOST_KNOWN", 20)
    admission = create_admission(Primary(4, LruPolicy(4)), [10.0**9])
    for number in range(40):
        admission.end_request(ReqContext("r"), ks([f"{number:04}{part}" for part in "abc"]))
    known = known_blocks(admission._estimates)
    assert len(known) == 20
    assert set(ks(["0039a", "0039b", "0039c"])) <= known.keys()


def test_another_tier_stores_everything():
    admission = Admission(Estimates(likely=set()), [None, 10.0], feeds=True)
    assert admission.split(0, CTX, ks("ab"), is_final=False) == (ks("ab"), ())
    assert admission.residence_requests(0) == inf


def test_the_residence_time_is_the_capacity_at_the_present_rate_of_stores():
    estimates = Estimates(likely=set())
    admission = Admission(estimates, [100.0], feeds=True)
    assert admission.residence_requests(0) == inf
    for _ in range(20):
        admission.end_request(CTX, [])
        admission.note_stored(0, 5)
    assert admission.residence_requests(0) == pytest.approx(20, rel=0.02)
    admission.split(0, CTX, ks("c"), is_final=True)
    assert estimates.asked == [(2, admission.residence_requests(0))]


def test_uses_are_recorded_in_prompt_order_unless_the_policy_does():
    estimates = Estimates(likely=set())
    ctx = ReqContext("r", key_positions=dict(zip(ks("ba"), (1, 2), strict=True)))
    Admission(estimates, [1.0], feeds=True).end_request(ctx, set(ks("ab")))
    Admission(estimates, [1.0], feeds=False).end_request(ctx, set(ks("ab")))
    assert estimates.recorded == [ks("ba")]


def test_the_estimates_are_those_of_the_policy_if_it_has_some():
    for policy in (LruPolicy, HdPolicy):
        primary = Primary(4, policy(4))
        admission = create_admission(primary, [None, inf, 30.0])
        primary.open_request(ctx := ReqContext("r"))
        granted = primary.prepare_store(ctx, ks("ab"))
        primary.complete_store(ctx, granted.keys_to_store, success=True)
        admission.end_request(ctx, primary.used_by(ctx))
        primary.close_request(ctx)
        primary.reset()
        assert admission.split(1, ctx, ks("ab"), is_final=True)[0] == ks("ab")


def test_a_new_block_may_become_one_of_a_longer_prompt():
    model = ReuseModel(0, 100)
    prompt = model.prompt({}, ks("abc"))
    assert list(model.may_become(0, prompt)) == [9, 10, 11]
    assert list(model.may_become(9, prompt)) == [10, 11]
    assert list(model.may_become(3, prompt)) == []
