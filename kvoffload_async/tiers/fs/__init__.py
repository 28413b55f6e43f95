"""The `fs` tier: one file per block, in a directory that processes and hosts may share.

`maintenance` looks after its directories; what options mean is said in `facade/fs.py`.
"""
