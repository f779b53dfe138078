"""Serving models: an engine with continuous batching and a prefix cache of states."""

from deltazoo.workbench.serve.requests import (
    Counters,
    EngineError,
    EngineStopped,
    Piece,
    QueueFull,
    Request,
    RequestError,
    Stream,
    TokenLogprob,
)

__all__ = [
    "Counters",
    "EngineError",
    "EngineStopped",
    "Piece",
    "QueueFull",
    "Request",
    "RequestError",
    "Stream",
    "TokenLogprob",
]
