"""The `fs` tier: one file per block, in a directory that processes and hosts may share.

`maintenance` inspects and cleans its directories; `FsSettings` in `tier` declares its options.
"""
