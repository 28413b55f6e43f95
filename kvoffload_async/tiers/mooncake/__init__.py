"""The `mooncake` tier: blocks in a Mooncake Store, in the memory contributed by its clients.

A block's key in the store is `kvo:`, the namespace's 32 hexadecimal digits, `:` and the block key
in hexadecimal. The value is an envelope (`tiers/remote`).

The library can block all threads of its process or abort it, and exposes registered memory to the
whole network for reading and writing. Therefore it runs in a helper process (`helper.py`), which
shares only a buffer with the engine (`cells.py`).
"""
