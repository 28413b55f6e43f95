"""ARC caches in a given state."""

from policies.models import Rig, anything, keys

from kvoffload_async.policies.arc import ArcPolicy


def cache(capacity_blocks, once=(), twice=(), pinned=()):
    """Keys in T1 and T2, each with the least recent first; the cache may have room left."""
    rig = Rig(ArcPolicy(capacity_blocks), keys(pinned))
    rig.store(*twice, *once)
    rig.reuse(*reversed(twice))
    return rig


def with_ghosts(capacity_blocks, b1, b2):
    """An empty cache that remembers who left it."""
    rig = cache(capacity_blocks, once=b1, twice=b2)
    count = len(b1) + len(b2)
    rig.policy.make_room(keys(f"never comes {i}" for i in range(count)), count, anything)
    assert lists(rig) == [[], [], keys(b1), keys(b2)]
    return rig.inner


def lists(rig):
    return [list(part) for part in rig.inner.lists()]
