"""The `fs` tier: one file per block, in a directory that processes and hosts may share.

`maintenance` looks after its directories; `FsSettings` in `tier` declares its options.
"""
