"""Blocks of a bounded namespace that are pinned, read or written stay; how often that is asked."""

from faulty_files import FileOps
from fs.spaces import ROOM_FOR_8, Unheard, check, rescan, trim

from kvoffload_async.errors import TierFullError
from kvoffload_async.policies.lru import LruPolicy
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.fs.space import Space
from kvoffload_async.tiers.fs.usage import Sum, Usage, UsageFile

CAPACITY = 1000
K = [key_of(number) for number in range(50)]
FULL = Usage(total=Sum(CAPACITY + 1))


class AskedPolicy(LruPolicy):
    num_questions = 0

    def make_room(self, incoming, count, is_evictable):
        def counted(slot):
            self.num_questions += 1
            return is_evictable(slot)

        return super().make_room(incoming, count, counted)


def space_with(directory, keys) -> tuple[Space, AskedPolicy]:
    policy = AskedPolicy(100)
    space = Space(
        policy,
        UsageFile(FileOps(), str(directory.folder), "writer", set),
        directory.files(),
        Unheard(),
        capacity_bytes=CAPACITY,
        block_bytes=10,
    )
    space.blocks.learn(keys)
    return space, policy


def next_victims(space: Space) -> list:
    return space.evict_idle(space.num_excess(FULL))


def test_each_busy_block_is_asked_about_once_and_goes_at_its_rank_when_it_is_not(directory):
    space, policy = space_with(directory, K)
    space.pin(K[:40])
    space.pin(K[3:6])
    assert [next_victims(space) for _ in range(5)] == [[key] for key in K[40:45]]
    assert policy.num_questions == 40 + 5
    space.unpin(K[3:6])
    assert next_victims(space) == [K[45]]
    assert set(space._policy.skipped()) == set(K[:40])
    space.unpin(K[5:8])
    assert [next_victims(space) for _ in range(4)] == [[key] for key in (*K[5:8], K[46])]
    assert policy.num_questions == 40 + 6 + 4


def test_a_pinned_block_is_not_evicted_until_its_last_pin_is_gone(directory):
    with directory.open(capacity_bytes=ROOM_FOR_8) as harness:
        harness.store(K[:8])
        for _ in range(2):
            harness.on_loop(lambda: harness.tier.pin([*K[:3], K[30]]))
        failures = harness.store(K[8:16])
        assert len(failures) == 3
        assert {type(error) for error in failures.values()} == {TierFullError}
        assert set(K[:3]) < directory.blocks()
        harness.on_loop(lambda: harness.tier.unpin(K[1:3]))
        assert harness.load(K[:3]) == {}
        harness.on_loop(lambda: harness.tier.unpin([*K[1:3], K[20]]))
        harness.store(K[16:24])
        assert directory.blocks() & set(K[:3]) == {K[0]}
        for _ in range(3):
            harness.on_loop(lambda: harness.tier.unpin([*K[:3], K[30]]))
        check(directory, harness, ROOM_FOR_8)


def test_a_pinned_block_beyond_the_capacity_is_removed_when_it_is_unpinned(directory):
    with directory.open(capacity_bytes=ROOM_FOR_8) as harness:
        for key in K[:40]:
            directory.put(key)
        harness.on_loop(lambda: harness.tier.pin(K[:40]))
        rescan(harness)
        trim(harness)
        assert directory.blocks() == set(K[:40])
        harness.on_loop(lambda: harness.tier.unpin(K[:40]))
        rescan(harness)
        trim(harness)
        check(directory, harness, ROOM_FOR_8)
