"""Sans-IO core: the planner, one `TierState` per tier, the primary; events in, effects out.

Uses no clock, thread, torch or logging. Time is an argument; effects are executed elsewhere.
"""
