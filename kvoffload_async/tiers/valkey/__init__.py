"""The `valkey` tier: blocks in Valkey or Redis, standalone or a cluster, shared by many hosts.

The key of a block is `kvo:`, the namespace's 32 hexadecimal digits, `:` and the block's key as it
is; the value is an envelope (`tiers/remote`). Without the last two, the same key has a random
label, 16 characters: where it is another one than before, and the blocks that were seen last are
gone, the server has lost its contents.
"""
