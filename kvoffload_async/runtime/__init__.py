"""Where threads meet: the loop thread, the I/O pool, the bridge, memory that processes share.

No decisions, and nothing that knows what a tier does with its threads.
"""
