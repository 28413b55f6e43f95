"""Several processes replay one trace, each with its own primary and slab, over one shared tier.

`run.run_fleet` runs in the parent. `plan` assigns tiers and requests to processes, `process` starts
and monitors processes and implements the protocol, `member` runs in each process, and `run` makes
the passes and their report.
"""
