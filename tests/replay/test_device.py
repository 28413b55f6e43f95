"""The simulated device: what its memory holds, and who has its frames."""

import numpy as np
import pytest
from simulated_cuda.device import SimulatedCuda

from kvoffload_async.errors import ConfigError
from kvoffload_async.replay.device import FramePool
from kvoffload_async.transport.paged import PagedMemory


class TestContent:
    """Ten frames of 4 KiB in two layers; frames 1 to 4 hold blocks 10 to 13."""

    NAMES = np.arange(10, 14, dtype=np.uint64)
    FRAMES = (1, 2, 3, 4)

    @pytest.fixture
    def memory(self):
        memory = PagedMemory(10, 4096, layers=2)
        for pages in memory.kv_caches.values():
            pages.zero_()
        memory.compute(self.NAMES, self.FRAMES)
        return memory

    @pytest.fixture
    def pages(self, memory):
        return memory.kv_caches["layer1"]

    def test_what_was_written_verifies(self, memory):
        assert memory.count_wrong(self.NAMES, self.FRAMES) == 0

    def test_nothing_else_is_written(self, memory):
        for pages in memory.kv_caches.values():
            assert not pages[[0, *range(5, 11)]].any()

    def test_swapped_blocks_are_wrong(self, memory, pages):
        pages[[1, 2]] = pages[[2, 1]]
        assert memory.count_wrong(self.NAMES, self.FRAMES) == 2

    def test_swapped_layers_are_wrong(self, memory, pages):
        pages[3] = memory.kv_caches["layer0"][3]
        assert memory.count_wrong(self.NAMES, self.FRAMES) == 1

    def test_a_stale_block_is_wrong(self, memory):
        names = self.NAMES.copy()
        names[3] = 99
        assert memory.count_wrong(names, self.FRAMES) == 1

    @pytest.mark.parametrize("shift", [8, 1024])
    def test_a_shifted_block_is_wrong(self, memory, pages, shift):
        pages[1] = pages[1].roll(shift)
        assert memory.count_wrong(self.NAMES, self.FRAMES) == 1

    @pytest.mark.parametrize("byte", [0, 7, 8, 1025, 2047])
    @pytest.mark.parametrize("layer", ["layer0", "layer1"])
    def test_a_single_wrong_byte_is_wrong(self, memory, layer, byte):
        memory.kv_caches[layer][2, byte] ^= 1
        assert memory.count_wrong(self.NAMES, self.FRAMES) == 1

    def test_no_word_comes_twice(self, memory):
        words = [pages[1:5].numpy().view(np.uint64) for pages in memory.kv_caches.values()]
        assert len(np.unique(words)) == sum(part.size for part in words)

    @pytest.mark.parametrize("num_blocks", [1000, 3])
    @pytest.mark.parametrize("block_bytes", [4096, 200_000])
    def test_many_blocks_and_large_ones(self, num_blocks, block_bytes):
        memory = PagedMemory(num_blocks, block_bytes)
        names = np.arange(num_blocks, dtype=np.uint64)
        frames = (np.random.default_rng(1).permutation(num_blocks) + 1).tolist()
        memory.compute(names, frames)
        assert memory.count_wrong(names, frames) == 0
        wrong = [frames[0], frames[-1]]
        memory.kv_caches["layer0"][wrong, 5] ^= 255
        assert memory.count_wrong(names, frames) == 2

    def test_layers_share_what_does_not_divide(self):
        memory = PagedMemory(4, 100, layers=3)
        assert [tuple(pages.shape) for pages in memory.kv_caches.values()] == [
            (5, 34),
            (5, 33),
            (5, 33),
        ]
        memory.compute(self.NAMES, self.FRAMES)
        assert memory.count_wrong(self.NAMES, self.FRAMES) == 0
        for pages in memory.kv_caches.values():
            pages[1, -1] ^= 128
        assert memory.count_wrong(self.NAMES, self.FRAMES) == 1

    def test_a_frame_of_several_device_blocks(self):
        memory = PagedMemory(4, 4096, layers=2, blocks_per_chunk=2)
        assert memory.kv_caches["layer0"].shape == (10, 1024)
        assert memory.device_blocks([1, 3]) == [2, 3, 6, 7]
        memory.compute(self.NAMES, self.FRAMES)
        memory.kv_caches["layer0"][[4, 5]] = memory.kv_caches["layer0"][[5, 4]]
        assert memory.count_wrong(self.NAMES, self.FRAMES) == 1

    def test_every_worker_has_content_of_its_own(self, memory):
        other = PagedMemory(10, 4096, layers=2, salt=1)
        for name, pages in other.kv_caches.items():
            pages.copy_(memory.kv_caches[name])
        assert other.count_wrong(self.NAMES, self.FRAMES) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 5}, "block_bytes: 5 layers cannot share 4 bytes"),
        ({"num_frames": 1 << 55}, "--device-blocks: .* do not fit"),
    ],
)
def test_a_memory_that_cannot_be_had(options, message):
    with pytest.raises(ConfigError, match=message):
        PagedMemory(**{"num_frames": 1, "block_bytes": 4, **options})


def test_a_memory_on_a_device_is_written_and_read_in_the_order_of_its_stream():
    device = SimulatedCuda()
    memory = PagedMemory(4, 4096, layers=2, runtime=device)
    names = np.arange(10, 14, dtype=np.uint64)
    memory.compute(names, [1, 2, 3, 4])
    assert device.num_queued, "nobody has waited"
    assert memory.count_wrong(names, [1, 2, 3, 4]) == 0
    assert memory.count_wrong(names, [2, 1, 3, 4]) == 2


class TestFrames:
    """Four frames, whose contents are kept."""

    @pytest.fixture
    def pool(self):
        return FramePool(4, keeps_contents=True)

    def test_no_more_than_there_are(self, pool):
        assert pool.claim((), 3) == [1, 2, 3]
        assert pool.claim((), 2) is None
        assert pool.claim((), 1) == [4]

    def test_what_was_let_go_first_is_given_away_first_and_the_tail_before_the_head(self, pool):
        first, second = pool.claim((), 2), pool.claim((), 2)
        pool.release(second)
        pool.release(first)
        assert pool.claim((), 4) == [4, 3, 2, 1]

    def test_finds_the_head_that_is_there(self, pool):
        frames = pool.claim((), 3)
        pool.publish([7, 8, 9], frames)
        assert pool.match([7, 8, 5, 9]) == frames[:2]
        pool.release(frames)
        assert pool.match([7, 8, 9]) == frames
        pool.claim((), 2)  # the one that was never used, and the tail
        assert pool.match([7, 8, 9]) == frames[:2]

    def test_what_is_used_is_not_given_away(self, pool):
        frames = pool.claim((), 2)
        pool.publish([7, 8], frames)
        pool.release(frames)
        assert pool.claim(frames, 3) is None
        assert pool.claim(frames, 2) == [3, 4]
        assert pool.claim(frames, 0) == []
        pool.release(frames)
        assert pool.claim((), 1) is None
        pool.release(frames)
        assert pool.claim((), 2) == [2, 1]

    def test_the_first_of_two_equal_blocks_is_found(self, pool):
        first, second = pool.claim((), 1), pool.claim((), 1)
        pool.publish([7], first)
        pool.publish([7], second)
        assert pool.match([7]) == first

    def test_may_keep_nothing(self):
        pool = FramePool(4, keeps_contents=False)
        pool.publish([7], pool.claim((), 1))
        assert pool.match([7]) == []
