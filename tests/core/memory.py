"""Memory that can be wrong: the bytes of a slot are a string, and what is being written is garbage.

A copy between slots and the device waits in here until somebody ends it.
"""

from dataclasses import dataclass

from planner_invariants import ContentRead, ContentWritten, History

from kvoffload_async.types import OffloadKey, ReqContext


def content(key: OffloadKey) -> str:
    return f"bytes of {key.hex()}"


@dataclass
class Write:
    """A copy from the device into slots, which ends with `complete_store`."""

    ctx: ReqContext
    keys: list[OffloadKey]
    slots: list[int]
    generation: int
    stale: bool = False
    landed: bool = False


@dataclass
class Read:
    """A copy from slots to the device, which ends with `complete_load`."""

    ctx: ReqContext
    keys: list[OffloadKey]
    slots: list[int]
    generation: int
    stale: bool = False


class Memory:
    """The primary's slots; the history records what the device writes into them and reads."""

    def __init__(self, num_slots: int, history: History):
        self.slots = ["never written"] * num_slots
        self.history = history
        self.garbage = 0

    def write(self, keys, slots):
        for key, slot in zip(keys, slots, strict=True):
            self.slots[slot] = content(key)
            self.history.record(ContentWritten(key, content(key)))

    def read(self, keys, slots):
        for key, slot in zip(keys, slots, strict=True):
            self.history.record(ContentRead(key, self.slots[slot]))
            assert self.slots[slot] == content(key), f"slot {slot} does not hold {key.hex()}"

    def soil(self, slots):
        for slot in slots:
            self.garbage += 1
            self.slots[slot] = f"garbage {self.garbage}"
