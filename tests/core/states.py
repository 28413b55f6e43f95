"""A primary with everything that it and its policy know, as one value to compare."""

from planner_invariants import fingerprint
from policies.naive_hd import known_blocks

from kvoffload_async.policies.arc import ArcPolicy
from kvoffload_async.policies.hd import HdPolicy
from kvoffload_async.policies.lru import LruPolicy

POLICIES = {"lru": LruPolicy, "arc": ArcPolicy, "hd": HdPolicy}


def policy_state(policy):
    if isinstance(policy, ArcPolicy):
        return (*policy.lists(), policy.p)
    if isinstance(policy, HdPolicy):
        return tuple(policy.resident()), known_blocks(policy.model), policy.duel.lead
    return tuple(policy.resident())


def whole_state(primary):
    return fingerprint(primary), policy_state(primary.policy)
