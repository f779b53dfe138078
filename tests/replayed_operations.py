"""What a CUDA graph does of a function, on a CPU: its operations again at the same addresses, and nothing of Python."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class ReplayedOperations(TorchDispatchMode):
    """The operations of one call of a function.

    Args:
        function: works on tensors that stay where they are. It is called once, by this.
    """

    def __init__(self, function: Callable[[], object]) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Any, dict[str, Any], list[Tensor]]] = []
        with self:
            function()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results, kwargs = func(*args, **(kwargs or {})), kwargs or {}
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        # A view, and what is written in place, is what it should be once its argument is.
        made = [
            x for x in tree_leaves(results) if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given
        ]
        changes = func._schema.is_mutable
        if made or changes:
            self._operations.append((func, args, kwargs, made))
        return results

    @torch.no_grad()
    def replay(self) -> None:
        """Do them again."""
        for func, args, kwargs, made in self._operations:
            results = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
            given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
            new = [x for x in results if x.untyped_storage().data_ptr() not in given]
            for old, x in zip(made, new, strict=True):
                old.copy_(x)
