"""What the core asks the outside to do: imperative, handed out in batches, executed in order."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload_async.types import JobMetadata, OffloadKey, ReqContext


@dataclass(frozen=True, slots=True)
class StartJob:
    """Run a job on the port's tier."""

    job: JobMetadata


@dataclass(frozen=True, slots=True)
class StartProbe:
    """Ask the port's tier which of these blocks it has."""

    generation: int
    keys: tuple[OffloadKey, ...]


@dataclass(frozen=True, slots=True)
class TouchBlocks:
    """Tell the port's tier that blocks were used, head to tail."""

    keys: tuple[OffloadKey, ...]


PortEffect = StartJob | StartProbe | TouchBlocks


@dataclass(frozen=True, slots=True)
class SubmitJob:
    """Submit a job to a tier, by its position in the configured order."""

    tier: int
    job: JobMetadata


@dataclass(frozen=True, slots=True)
class FinishRequest:
    """Tell a tier that nothing more will be submitted for a request."""

    tier: int
    ctx: ReqContext


EngineEffect = SubmitJob | FinishRequest
