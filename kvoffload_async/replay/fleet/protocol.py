"""What parent and members say to each other: one JSON object a line.

The parent sends a `start`, then requests one by one, and closes the pipe after the last one. A
member answers each of them when it has come to rest, the last time after its shutdown, with all
figures so far: so those of a member that is killed are known up to then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from kvoffload_async.config import OffloadConfig
from kvoffload_async.replay.report import Report

READY: Final = "ready"
DONE: Final = "done"
ENDED: Final = "ended"
FAILED: Final = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a member is told first.

    Attributes:
        config: The engine's settings, as `OffloadConfig.parse` takes them.
        most_blocks: Blocks that a request has at most.
        verify: Whether to compare what is loaded.
        layers: Tensors of the device memory.
    """

    config: Mapping[str, Any]
    most_blocks: int
    verify: bool
    layers: int


def encode(message: Mapping[str, Any]) -> bytes:
    """Return a message's line."""
    return json.dumps(message).encode() + b"\n"


def encode_start(start: Start) -> bytes:
    """Return the first line."""
    return encode(asdict(start))


def settings_of(config: OffloadConfig) -> dict[str, Any]:
    """Return a configuration as it is parsed."""
    settings = {option.name: getattr(config, option.name) for option in fields(config)}
    return settings | {"secondary_tiers": [dict(tier) for tier in config.secondary_tiers]}


def answer(what: str, report: Report | None = None, **more: object) -> bytes:
    """Return a member's line."""
    figures = {} if report is None else {"report": asdict(report)}
    return encode({"what": what, **figures, **more})


def report_in(message: Mapping[str, Any]) -> Report | None:
    """Return the figures in a member's answer, if there are any."""
    figures = message.get("report")
    return None if figures is None else Report(**figures)
