"""The asynchronous surface: offloading for serving stacks that already run an event loop."""

from kvoffload_async.engine.lines import EngineBounds
from kvoffload_async.engine.request import EngineRequest
from kvoffload_async.engine.surface import OffloadEngine

__all__ = ["EngineBounds", "EngineRequest", "OffloadEngine"]
