"""Request timelines of a replay: one printed as text, all written to a trace-event file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from rich.console import Console

from kvoffload_async.cli.output import STDOUT, as_unwritable, check_writable, shown
from kvoffload_async.errors import InputError
from kvoffload_async.facade.spec import TieringOffloadingSpec
from kvoffload_async.observe.trace_events import TraceEventFile
from kvoffload_async.timeline import RequestTimeline

_MORE_REQUESTS: Final = 64
"""Timelines kept beside those in flight, for requests whose last copies have not ended."""


class TimelineOutput:
    """Collects the timelines of a replay; as a context manager, closes the file on exit."""

    def __init__(self, explained: int | None, trace_out: str | None) -> None:
        """Print the timeline of request `explained`; write all to the file `trace_out`."""
        self._explained = explained
        self._name = trace_out
        self._file: TraceEventFile | None = None
        self._error: OSError | None = None
        self._texts: list[str] = []

    @property
    def is_wanted(self) -> bool:
        """Whether the replay must record timelines."""
        return self._explained is not None or self._name is not None

    def __enter__(self) -> Self:
        """Check that the file can be written; `recording` creates it.

        Raises:
            InputError: The file cannot be written.
        """
        if self._name is not None:
            if self._name == STDOUT:
                raise InputError("--trace-out -: expected a file")
            check_writable("--trace-out", self._name)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._file is not None:
            with as_unwritable("--trace-out", str(self._name)):
                self._file.close()

    def recording(self, spec: TieringOffloadingSpec, concurrency: int) -> TieringOffloadingSpec:
        """Return a spec whose engines record enough timelines, and create the file.

        Raises:
            InputError: The file cannot be written.
        """
        if not self.is_wanted:
            return spec
        if self._name is not None:
            with as_unwritable("--trace-out", self._name):
                self._file = TraceEventFile(Path(self._name))
        needed = 2 * concurrency + _MORE_REQUESTS
        kept = max(spec.config.explain_requests, needed)
        return TieringOffloadingSpec(replace(spec.config, explain_requests=kept))

    def watch(self, number: int, timeline: RequestTimeline) -> None:
        """Process a finished timeline of pass `number`."""
        name, _, _ = timeline.req_id.partition("/")
        if name == f"request-{self._explained}":
            self._texts.append(f"pass {number}, {timeline}")
        if self._file is not None and self._error is None:
            try:
                self._file.add(timeline, f"pass {number}")
            except OSError as error:  # the replay continues; `publish` raises the error
                self._error = error

    def publish(self, console: Console) -> None:
        """Print the timelines of the explained request.

        Raises:
            InputError: There was no such request, or the file could not be written.
        """
        for text in self._texts:  # they may contain error texts with any characters
            lines = "\n".join(map(shown, text.split("\n")))
            console.print(f"\n{lines}", markup=False, highlight=False, soft_wrap=True)
        if self._explained is not None and not self._texts:
            raise InputError(f"--explain {self._explained}: the replay had no such request")
        if self._error is not None:
            with as_unwritable("--trace-out", str(self._name)):
                raise self._error
