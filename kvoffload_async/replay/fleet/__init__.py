"""Several processes replay one trace, each with a primary and a slab, over one shared tier.

`run_fleet` is the parent's part: `plan` says which process gets which tiers and requests, `process`
starts and watches the processes, `member` is what runs in them, `protocol` what both speak, and
`report` what comes of it.
"""

from kvoffload_async.replay.fleet.report import FleetReport
from kvoffload_async.replay.fleet.run import FleetOptions, run_fleet

__all__ = ["FleetOptions", "FleetReport", "run_fleet"]
