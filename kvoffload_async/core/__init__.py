"""Sans-IO: the planner, one `TierState` a tier, the primary; events in, effects out.

No clock, thread, torch or logging: time comes in as an argument, and nothing is executed here.
"""
