"""The `fs` tier: one file a block, in a directory that processes and hosts may share."""
