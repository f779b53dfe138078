"""One call of a stack of blocks, in the form by which a graph of it is found.

A graph reads its inputs at fixed addresses. So the arguments of all blocks are taken apart into tensors, which are
copied to those addresses before every replay, and a form without tensors that says how to put them together again. Two
calls of equal form run the same kernels if the settings of model and process are equal, too.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from deltazoo.generation.batch import PACKING_ARGUMENTS
from deltazoo.ops.autograd_modes import scans_again

_UNREAD = (*PACKING_ARGUMENTS, "max_length_q", "max_length_k", "num_items_in_batch")
"""Arguments that transformers hands to every block for losses and for kernels of packed rows, neither of which a
captured stack runs. They change with every batch."""
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


class NotCapturedError(RuntimeError):
    """The reason why blocks cannot be captured."""


class StackCall:
    """Blocks and their arguments: a function of the hidden states that enter the first block.

    Args:
        calls: blocks in order, each with its keyword arguments.

    Attributes:
        blocks: the blocks in order.
        tensors: all tensors among the arguments, each once.
        form: everything else about the call, hashable.

    Raises:
        NotCapturedError: an argument is neither a tensor nor plain, nor made of such.
    """

    def __init__(self, calls: Sequence[tuple[nn.Module, Mapping[str, Any]]]) -> None:
        self.blocks = [block for block, _ in calls]
        self.tensors: list[Tensor] = []
        self._nodes: list[tuple[Any, ...]] = []
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # keeps Python from giving the id of a freed object to another one
        self._roots = tuple([self._node(arguments) for _, arguments in calls])
        self.form = (tuple(map(id, self.blocks)), self._roots, tuple(self._nodes))

    def without_tensors(self) -> "StackCall":
        """A copy of the call that keeps no tensor alive."""
        kept = copy(self)
        kept.tensors, kept._alive = [], []
        return kept

    def plain_run(self, x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """Hidden states after the last block, with other tensors in place of the call's own.

        Args:
            x: `[B, T, D]`.
            tensors: tensors of the same number and shapes as `self.tensors`.
        """
        values: list[Any] = []
        for kind, *parts in self._nodes:
            values.append(_put_together(kind, parts, tensors, values))
        for block, root in zip(self.blocks, self._roots, strict=True):
            x = block(x, **values[root])
        return x

    def _node(self, value: Any) -> int:
        """The number of the node that describes a value; nodes of its parts have lower numbers."""
        kind = type(value)
        if kind in _PLAIN:
            self._nodes.append(("plain", kind, value))
            return len(self._nodes) - 1
        if (number := self._numbers.get(id(value))) is not None:
            return number
        if isinstance(value, Tensor):
            node = self._tensor(value)
        elif kind in (list, tuple):
            node = (kind, None, *map(self._node, value))
        elif kind is dict:
            names = tuple(name for name in value if name not in _UNREAD)
            node = (kind, names, *[self._node(value[name]) for name in names])
        elif is_dataclass(kind) or hasattr(kind, "_fields"):
            names = getattr(kind, "_fields", None) or tuple(field.name for field in fields(value) if field.init)
            node = (kind, names, *[self._node(getattr(value, name)) for name in names])
        elif isinstance(value, Cache):
            raise NotCapturedError("a cache is kept: pass use_cache=False")
        else:
            raise NotCapturedError(f"the blocks are given a {kind.__name__}")
        self._nodes.append(node)
        self._alive.append(value)
        self._numbers[id(value)] = len(self._nodes) - 1
        return len(self._nodes) - 1

    def _tensor(self, x: Tensor) -> tuple[Any, ...]:
        if type(x) is not Tensor or x.requires_grad:
            raise NotCapturedError(f"the blocks are given a {type(x).__name__} with requires_grad={x.requires_grad}")
        self.tensors.append(x)
        return "tensor", len(self.tensors) - 1, x.shape, x.stride(), x.dtype, x.device


def _put_together(kind: Any, parts: list[Any], tensors: Sequence[Tensor], values: list[Any]) -> Any:
    if kind == "plain":
        return parts[1]
    if kind == "tensor":
        return tensors[parts[0]]
    names, *numbers = parts
    found = [values[number] for number in numbers]
    return kind(found) if names is None else kind(**dict(zip(names, found, strict=True)))


def autocast_of(device: str) -> tuple[str, torch.dtype, bool, bool]:
    """The arguments of `torch.autocast` that are active now."""
    dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    return device, dtype, enabled, torch.is_autocast_cache_enabled()


def surroundings(x: Tensor) -> tuple[Any, ...]:
    """The form of the input and the switches of the process, on which a graph depends besides arguments and model."""
    cuda = torch.backends.cuda
    return (
        (x.shape, x.stride(), x.dtype, x.device, x.requires_grad),
        autocast_of(x.device.type),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        # torch's older function raises once the newer attribute (2.9) has been set.
        getattr(cuda.matmul, "fp32_precision", None) or torch.get_float32_matmul_precision(),
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
        (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()),
        torch.get_default_dtype(),
        scans_again(),
    )
