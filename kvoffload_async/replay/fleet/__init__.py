"""Several processes replay one trace, each with a primary and a slab, over one shared tier.

`run.run_fleet` is the parent's part: `plan` says which process gets which tiers and requests,
`process` starts and watches the processes and holds the protocol, `member` is what runs in a
process, and `run` makes the passes and their report.
"""
