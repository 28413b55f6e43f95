"""The asynchronous surface: offloading for serving stacks that already run an event loop.

No second core: what is decided is decided by the planner, through the synchronous surface.
"""
