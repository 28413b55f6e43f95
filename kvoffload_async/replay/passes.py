"""Several passes of one replay over the same tiers, and their figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from kvoffload_async.facade.spec import TieringOffloadingSpec
from kvoffload_async.replay.report import Report
from kvoffload_async.replay.run import ReplayOptions, replay
from kvoffload_async.replay.source import RequestSource
from kvoffload_async.timeline import RequestTimeline

Follow = Callable[[RequestSource, int], AbstractContextManager[Callable[[], None]]]
"""Given a pass's requests and its number, from 1 on: yields what to call after each step."""


Watch = Callable[[int, RequestTimeline], None]
"""Given a pass's number, and the timeline of one of its requests."""


@dataclass(frozen=True, slots=True)
class PassReports:
    """The reports of the passes, the first one cold; at least one."""

    passes: tuple[Report, ...]

    @property
    def interrupted(self) -> bool:
        """Whether the last one ended before its requests did."""
        return self.passes[-1].interrupted

    @property
    def complaints(self) -> list[str]:
        """What must never happen, and did; behind the first pass with the pass's number."""
        return [
            complaint if number == 1 else f"pass {number}: {complaint}"
            for number, report in enumerate(self.passes, 1)
            for complaint in report.complaints
        ]

    def to_json(self) -> str:
        """Return one JSON object: the first pass's figures, with those of the others in it.

        The second pass is under `warm`, those behind it are a list under `later_passes`.
        """
        figures, *others = (report.to_dict() for report in self.passes)
        if others:
            figures["warm"] = others[0]
        if others[1:]:
            figures["later_passes"] = others[1:]
        return json.dumps(figures, indent=2)


@contextmanager
def _unseen(_source: RequestSource, _number: int) -> Iterator[Callable[[], None]]:
    yield lambda: None


def replay_passes(
    spec: TieringOffloadingSpec,
    open_source: Callable[[], RequestSource],
    options: ReplayOptions,
    num_passes: int,
    *,
    follow: Follow = _unseen,
    watch: Watch | None = None,
) -> PassReports:
    """Replay the same requests several times, each time on a new engine over the same tiers.

    Args:
        spec: The engine's; the first pass uses it, the others its configuration.
        open_source: Returns the requests, from the first on.
        options: How to replay.
        num_passes: How often, at most: an interrupted pass is the last.
        follow: Entered for each pass.
        watch: Takes the timelines of requests; needs a configuration with `explain_requests`.

    Raises:
        OffloadError: See `replay`.
    """
    reports: list[Report] = []
    for number in range(1, num_passes + 1):
        if reports:
            spec = TieringOffloadingSpec(spec.config)
        with closing(open_source()) as source, follow(source, number) as on_step:
            on_timeline = None if watch is None else partial(watch, number)
            run = replace(options, on_step=on_step, on_timeline=on_timeline)
            reports.append(replay(spec, source, run))
        if reports[-1].interrupted:
            break
    return PassReports(tuple(reports))
