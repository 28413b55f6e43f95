"""A simulated device: the frames of each request, and the blocks that frames contain."""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Final

import numpy as np

from kvoffload_async.errors import InputError
from kvoffload_async.types import OffloadKey, make_offload_key

DEVICE: Final = "device"
"""Name of the device among the tiers."""
PRIMARY: Final = "primary"
"""Name of the primary among the tiers."""

_HASH_BYTES = 16


class Stage(enum.Enum):
    """Stage of a request."""

    WAITING = enum.auto()
    """The request has no frames: it is new, or was preempted."""
    LOADING = enum.auto()
    """Its blocks are being loaded into its frames."""
    RUNNING = enum.auto()
    """Its blocks are being computed, step by step."""
    ENDED = enum.auto()


class Prompt:
    """A request with its distinct blocks; implements `SchedulerRequest`.

    Each device block counts as one token. One more token follows the blocks, because the last token
    of a prompt is never loaded.

    Attributes:
        request_id: Name of the request.
        block_hashes: Hashes of its blocks' keys, in prompt order.
        names: Ids of its blocks, parallel to the hashes; `ids` is the same as a list.
        references: References to each block, of which a prompt may have several.
        arrived_s: When it arrived, on the clock of `time.monotonic`.
        origins: The tier that was read for each block.
        stage: Its stage.
        frames: Its frames in the device's memory.
        ready: Leading blocks present in its frames.
        found_on_device: Blocks found on the device at its first start.
        found_beyond: Further blocks loaded at its first start.
        num_tokens: See `SchedulerRequest`, as for `num_prompt_tokens` and `num_computed_tokens`.
    """

    kv_transfer_params = None

    def __init__(self, number: int, block_ids: Sequence[int], tokens_per_block: int = 1) -> None:
        self.request_id = f"request-{number}"
        self.references = Counter(block_ids)
        self.ids = list(self.references)
        self.names = np.array(self.ids, dtype=np.uint64)
        self.block_hashes = [i.to_bytes(_HASH_BYTES, "big") for i in self.ids]
        self.num_tokens = self.num_prompt_tokens = len(self.ids) * tokens_per_block + 1
        self.num_computed_tokens = 0
        self.arrived_s = time.monotonic()
        self.origins: dict[OffloadKey, str] = {}
        self.stage = Stage.WAITING
        self.frames: list[int] = []
        self.ready = 0
        self.has_started = False
        self.found_on_device = 0
        self.found_beyond = 0

    def is_finished(self) -> bool:
        """Return whether the request has ended; see `SchedulerRequest`."""
        return self.stage is Stage.ENDED

    def start(self, on_device: int, beyond: int) -> None:
        """Record the blocks found at the first start; restarts after a preemption do not count."""
        if not self.has_started:
            self.has_started = True
            self.found_on_device, self.found_beyond = on_device, beyond

    def count_hits(self, hits: Counter[str]) -> None:
        """Add the references to blocks found at the first start to `hits`, by their source."""
        for index, block_id in enumerate(self.ids[: self.found_on_device + self.found_beyond]):
            source = DEVICE
            if index >= self.found_on_device:
                key = make_offload_key(self.block_hashes[index])
                source = self.origins.get(key, PRIMARY)
            hits[source] += self.references[block_id]


class FramePool:
    """Allocates frames of one block each; a frame may have several owners.

    Frames without an owner are reused in the order of their release. If the pool keeps contents, it
    is thus a simple LRU prefix cache.
    """

    def __init__(self, num_frames: int, *, keeps_contents: bool) -> None:
        """Create the frames 1 to `num_frames`, all free."""
        self.num_frames = num_frames
        self._keeps_contents = keeps_contents
        self._free = dict.fromkeys(range(1, num_frames + 1))  # in order of reuse
        self._owners: Counter[int] = Counter()
        self._frame_of: dict[int, int] = {}
        self._name_of: dict[int, int] = {}

    def match(self, names: Sequence[int]) -> list[int]:
        """Return the frames of the longest cached prefix of these blocks."""
        frames: list[int] = []
        for name in names:
            frame = self._frame_of.get(name)
            if frame is None:
                break
            frames.append(frame)
        return frames

    def claim(self, matched: Sequence[int], count: int) -> list[int] | None:
        """Acquire the matched frames and `count` other frames; None if too few are free.

        Returns:
            The other frames; their former contents are no longer cached.
        """
        if len(self._free) - sum(frame in self._free for frame in matched) < count:
            return None
        for frame in matched:
            self._free.pop(frame, None)
        taken = list(islice(self._free, count))
        for frame in taken:
            del self._free[frame]
            name = self._name_of.pop(frame, None)
            if name is not None:
                del self._frame_of[name]
        self._owners.update(matched)
        self._owners.update(taken)
        return taken

    def publish(self, names: Sequence[int], frames: Sequence[int]) -> None:
        """Make the contents of frames available to other requests."""
        if not self._keeps_contents:
            return
        for name, frame in zip(names, frames, strict=True):
            if name not in self._frame_of:
                self._frame_of[name] = frame
                self._name_of[frame] = name

    def release(self, frames: Sequence[int]) -> None:
        """Release frames; the tail of a prompt is reused before its head."""
        for frame in reversed(frames):
            self._owners[frame] -= 1
            if not self._owners[frame]:
                del self._owners[frame]
                self._free[frame] = None


def require_room(prompt: Prompt, pool: FramePool) -> None:
    """Raise InputError if a request has more blocks than the device has frames."""
    if len(prompt.ids) > pool.num_frames:
        raise InputError(
            f"{prompt.request_id} has {len(prompt.ids)} blocks, and the device room for "
            f"{pool.num_frames}; give more --device-blocks"
        )
