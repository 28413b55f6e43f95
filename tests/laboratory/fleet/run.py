"""The parent of a fleet: three passes over the same requests, each with new processes.

Alone: each process has only its own tiers. Lockstep: all share a tier, and a request begins when
all stores of earlier requests have ended. Free-running: each process continues as soon as its own
last request is finished.
"""

from __future__ import annotations

import json
import select
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from kvoffload_async.config import OffloadConfig
from kvoffload_async.errors import StalledError
from kvoffload_async.facade.spec import TieringOffloadingSpec
from kvoffload_async.replay.report import Report
from kvoffload_async.replay.run import stall_timeout_s
from laboratory.fleet.plan import RANDOM, Equipment, UnboundedCache, spread
from laboratory.fleet.process import DONE, READY, MemberProcess, Start, settings_of

_GIB: Final = 1 << 30
_SAME: Final = frozenset(
    {
        *("policy", "primary_blocks", "block_bytes", "row_bytes", "concurrency", "engine"),
        *("device_blocks", "layers"),
    }
)
"""Figures that are equal in all processes and not summed."""


@dataclass(frozen=True, slots=True)
class FleetPass:
    """Results of one pass of all processes.

    Attributes:
        name: `"alone"`, `"lockstep"` or `"free"`.
        members: Results of each process; if one was killed and replaced, of both.
        wall_s: Duration of the pass in seconds.
        killed: Processes killed during the pass.
    """

    name: str
    members: tuple[Report, ...]
    wall_s: float
    killed: int = 0

    @property
    def total(self) -> Report:
        """Sum over the processes; times of the owner are those of the slowest process."""
        return _summed(self.members, self.wall_s)

    @property
    def costs(self) -> dict[str, dict[str, float]]:
        """Billable usage by tier: requests, and GiB moved in either direction."""
        return {
            name: {
                "requests": tier["requests"],
                "stored_gib": tier["stored_bytes"] / _GIB,
                "loaded_gib": tier["loaded_bytes"] / _GIB,
            }
            for name, tier in self.total.tiers.items()
        }


@dataclass(frozen=True, slots=True)
class FleetReport:
    """Results of a fleet.

    Attributes:
        passes: The passes, in order; the last one may have been interrupted.
        unbounded: Hit ratio of one unbounded cache.
        interrupted: Whether the fleet was stopped early.
        fleet: Number of processes.
        spread: How requests were assigned to processes.
    """

    passes: tuple[FleetPass, ...]
    unbounded: float
    interrupted: bool
    fleet: int
    spread: str

    @property
    def complaints(self) -> list[str]:
        """Errors found in the passes."""
        return [
            f"{one.name}: {complaint}" for one in self.passes for complaint in one.total.complaints
        ]

    def named(self, name: str) -> FleetPass | None:
        """Return a pass by name, or None if it was not made."""
        return next((one for one in self.passes if one.name == name), None)

    def ratio(self, name: str) -> float | None:
        """Return a pass's hit ratio, or None if it was not made."""
        one = self.named(name)
        return None if one is None else one.total.hit_ratio

    def to_json(self) -> str:
        """Return a JSON object: the lockstep pass's results like a plain replay's, and the fleet's.

        `alone`, `shared`, `shared_free_running` and `unbounded` are hit ratios.
        """
        shown = self.named("lockstep") or self.passes[-1]
        figures: dict[str, Any] = asdict(shown.total)
        figures |= {
            "interrupted": self.interrupted,
            "fleet": self.fleet,
            "spread": self.spread,
            "alone": self.ratio("alone"),
            "shared": self.ratio("lockstep"),
            "shared_free_running": self.ratio("free"),
            "unbounded": self.unbounded,
            "passes": {
                one.name: {
                    "hit_ratio": one.total.hit_ratio,
                    "jobs_submitted": one.total.jobs_submitted,
                    "job_results": one.total.job_results,
                    "job_failures": one.total.job_failures,
                    "corrupt_blocks": one.total.corrupt_blocks,
                    "wall_s": one.wall_s,
                    "killed": one.killed,
                    "costs": one.costs,
                    "members": [
                        {"requests": report.requests, "hit_ratio": report.hit_ratio}
                        for report in one.members
                    ],
                }
                for one in self.passes
            },
        }
        return json.dumps(figures, indent=2)


def _summed(reports: Sequence[Report], wall_s: float) -> Report:
    first = reports[0]
    sums: dict[str, Any] = {
        option.name: sum(getattr(report, option.name) for report in reports)
        for option in fields(Report)
        if option.name not in _SAME and isinstance(getattr(first, option.name), int)
    }
    hits: Counter[str] = Counter()
    for report in reports:
        hits.update(report.hits)
    return replace(
        first,
        **sums
        | {
            "interrupted": any(report.interrupted for report in reports),
            "hits": dict(hits),
            "hit_ratio": hits.total() / max(1, sums["block_refs"]),
            "wall_s": wall_s,
            "block_refs_per_s": sums["block_refs"] / max(wall_s, 1e-9),
            "owner_us_per_step": _greatest([report.owner_us_per_step for report in reports]),
            "tiers": {
                name: {
                    figure: sum(report.tiers[name][figure] for report in reports)
                    for figure in figures
                }
                for name, figures in first.tiers.items()
            },
        },
    )


def _greatest(times: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: max(one[name] for one in times) for name in times[0]}


_START_MARGIN_S: Final = 60.0
"""Start-up time of interpreter and libraries on a loaded machine, besides opening the tiers."""
_WATCH_S: Final = 0.1

ALONE, LOCKSTEP, FREE = "alone", "lockstep", "free"
PASSES: Final = (ALONE, LOCKSTEP, FREE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """Settings of a fleet.

    Attributes:
        size: Number of processes.
        spread: `"random"` or `"affinity"`; see `plan.spread`.
        seed: Seed of the random spread.
        kill_at: In the passes with shared tiers, kill the process of the request with this number,
            from 1: in lockstep just before it gets the request, else while it works on it. A new
            process takes over, including the request.
        verify: Compare loaded blocks.
        layers: Tensors of the device memory.
        should_stop: Returns whether to send no more requests.
        before_request: Called with pass and number before a request is sent, for tests that
            disrupt the shared tier.
        on_request: Called when a request is finished, in each pass.
    """

    size: int
    spread: str = RANDOM
    seed: int = 0
    kill_at: int | None = None
    verify: bool = True
    layers: int = 2
    should_stop: Callable[[], bool] = lambda: False
    before_request: Callable[[str, int], None] = lambda _pass, _number: None
    on_request: Callable[[], None] = lambda: None


def run_fleet(
    config: OffloadConfig,
    requests: Sequence[Sequence[int]],
    options: FleetOptions,
    scratch: Path,
) -> FleetReport:
    """Replay requests on a fleet: alone, in lockstep, and free-running.

    Args:
        config: Configuration of one process; see `Equipment` for its tiers.
        requests: The requests, in order.
        options: Settings of the fleet.
        scratch: A temporary folder.

    Raises:
        InputError: The configuration is unusable for a fleet.
        StalledError: A process makes no progress; all processes were killed.
        OffloadError: A process ended unexpectedly, or its engine failed to shut down; all
            processes were killed.
    """
    equipment = Equipment(config, scratch)
    passes: list[FleetPass] = []
    for name in PASSES:
        if options.should_stop():
            break
        try:
            passes.append(_Pass(name, equipment, requests, options).run())
        finally:
            equipment.remove_folders(options.size, name)
    return FleetReport(
        tuple(passes),
        UnboundedCache.over(requests).hit_ratio,
        interrupted=options.should_stop(),
        fleet=options.size,
        spread=options.spread,
    )


class _Pass:
    """One pass: each process has at most one request, which it answers when finished."""

    def __init__(
        self,
        name: str,
        equipment: Equipment,
        requests: Sequence[Sequence[int]],
        options: FleetOptions,
    ) -> None:
        self._name = name
        self._equipment = equipment
        self._requests = requests
        self._options = options
        self._is_lockstep = name == LOCKSTEP
        self._kill_at = None if name == ALONE else options.kill_at
        whose = spread(requests, options.size, options.spread, options.seed)
        self._waiting: deque[tuple[int, int]] = deque(enumerate(whose))
        """(request index from 0, member) for all requests to send."""
        self._shares: list[deque[int]] = [deque() for _ in range(options.size)]
        if not self._is_lockstep:
            for index, member in self._waiting:
                self._shares[member].append(index)
        self._members: list[MemberProcess] = []
        self._busy: dict[int, tuple[int, float]] = {}
        """Busy members: their request, and the deadline for its answer."""
        self._ended: list[Report] = []
        self._killed = 0
        settings = equipment.of(0, name, shares=name != ALONE, remembers=not self._is_lockstep)
        self._patience_s = stall_timeout_s(TieringOffloadingSpec(settings))
        self._shutdown_s = settings.shutdown_timeout_s + self._patience_s

    def run(self) -> FleetPass:
        begun_s = time.perf_counter()
        try:
            self._members.extend(self._start(index) for index in range(self._options.size))
            for member in self._members:
                self._welcome(member)
            while not self._options.should_stop():
                self._send_next()
                if not self._busy:
                    break
                self._take_answers()
            for index in list(self._busy):  # finish requests in flight
                self._members[index].wait_for(DONE, self._patience_s)
            for member in self._members:
                member.end(self._shutdown_s)
        finally:
            for member in self._members:
                member.kill()
        reports = [member.report for member in self._members]
        return FleetPass(
            self._name,
            (*(report for report in reports if report is not None), *self._ended),
            time.perf_counter() - begun_s,
            self._killed,
        )

    # -- requests -------------------------------------------------------------------------------

    def _send_next(self) -> None:
        if self._is_lockstep:
            if self._waiting and not self._busy:
                index, member = self._waiting.popleft()
                self._send(member, index)
            return
        for member, share in enumerate(self._shares):
            if share and member not in self._busy:
                self._send(member, share.popleft())

    def _send(self, member: int, index: int) -> None:
        self._options.before_request(self._name, index + 1)
        if index + 1 == self._kill_at:
            if not self._is_lockstep:  # whose hits must not depend on how far the request had come
                self._members[member].send(self._requests[index], self._patience_s)
            self._replace(member)
        self._members[member].send(self._requests[index], self._patience_s)
        self._busy[member] = (index, time.monotonic() + self._patience_s)

    def _take_answers(self) -> None:
        watched = {self._members[index]: index for index in self._busy}
        for member in select.select(list(watched), [], [], _WATCH_S)[0]:
            if member.take_answer() == DONE:
                del self._busy[watched[member]]
                self._options.on_request()
        now_s = time.monotonic()
        for index, until_s in self._busy.values():
            if now_s > until_s:
                raise StalledError(
                    f"{self._name}: request {index + 1} was not at rest after "
                    f"{self._patience_s:g} s"
                )

    # -- processes ------------------------------------------------------------------------------

    def _start(self, index: int) -> MemberProcess:
        settings = self._equipment.of(
            index, self._name, shares=self._name != ALONE, remembers=not self._is_lockstep
        )
        start = Start(
            config=settings_of(settings),
            most_blocks=max(map(len, self._requests), default=0),
            verify=self._options.verify,
            layers=self._options.layers,
        )
        return MemberProcess(f"process {index} of the fleet ({self._name})", start)

    def _welcome(self, member: MemberProcess) -> None:
        member.flush(_START_MARGIN_S)
        member.wait_for(READY, self._patience_s + _START_MARGIN_S)

    def _replace(self, index: int) -> None:
        """Kill a process and start another on the same tiers."""
        killed = self._members[index]
        killed.kill()
        self._killed += 1
        if killed.report is not None:
            self._ended.append(killed.report)
        self._members[index] = self._start(index)
        self._welcome(self._members[index])
