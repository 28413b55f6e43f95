"""The `mooncake` tier: blocks in a Mooncake Store, in the memory that its clients give to it.

The key of a block is `kvo:`, the namespace's 32 hexadecimal digits, `:` and the block's key in
hexadecimal digits. The value is an envelope (`tiers/remote`): the header from a small registered
buffer of the tier's own, and the payload from and into the primary's row, without a copy between.
"""
