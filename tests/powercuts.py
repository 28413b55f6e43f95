"""Opening a store over every state that a disk may have after a power cut."""

import asyncio
import os
import random
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from tempfile import NamedTemporaryFile

from power_cut import MetadataOrder, PowerCuts, Recording, State
from sealed_names import TEXT

from kvoffload_async.abc.maintenance import (
    Finding,
    GcOptions,
    MaintenanceControl,
    Problem,
    Removal,
    StoreMaintenance,
)

PER_STEP = int(os.environ.get("KVOFFLOAD_POWER_CUTS", "100"))
"""How many states a sweep tries at most after each step of a small workload."""


def states(
    recording: Recording, order: MetadataOrder, per_step: int, seed: int = 7
) -> Iterator[State]:
    """Yield the states after a cut at every step, each once, for the last step that has it.

    Whatever was acknowledged before an earlier step was so before the last one, too.
    """
    cuts, draw, seen = PowerCuts(recording, order), random.Random(seed), set()
    for step in range(recording.num_steps, -1, -1):
        for state in cuts.all_states(step, per_step, draw):
            digest = state.digest()
            if digest not in seen:
                seen.add(digest)
                yield state


def sampled(
    recording: Recording, order: MetadataOrder, count: int, seed: int = 7
) -> Iterator[State]:
    """Yield some states of a large workload."""
    cuts, draw = PowerCuts(recording, order), random.Random(seed)
    for _ in range(count):
        yield cuts.sample(draw.randrange(recording.num_steps + 1), draw)


def check_each(
    found: Iterator[State], folder: Path, check: Callable[[Path, list[object]], None]
) -> int:
    """Build each state and check it, given what was acknowledged; return how many there were."""
    count, root = 0, folder / "state"
    for state in found:
        state.build(root)
        try:
            check(root, state.recording.marked(state.step))
        except BaseException as error:
            error.add_note(str(state))
            raise
        count += 1
    return count


def problems(
    maintenance: type[StoreMaintenance], root: Path, verify: object = None
) -> list[Finding]:
    """Return what `gc` removes, and then what `verify` finds to be wrong."""
    with NamedTemporaryFile() as key_file:
        key_file.write(TEXT.encode())
        key_file.flush()
        key_files = [key_file.name] if verify == "encrypted" else []
        return asyncio.run(_problems(maintenance, str(root), key_files))


async def _problems(
    maintenance: type[StoreMaintenance], root: str, key_files: list[str]
) -> list[Finding]:
    found: list[Finding] = []
    for store in await maintenance.find(root):
        if key_files:
            store.use_encryption_key_files(key_files)
        control = MaintenanceControl()
        for run in (store.gc(GcOptions(), control), store.verify(control)):
            async with aclosing(run) as findings:
                found += [f async for f in findings if isinstance(f, Problem | Removal)]
    return found
