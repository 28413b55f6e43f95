"""The `valkey` tier: blocks in Valkey or Redis, standalone or a cluster, shared by many hosts.

A block's key is `kvo:`, the namespace's 32 hexadecimal digits, `:` and the raw block key; its value
is an envelope (`tiers/remote`). The prefix without the last colon has a random label of 16
characters as value: if the label has changed, and recently seen blocks are gone, the server has
lost its contents.
"""
