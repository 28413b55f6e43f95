"""The synchronous API, for schedulers that do not use asyncio.

It contains no coroutines and no cache policy: `core` makes the decisions, `runtime` runs the tiers.
"""
