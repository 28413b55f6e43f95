"""Where requests come from: each is the ids of its prompt's blocks, head first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice

MAX_BLOCK_ID = 2**64 - 1


class RequestSource(ABC):
    """A stream of requests, optionally cut after the first `limit`."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._taken = 0

    def __iter__(self) -> Iterator[Sequence[int]]:
        for block_ids in islice(self._requests(), self._limit):
            self._taken += 1
            yield block_ids

    def close(self) -> None:  # noqa: B027 - most have nothing to let go of
        """Let go of where the requests come from."""

    @abstractmethod
    def most_blocks(self) -> int | None:
        """Return how many blocks a request has at most; None where nobody can tell."""

    @property
    def fraction_done(self) -> float:
        """How much of the stream has been taken, from 0 to 1."""
        of_limit = self._taken / self._limit if self._limit else 0.0
        return min(1.0, max(of_limit, self._fraction_of_all()))

    @abstractmethod
    def _requests(self) -> Iterator[Sequence[int]]:
        """Yield every request."""

    @abstractmethod
    def _fraction_of_all(self) -> float:
        """How much of the uncut stream has been taken."""
