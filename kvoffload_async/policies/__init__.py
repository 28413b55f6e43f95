"""The cache policies: who leaves when a cache of blocks is full."""
