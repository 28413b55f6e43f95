"""Drivers of an engine: a scheduler step by step, or tasks on an event loop.

They compute no results, but count events in the tally that they are given.
"""
