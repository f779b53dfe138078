"""Forward passes that one thread replaces while its step runs, on a model that other threads may use.

A step runs merged and fused by replacing `forward` of some modules. Threads share the modules. So one of them at a time
makes or runs such a step of a model, and calls from others get the modules' own forward passes meanwhile.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

__all__ = ["alone_with", "replaced_forwards", "replaced_here"]

_of_thread = threading.local()
_locks: WeakKeyDictionary[nn.Module, AbstractContextManager[Any]] = WeakKeyDictionary()
_making_locks = threading.Lock()


def alone_with(model: nn.Module) -> AbstractContextManager[Any]:
    """A lock, one per model: held while its modules' forward passes are replaced, or are read to make a step."""
    with _making_locks:
        return _locks.setdefault(model, threading.RLock())


@contextmanager
def replaced_forwards(forwards: Sequence[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Replace the forward passes of modules within this context; the new ones ask `replaced_here` who calls."""
    outer = getattr(_of_thread, "replaces", False)
    for module, forward in forwards:
        vars(module)["forward"] = forward
    _of_thread.replaces = True
    try:
        yield
    finally:
        _of_thread.replaces = outer
        for module, _ in forwards:
            vars(module).pop("forward", None)


def replaced_here() -> bool:
    """Whether the present thread has replaced forward passes; another one must get the modules' own."""
    return torch.compiler.is_compiling() or getattr(_of_thread, "replaces", False)
