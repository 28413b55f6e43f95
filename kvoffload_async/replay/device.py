"""A simulated device: which request has which frames, and what they still hold."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from itertools import islice

import numpy as np

from kvoffload_async.errors import InputError
from kvoffload_async.types import OffloadKey, make_offload_key

_HASH_BYTES = 16


class Stage(enum.Enum):
    """Where a request stands."""

    WAITING = enum.auto()
    """It has no frames, or has lost them."""
    LOADING = enum.auto()
    """Its frames are being filled."""
    RUNNING = enum.auto()
    """It is computed, step by step."""
    ENDED = enum.auto()


class Prompt:
    """A request's blocks, each once; what a scheduler knows of it: see `SchedulerRequest`.

    A block has a token a device block, and behind the blocks comes one more token, since the last
    token of a prompt is never loaded.

    Attributes:
        request_id: Its name.
        block_hashes: The keys' hashes of its blocks, head first.
        names: Their ids, parallel to them; `ids` are the same as a list.
        refs: How many blocks it names, repeated ones included.
        weights: References to each block, or None where no block comes twice.
        origins: Which tier was read for which block.
        stage: Where it stands.
        frames: Its place in the device's memory.
        ready: Blocks, from the head, that are in its frames.
        found_on_device: Blocks found there when it first started.
        found_beyond: Blocks behind those that were loaded when it first started.
        num_computed_tokens: See `SchedulerRequest`.
    """

    __slots__ = (
        "block_hashes",
        "found_beyond",
        "found_on_device",
        "frames",
        "has_started",
        "ids",
        "names",
        "num_computed_tokens",
        "num_tokens",
        "origins",
        "ready",
        "refs",
        "request_id",
        "stage",
        "weights",
    )

    kv_transfer_params = None

    def __init__(self, number: int, block_ids: Sequence[int], tokens_per_block: int = 1) -> None:
        self.request_id = f"request-{number}"
        self.ids = list(dict.fromkeys(block_ids))
        self.refs = len(block_ids)
        self.weights = Counter(block_ids) if len(self.ids) < len(block_ids) else None
        self.names = np.array(self.ids, dtype=np.uint64)
        self.block_hashes = [i.to_bytes(_HASH_BYTES, "big") for i in self.ids]
        self.num_tokens = len(self.ids) * tokens_per_block + 1
        self.num_computed_tokens = 0
        self.origins: dict[OffloadKey, str] = {}
        self.stage = Stage.WAITING
        self.frames: list[int] = []
        self.ready = 0
        self.has_started = False
        self.found_on_device = 0
        self.found_beyond = 0

    @property
    def num_prompt_tokens(self) -> int:
        """See `SchedulerRequest`."""
        return self.num_tokens

    def is_finished(self) -> bool:
        """See `SchedulerRequest`."""
        return self.stage is Stage.ENDED

    def start(self, on_device: int, beyond: int) -> None:
        """Note what was found; only the first start counts, not one after a preemption."""
        if not self.has_started:
            self.has_started = True
            self.found_on_device, self.found_beyond = on_device, beyond

    def count_hits(self, hits: Counter[str], device: str, primary: str) -> None:
        """Add the references to what was found, by where it came from."""
        if self.found_on_device:
            hits[device] += sum(map(self._weight, range(self.found_on_device)))
        end = self.found_on_device + self.found_beyond
        for index in range(self.found_on_device, end):
            key = make_offload_key(self.block_hashes[index])
            hits[self.origins.get(key, primary)] += self._weight(index)

    def _weight(self, index: int) -> int:
        return 1 if self.weights is None else self.weights[self.ids[index]]


class FramePool:
    """Hands out frames, each with room for one block; a frame may have several owners.

    Frames that nobody owns are given away in the order in which they were let go: a simple prefix
    cache with LRU, if it keeps contents at all.
    """

    def __init__(self, num_frames: int, *, keeps_contents: bool) -> None:
        """Start with frames 1 to `num_frames`, all free."""
        self.num_frames = num_frames
        self._keeps_contents = keeps_contents
        self._free = dict.fromkeys(range(1, num_frames + 1))  # the next to be given away first
        self._owners: Counter[int] = Counter()
        self._frame_of: dict[int, int] = {}
        self._name_of: dict[int, int] = {}

    def match(self, names: Sequence[int]) -> list[int]:
        """Return the frames of the longest head of these blocks that is there."""
        frames: list[int] = []
        for name in names:
            frame = self._frame_of.get(name)
            if frame is None:
                break
            frames.append(frame)
        return frames

    def claim(self, matched: Sequence[int], count: int) -> list[int] | None:
        """Become an owner of matched frames and of `count` others; None if there is no room.

        Returns:
            The others; what they held is forgotten.
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
        """Let others find what these frames hold from now on."""
        if not self._keeps_contents:
            return
        for name, frame in zip(names, frames, strict=True):
            if name not in self._frame_of:
                self._frame_of[name] = frame
                self._name_of[frame] = name

    def release(self, frames: Sequence[int]) -> None:
        """Own frames no longer; of a prompt, the tail is given away before the head."""
        for frame in reversed(frames):
            self._owners[frame] -= 1
            if not self._owners[frame]:
                del self._owners[frame]
                self._free[frame] = None


def require_room(prompt: Prompt, pool: FramePool) -> None:
    """Raise InputError if a request is larger than the device."""
    if len(prompt.ids) > pool.num_frames:
        raise InputError(
            f"{prompt.request_id} has {len(prompt.ids)} blocks, and the device room for "
            f"{pool.num_frames}; give more --device-blocks"
        )
