"""What tiers on disk share: system calls, bypassing the page cache, checksums, errors, names.

Nothing that knows the format of one of them.
"""
