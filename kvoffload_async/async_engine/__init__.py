"""The asynchronous surface: offloading for serving stacks that already run an event loop.

No second core: what is decided is decided by the planner, through the synchronous surface.
"""

from kvoffload_async.async_engine.request import EngineRequest
from kvoffload_async.async_engine.surface import OffloadEngine
from kvoffload_async.async_engine.transfers import EngineBounds

__all__ = ["EngineBounds", "EngineRequest", "OffloadEngine"]
