"""What the owner asks of a tier: imperative, executed in order."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload_async.types import JobMetadata, OffloadKey, ReqContext


@dataclass(frozen=True, slots=True)
class StartJob:
    """Run a job."""

    job: JobMetadata


@dataclass(frozen=True, slots=True)
class StartProbe:
    """Find out which of these blocks the tier has."""

    generation: int
    keys: tuple[OffloadKey, ...]
    chains: tuple[tuple[OffloadKey, ...], ...] = ()
    """The same keys as chains, head to tail, for a tier that is asked for the longest heads."""
    before: tuple[tuple[OffloadKey, ...], ...] = ()
    """For each chain the keys right before it, head to tail; empty for a tier that is told none."""


@dataclass(frozen=True, slots=True)
class TouchBlocks:
    """Learn that blocks were used, head to tail."""

    keys: tuple[OffloadKey, ...]
    ctx: ReqContext | None = None
    """For a tier with a say in its jobs: within which request it is told."""


@dataclass(frozen=True, slots=True)
class BeginRequest:
    """Learn that jobs may follow for the engine's own request; others' begins are told at once."""

    ctx: ReqContext


@dataclass(frozen=True, slots=True)
class FinishRequest:
    """Learn that no job follows for a request; only for a tier with an index of its own."""

    ctx: ReqContext


TierEffect = StartJob | StartProbe | TouchBlocks | BeginRequest | FinishRequest
