"""Executes the owner's effects on the actors they are for."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload_async.core.effects import StartJob, StartProbe, TierEffect, TouchBlocks
from kvoffload_async.tiers._actor import TierActor

Batch = Sequence[tuple[TierActor, Sequence[TierEffect]]]


def execute(batch: Batch) -> None:
    """Start what the effects ask for, in order. Thread: loop."""
    for actor, effects in batch:
        for effect in effects:
            match effect:
                case StartJob(job):
                    actor.start_job(job)
                case StartProbe(generation, keys):
                    actor.start_probe(generation, keys)
                case TouchBlocks(keys):
                    actor.touch(keys)
