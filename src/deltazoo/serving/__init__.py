"""Serving models: an engine with continuous batching and a prefix cache of states, and OpenAI's HTTP API before it.

The HTTP server needs the extra `serve`; the engine does not.
"""

from typing import TYPE_CHECKING

from deltazoo._lazy import lazy_names
from deltazoo.serving.requests import (
    EngineError,
    EngineStopped,
    Piece,
    QueueFull,
    Request,
    RequestError,
    Status,
    Stream,
    TokenLogprob,
)

if TYPE_CHECKING:
    from deltazoo.serving.engine import Engine
    from deltazoo.serving.pipe import background_server, create_app
    from deltazoo.serving.text import TextStream

__all__ = [
    "Engine",
    "EngineError",
    "EngineStopped",
    "Piece",
    "QueueFull",
    "Request",
    "RequestError",
    "Status",
    "Stream",
    "TextStream",
    "TokenLogprob",
    "background_server",
    "create_app",
]

__getattr__ = lazy_names(
    __name__,
    {
        "engine": ("Engine",),
        "pipe": ("background_server", "create_app"),
        "text": ("TextStream",),
    },
)
