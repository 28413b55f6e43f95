"""One bench, from a checked plan to its report."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from typing import Any

from kvoffload_async.bench.contender import Contender
from kvoffload_async.bench.figures import Report, summarize
from kvoffload_async.bench.floor import Floor
from kvoffload_async.bench.peers import load_peer
from kvoffload_async.bench.plan import Plan
from kvoffload_async.bench.rounds import measure, rehearse, turns
from kvoffload_async.bench.tiers import OwnTier
from kvoffload_async.runtime.buffer import PAGE_BYTES


def run_bench(
    plan: Plan,
    tiers: Sequence[Mapping[str, Any]],
    peers: Sequence[Mapping[str, Any]] = (),
    *,
    expect: Callable[[int], None] = lambda _turns: None,
    advance: Callable[[int], None] = lambda _turns: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Report:
    """Measure tiers and peers beside what the machine can do, in directories that are removed.

    Args:
        plan: What to measure.
        tiers: Configurations of this package's tiers, as `SecondaryTierFactory` takes them.
        peers: Those of other engines' tiers; `type` is one of `PEERS`.
        expect: Told how many turns there are, once everybody has stored and loaded one block.
        advance: Told of each turn that has ended.
        should_stop: Asked before each turn; what is reported then is the rounds before it.

    Raises:
        InputError: Somebody is unknown, or there is no room for the plan.
        ConfigError: A configuration is unusable.
        OffloadError: Somebody cannot be measured; the message says who.
    """
    own = [OwnTier(config) for config in tiers]
    others = [load_peer(config) for config in peers]
    for one in own:
        one.check_capacity(plan.stored_bytes)
        one.check(plan.stored_bytes, [work.block_bytes for work in plan.works])
    contenders = _named_apart([*own, *others])
    with ExitStack() as stack:
        floors = _floors(contenders, plan, stack)
        rehearse(plan, contenders)
        different = list(dict.fromkeys(floor for floor in floors.values() if floor is not None))
        expect(turns(plan, different, contenders))
        measured = measure(
            plan, different, contenders, on_turn=lambda: advance(1), should_stop=should_stop
        )
        names = [peer.name for peer in others]
        sizes = tuple(summarize(samples, floors, names) for samples in measured)
    is_complete = len(sizes) == len(plan.works) and sizes[-1].rounds == plan.rounds
    return Report(
        interrupted=not is_complete,
        settings=_settings(plan),
        machine=_machine(),
        contenders={contender.name: _facts(contender, floors) for contender in contenders},
        sizes=sizes,
    )


def _named_apart(contenders: Sequence[Contender]) -> Sequence[Contender]:
    """Number those that have a name in common, so that each has figures of its own."""
    names = [contender.name for contender in contenders]
    for index, contender in enumerate(contenders):
        if names.count(names[index]) > 1:
            contender.name = f"{names[index]}#{names[: index + 1].count(names[index])}"
    return contenders


def _floors(
    contenders: Sequence[Contender], plan: Plan, stack: ExitStack
) -> dict[str, Floor | None]:
    """Return each one's floor: one a filesystem, since that is what is compared."""
    by_device: dict[int, Floor] = {}
    floors: dict[str, Floor | None] = {}
    for contender in contenders:
        place = contender.place
        if place is None:
            floors[contender.name] = None
            continue
        stack.enter_context(place)
        place.check_room(max(plan.room_bytes, _capacity_bytes(contender, plan)))
        floors[contender.name] = by_device.setdefault(place.device, Floor(place))
    return floors


def _capacity_bytes(contender: Contender, plan: Plan) -> int:
    """Return what it may take on disk besides what a round stores."""
    sizes = [contender.capacity_bytes(work.stored_bytes) or 0 for work in plan.works]
    return max(sizes) if plan.steady else 0


def _facts(contender: Contender, floors: dict[str, Floor | None]) -> dict[str, Any]:
    floor = floors[contender.name]
    return {
        "options": dict(contender.options),
        "directory": str(contender.place.path) if contender.place else None,
        "floor": floor.name if floor else None,
    }


def _settings(plan: Plan) -> dict[str, Any]:
    return {
        "total_bytes": plan.total_bytes,
        "keys_per_job": plan.keys_per_job,
        "one_job": plan.one_job,
        "in_flight": plan.in_flight,
        "rounds": plan.rounds,
        "threads": plan.threads,
        "direct_floor": plan.direct,
        "steady": plan.steady,
        "keep": plan.keep,
        "warm_up": plan.warm_up,
    }


def _machine() -> dict[str, Any]:
    return {
        "processors": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES,
        "system": platform.platform(),
        "python": platform.python_version(),
        "kvoffload_async": version("kvoffload-async"),
    }
