"""Cross-thread infrastructure: loop thread, I/O pool, bridge, shared memory.

Makes no decisions, and knows nothing of what tiers do with their threads.
"""
