"""The cache policies: who leaves when a cache of blocks is full.

They rank numbers of slots; no keys, bytes or I/O.
"""
