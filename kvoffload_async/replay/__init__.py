"""Replays request traces through a whole engine with real bytes, and verifies what is loaded.

`replay` makes one pass, `replay_passes` several over the same tiers. Requests come from a
`TraceFile` or the built-in `ChatWorkload`.
"""

from kvoffload_async.replay.drivers import ReplayOptions
from kvoffload_async.replay.report import Report
from kvoffload_async.replay.run import PassReports, replay, replay_passes
from kvoffload_async.replay.source import ChatWorkload, RequestSource, TraceFile

__all__ = [
    "ChatWorkload",
    "PassReports",
    "ReplayOptions",
    "Report",
    "RequestSource",
    "TraceFile",
    "replay",
    "replay_passes",
]
