"""The frames of a simulated device: who has them, and what they still hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice


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
