"""What drives an engine through requests: a scheduler step by step, or tasks on an event loop.

No figures: what a driver has seen is counted by the tally that it is given.
"""
