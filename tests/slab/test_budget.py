import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvoffload_async.tiers.slab.layout import Budget
from kvoffload_async.tiers.slab.manifest import slot_bytes_of
from kvoffload_async.tiers.slab.opening import SlabSettings

MIB = 1 << 20

capacities = st.integers(1, 1 << 44)
blocks = st.integers(1, 1 << 26)


@given(capacities, blocks, st.integers(12, 34))
def test_segments_are_handed_out_until_the_capacity_is_used_and_not_beyond(
    capacity, block_bytes, log_segment
):
    segment_bytes = max(1 << log_segment, capacity >> 7)
    budget = Budget.of(capacity, block_bytes, segment_bytes)
    segments: list[int] = []
    while slots := budget.next_segment(segments):
        assert slots <= budget.segment_slots
        segments.append(slots)
        assert budget.cost(segments) <= capacity
    assert 0 <= sum(segments) - budget.most_slots <= 1
    assert all(slots == budget.segment_slots for slots in segments[:-2])
    assert bool(budget.most_slots) == (capacity >= budget.least_bytes)


@given(capacities, blocks, st.integers(12, 34), st.integers(2, 8))
@example(696_960, 1, 20, 8)  # the headers of eight segments take the last one's room
def test_a_store_that_is_not_tiny_has_a_segment_for_each_stripe(
    capacity, block_bytes, log_segment, stripes
):
    segment_bytes = max(1 << log_segment, capacity >> 7)
    plain = Budget.of(capacity, block_bytes, segment_bytes)
    budget = Budget.of(capacity, block_bytes, segment_bytes, stripes)
    if plain.most_slots < 16 * stripes:
        assert budget == plain
        return
    assert budget.stripes == stripes
    assert budget.most_slots > 0.99 * plain.most_slots - 3 * stripes, "each has a header"
    segments: list[int] = []
    for _ in range(stripes):
        segments.append(budget.next_segment(segments))
    assert min(segments) > 0
    assert budget.cost(segments) <= capacity


@given(st.integers(1, 4000), st.integers(1, 3))
def test_what_just_fits_is_used_and_a_byte_less_is_a_slot_less(slots, stripes):
    num_segments = stripes if slots >= 16 * stripes else 1
    capacity = Budget(0, 4096, 1, 0).cost_of(slots, num_segments)
    budget = Budget.of(capacity, 4096, 1 << 30, stripes)
    if stripes == 1:
        assert budget.most_slots == slots
        assert budget.next_segment([]) == slots
        assert Budget.of(capacity - 1, 4096, 1 << 30).most_slots == slots - 1
        assert Budget(capacity - 1, 4096, slots, 0).next_segment([]) == slots - 1
    assert budget.cost_of(budget.most_slots, num_segments) <= capacity


def test_a_store_has_stripes_from_sixteen_slots_for_each_on():
    capacity = Budget(0, 4096, 1, 0).cost_of(32, 1)
    assert Budget.of(capacity, 4096, 1 << 30, 2).stripes == 2
    assert Budget.of(capacity - 1, 4096, 1 << 30, 2).stripes == 1


def test_large_blocks_use_nearly_all_of_the_capacity():
    for block_bytes, share in [(64 << 10, 0.98), (1 << 20, 0.99), (4 << 20, 0.99)]:
        budget = Budget.of(16 << 30, block_bytes, 1 << 30)
        assert budget.most_slots * block_bytes > share * (16 << 30)


def test_what_may_be_added_can_be_limited():
    budget = Budget.of(64 * MIB, 4096, 8 * MIB)
    assert budget.next_segment([]) == 2048
    assert budget.next_segment([], 10) == 10
    assert budget.next_segment([], 0) == 0


@pytest.mark.parametrize(("block", "slot"), [(1, 4096), (4096, 4096), (4097, 8192)])
def test_slots_are_whole_pages(block, slot):
    assert slot_bytes_of(block) == slot


def test_few_slots_stand_empty_so_that_jobs_find_neighbours_and_none_where_that_gains_nothing():
    def ahead(capacity, block_bytes):
        return Budget.of(capacity, block_bytes, 1 << 30).slots_ahead

    assert ahead(64 << 30, 64 << 10) == 256
    assert ahead(64 << 30, 1 << 20) == 32
    assert ahead(64 << 30, 4 << 20) == 0, "a block is as long as a call"
    assert ahead(64 * MIB, 64 << 10) == Budget.of(64 * MIB, 64 << 10, 1 << 30).most_slots // 16
    assert ahead(8 * MIB, 64 << 10) == 0, "too few for a job's neighbours"


@pytest.mark.parametrize(
    ("capacity", "block_bytes", "segment"),
    [
        (16 << 40, 64 << 10, 1 << 30),
        (1 << 30, 64 << 10, 64 * MIB),
        (16 * MIB, 64 << 10, 4 * MIB),
        (16 * MIB, 5 * MIB, 5 * MIB),
    ],
    ids=["large", "a sixteenth", "small", "large blocks"],
)
def test_a_segment_is_a_sixteenth_of_the_capacity_by_default_within_bounds(
    capacity, block_bytes, segment
):
    settings = SlabSettings(root_dir="/r", run_config={}, capacity_bytes=capacity)
    budget = settings.budget(block_bytes)
    assert budget.segment_slots == segment // block_bytes
    assert budget.next_segment([]) == segment // block_bytes


def test_a_given_size_of_a_segment_is_used_whatever_the_capacity():
    settings = SlabSettings(
        root_dir="/r", run_config={}, capacity_bytes=1 << 30, segment_bytes=512 * MIB
    )
    assert settings.budget(64 << 10).segment_slots == 512 * MIB // (64 << 10)
