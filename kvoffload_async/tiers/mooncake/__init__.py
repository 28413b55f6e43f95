"""The `mooncake` tier: blocks in a Mooncake Store, in the memory that its clients give to it.

The key of a block is `kvo:`, the namespace's 32 hexadecimal digits, `:` and the block's key in
hexadecimal digits. The value is an envelope (`tiers/remote`).

The library can stop all threads of its process, or end it, and lets everybody on the network read
and write what is registered with it. So it is loaded in a process of its own (`helper.py`), which
has a buffer in common with the engine (`cells.py`) and nothing else.
"""
