"""Several processes replay one trace, each with its own primary and slab, over one shared tier.

`run_fleet` runs in the parent. `plan` assigns tiers and requests to processes, `process` starts and
monitors processes and implements the protocol, `member` runs in each process, and `run` makes the
passes and their report.
"""

from kvoffload_async.replay.fleet.run import FleetOptions, FleetReport, run_fleet

__all__ = ["FleetOptions", "FleetReport", "run_fleet"]
