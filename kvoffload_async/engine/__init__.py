"""The asynchronous surface: offloading for serving stacks that already run an event loop."""

from kvoffload_async.engine.lines import EngineBounds
from kvoffload_async.engine.surface import EngineRequest, OffloadEngine

__all__ = ["EngineBounds", "EngineRequest", "OffloadEngine"]
