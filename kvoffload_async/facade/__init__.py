"""The synchronous surface: what a scheduler that knows nothing of asyncio calls."""
