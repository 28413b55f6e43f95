"""The asynchronous surface: offloading for serving stacks that already run an event loop.

The same planner as behind the synchronous API makes all decisions.
"""
