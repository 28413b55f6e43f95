"""Cache policies: which blocks are evicted from a full cache.

They rank slot numbers; no keys, bytes or I/O.
"""
