"""One who is measured: a secondary tier, this package's or a peer's, behind the same few calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from kvoffload_async.bench.places import Place
from kvoffload_async.errors import OffloadError
from kvoffload_async.types import BlockIds, OffloadKey


class UnfitError(OffloadError):
    """Somebody cannot be measured: it fails, it hangs, or it returns other bytes than it got."""


class Result(Protocol):
    """How a job has ended."""

    @property
    def job_id(self) -> int: ...

    @property
    def success(self) -> bool: ...


class Manager(Protocol):
    """A secondary tier as a scheduler calls it; names and meaning are vLLM's."""

    def submit_store(self, job: Any, /) -> None: ...  # noqa: ANN401 - each has a class of its own

    def submit_load(self, job: Any, /) -> None: ...  # noqa: ANN401 - each has a class of its own

    def get_finished_jobs(self) -> Iterable[Result]: ...

    def on_schedule_end(self, context: Any, /) -> None: ...  # noqa: ANN401 - as above

    def lookup(self, key: Any, request: Any, /) -> Any: ...  # noqa: ANN401 - as above


class OpenTier(Protocol):
    """A tier that is open on an empty store.

    Attributes:
        manager: What is measured.
        request: What `lookup` gets beside the key.
        step: What `on_schedule_end` gets.
    """

    @property
    def manager(self) -> Manager: ...

    @property
    def request(self) -> object: ...

    @property
    def step(self) -> object: ...

    def make_job(
        self, job_id: int, keys: Sequence[OffloadKey], rows: BlockIds, *, is_load: bool
    ) -> object:
        """Return what the manager's submit methods take."""
        ...

    def close(self) -> None:
        """Close it, and wait for that."""
        ...


class Contender(Protocol):
    """What is opened anew in every round.

    Attributes:
        name: What it is called in the figures.
        options: As the user gave them.
        place: Where it writes; None if it takes no directory.
    """

    name: str
    options: Mapping[str, Any]
    place: Place | None

    def capacity_bytes(self, stored_bytes: int) -> int | None:
        """Return how much it takes until it writes over what it has; None if it never does."""
        ...

    def open(self, view: memoryview, directory: str | None, stored_bytes: int) -> OpenTier:
        """Open it on an empty store.

        Args:
            view: The primary's rows.
            directory: A new directory in its place.
            stored_bytes: What will be stored in it.
        """
        ...
