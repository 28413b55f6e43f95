"""A router that reads vLLM's events knows what is where, chunk by chunk and hash by hash."""

import random

import pytest
from event_world import HAS_METADATA_ONLY, Tracked
from vllm_world import SLOT_BYTES

FS = {"type": "fs", "enable_kv_events": True, "capacity_bytes": "128 KiB"}
SLAB = {**FS, "type": "slab", "segment_bytes": "32 KiB", "capacity_bytes": "160 KiB"}
EXAMPLE = {"type": "example", "enable_kv_events": True}
PROMPTS = 40

CHUNKED = pytest.mark.parametrize("blocks_per_chunk", [1, 3])
SEEDED = pytest.mark.parametrize("seed", [1, 2])


@pytest.fixture
def whole(pair, tmp_path):
    """Return what makes a `Tracked` over `KVOffloadSpec`'s manager."""

    def make(*tiers, blocks_per_chunk=3, slots=5):
        placed = [
            tier if tier["type"] == "example" else {**tier, "root_dir": str(tmp_path / str(index))}
            for index, tier in enumerate(tiers)
        ]
        tensors = 6 // blocks_per_chunk  # blocks of one size, whatever a chunk is
        here = pair(
            placed,
            events=True,
            slots=slots,
            blocks_per_chunk=blocks_per_chunk,
            num_tensors=tensors,
            groups=(tuple(range(tensors)),),
            extra={},
        )
        return Tracked(here.manager, here.until, blocks_per_chunk)

    return make


@pytest.fixture
def hosted(serving, tier):
    """Return what makes a `Tracked` over vLLM's manager and one of our tiers."""

    def make(blocks_per_chunk, **options):
        config = {**tier, "enable_kv_events": True, **options}
        here = serving(config, events=True, slots=5)
        return Tracked(here.manager, here.until, blocks_per_chunk)

    return make


def readable(world):
    """Return the blocks that our primary has."""
    primary = world.manager.manager.planner.primary
    return {key for key, _, refs in primary.resident() if refs >= 0}


def kept_by(tier, keys):
    """Return those of `keys` that one of our tiers has."""
    match type(tier).__name__:
        case "FsTier":
            return set(tier._files.present(list(keys)))
        case "SlabTier":
            return set(tier._store.catalog.keys())
    return set(tier._blocks)


def contents(world):
    """Return the blocks of the whole engine, by location."""
    found = {("CPU", None): readable(world)}
    for tier in world.manager.manager.secondary_tiers:
        found[tier.medium.value, tier.ownership] = kept_by(tier.tier, world.hashes_of)
    return found


def check(world, found):
    assert world.router.hashes_by_location() == {
        location: world.expected(keys) for location, keys in found.items() if keys
    }


def wander(world, seed, steps=200):
    """Store, load, fail and evict as drawn, and come to rest."""
    draw = random.Random(seed)
    ends = []
    for _ in range(steps):
        match draw.choice(["store", "store", "load", "begin", "end", "fail", "finish", "publish"]):
            case "store":
                world.store(draw.randrange(PROMPTS))
            case "load" if not ends:  # else it might wait for one of those
                world.load(draw.randrange(PROMPTS))
            case "begin" if len(ends) < 2:
                ends.append(world.begin_store(draw.randrange(PROMPTS)))
            case "end" if ends:
                ends.pop()()
            case "fail" if ends and HAS_METADATA_ONLY:
                ends.pop()(success=False)
            case "finish":
                world.finish_jobs()
            case "publish":
                world.publish()
    for end in ends:
        end()
    world.finish_jobs()
    world.publish()


# -- the whole engine ---------------------------------------------------------------------------


@SEEDED
@CHUNKED
@pytest.mark.parametrize(
    "tiers", [[FS], [SLAB], [SLAB, SLAB], [FS, EXAMPLE]], ids=["fs", "slab", "slabs", "fs-example"]
)
def test_replayed_events_are_the_contents_of_the_whole_engine(whole, tiers, blocks_per_chunk, seed):
    world = whole(*tiers, blocks_per_chunk=blocks_per_chunk)
    wander(world, seed)
    found = contents(world)
    check(world, found)
    assert found["CPU", None]
    assert all(found.values())
    bounded = [keys for location, keys in found.items() if location[1] != "example"]
    assert world.tracked() <= set().union(*bounded)
    assert world.router.has_lost("CPU")
    assert world.router.has_lost("STORAGE")


@CHUNKED
@pytest.mark.parametrize(
    ("tiers", "seed"),
    [([], 0), ([SLAB], 5), ([FS], 22), ([SLAB, SLAB], 17)],
    ids=["none", "slab", "fs", "slabs"],
)
def test_events_published_in_small_batches_lead_to_the_contents(
    whole, blocks_per_chunk, tiers, seed, monkeypatch
):
    monkeypatch.setattr("kvoffload_async.integrations.vllm.manager.KEYS_A_STEP", 1)
    world = whole(*tiers, blocks_per_chunk=blocks_per_chunk)
    wander(world, seed)
    while world.manager.has_pending_work():
        world.publish()
    check(world, contents(world))
    assert world.router.has_lost("CPU")
    assert world.router.has_lost("STORAGE") is bool(tiers)


def test_a_removal_names_every_hash_long_after_the_primary_let_the_chunk_go(whole):
    world = whole(SLAB)
    for number in range(PROMPTS):
        world.store(number)
        world.finish_jobs()
        world.publish()
    check(world, contents(world))
    assert world.router.has_lost("STORAGE")


@pytest.mark.parametrize(
    "tier",
    [{"type": "fs", "enable_kv_events": True}, EXAMPLE, {**SLAB, "enable_kv_events": False}],
    ids=["fs-without-capacity", "example", "events-off"],
)
def test_nothing_is_kept_in_vllm_for_a_tier_that_announces_no_removals(whole, tier):
    world = whole(tier)
    for number in range(PROMPTS):
        world.store(number)
        world.finish_jobs()
        world.publish()
    assert world.tracked() == readable(world)


def test_a_block_that_is_evicted_and_written_again_in_one_step_keeps_its_metadata(whole):
    world = whole(slots=2)
    world.store(1)
    world.publish()
    world.store(2)
    end = world.begin_store(1)
    world.publish()
    assert world.router.hashes("CPU") == world.expected([*world.keys_of(1)])
    end()
    world.publish()
    check(world, contents(world))
    world.store(3)
    world.publish()
    check(world, contents(world))
    assert world.tracked() == readable(world)


def test_tiers_of_one_type_have_locations_of_their_own(whole):
    world = whole(SLAB, SLAB, SLAB)
    world.store(1)
    world.finish_jobs()
    world.publish()
    assert set(world.router.hashes_by_location()) == {
        ("CPU", None),
        ("STORAGE", "slab"),
        ("STORAGE", "slab-2"),
        ("STORAGE", "slab-3"),
    }


def test_blocks_that_are_stored_again_after_a_reset_are_announced_again(whole):
    world = whole(SLAB)
    world.store(1)
    world.finish_jobs()
    world.publish()
    world.reset()
    list(world.manager.take_events())
    world.store(1)
    world.finish_jobs()
    world.publish()
    check(world, contents(world))


def test_blocks_that_are_loaded_from_a_tier_after_a_reset_are_announced_again(whole):
    world = whole(SLAB)
    world.store(1)
    world.finish_jobs()
    world.publish()
    world.reset()
    list(world.manager.take_events())
    assert world.load(1)
    world.finish_jobs()
    world.publish()
    check(world, contents(world))


# -- a tier under vLLM's manager ----------------------------------------------------------------


@SEEDED
@CHUNKED
def test_replayed_events_are_the_contents_of_a_tier_under_vllms_manager(
    hosted, blocks_per_chunk, seed
):
    world = hosted(blocks_per_chunk, capacity_bytes=24 * SLOT_BYTES)
    draw = random.Random(seed)
    for _ in range(80):
        number = draw.randrange(PROMPTS)
        if draw.random() < 0.3:
            world.load(number)
        else:
            world.store(number)
        world.finish_jobs()
        world.publish()
    tier = world.manager.secondary_tiers[0]
    kept = kept_by(tier._tier.tier, world.hashes_of)
    assert kept
    assert world.router.hashes("STORAGE", tier.tier_type) == world.expected(kept)
    assert len(world.tracked()) <= len(kept) + 5
    assert world.router.has_lost("CPU")
    assert world.router.has_lost("STORAGE")


def test_vllms_manager_has_own_locations_for_our_tiers_of_one_type(serving, tier, tmp_path):
    second = {**tier, "root_dir": str(tmp_path / "second")}
    here = serving(
        {**tier, "enable_kv_events": True}, {**second, "enable_kv_events": True}, events=True
    )
    owners = [one._tier.ownership for one in here.manager.secondary_tiers]
    assert owners == [tier["type"], f"{tier['type']}-2"]


def test_a_reset_of_vllms_manager_lets_our_tier_announce_again(hosted):
    world = hosted(3)
    world.store(1)
    world.finish_jobs()
    world.publish()
    world.reset()
    list(world.manager.take_events())
    world.store(1)
    world.finish_jobs()
    world.publish()
    tier = world.manager.secondary_tiers[0]
    assert world.router.hashes("STORAGE", tier.tier_type) == world.expected(world.keys_of(1))
