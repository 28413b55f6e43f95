"""Common parts of disk tiers: system calls, direct I/O, checksums, errors, names.

Contains nothing specific to one tier's format.
"""
