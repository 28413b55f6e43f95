"""Replays requests through a whole engine with real bytes, and compares what arrives.

`replay` makes one pass, `replay_passes` several over the same tiers; requests come from a
`TraceFile` or from the built-in `ChatWorkload`.
"""

from kvoffload_async.replay.passes import PassReports, replay_passes
from kvoffload_async.replay.report import Report
from kvoffload_async.replay.run import ReplayOptions, replay
from kvoffload_async.replay.source import RequestSource
from kvoffload_async.replay.trace import TraceFile
from kvoffload_async.replay.workload import ChatWorkload

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
