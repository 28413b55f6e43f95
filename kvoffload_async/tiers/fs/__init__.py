"""The `fs` tier: one file per block, in a directory that processes and hosts may share.

`maintenance` inspects and repairs its directories; `facade/fs.py` documents the options.
"""
