"""The asynchronous surface: offloading for serving stacks that already run an event loop.

All decisions are made by the same planner, through the synchronous API.
"""
