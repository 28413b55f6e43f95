"""The synchronous API, for schedulers that do not use asyncio.

It has no coroutines and no cache policy: `core` decides, and `runtime` runs the tiers.
"""
