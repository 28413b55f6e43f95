"""The synchronous surface: what a scheduler that knows nothing of asyncio calls.

No coroutines, and no decisions about blocks: `core` decides, `runtime` runs.
"""
