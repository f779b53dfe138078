"""A model output whose logits are computed when they are first read.

Training computes its loss without the logits of all positions, and most trainers never read them. TRL's trainers do.
For these `output.logits`, `output["logits"]`, `output[1]` and `output.to_tuple()` compute the logits, with gradients.
`values()` and `items()` give a `LateLogits` instead: DDP, FSDP2 and accelerate use them to pass outputs on.
"""

from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers.modeling_outputs import CausalLMOutputWithPast

from deltazoo.ops.dtypes import autocast_dtype

__all__ = ["LateLogits", "OutputWithLateLogits"]


class LateLogits:
    """The logits of a training step, computed when they are used. torch's functions take it like a tensor.

    Args:
        hidden_states: `[..., hidden_size]`.
        weight: `[vocabulary, hidden_size]`, the weight of `lm_head` that the loss used.

    Attributes:
        dtype: dtype of the logits: that of the product under the autocast that was active at construction, or float32.
    """

    def __init__(self, hidden_states: Tensor, weight: Tensor) -> None:
        self._autocast = autocast_dtype(hidden_states.device)
        self.dtype = self._autocast or weight.dtype
        self._hidden_states, self._weight = hidden_states, weight
        self._memory_of_weight, self._sample_of_weight = _memory(weight), _sample(weight)
        self._logits: Tensor | None = None

    def float(self) -> "LateLogits":
        """Logits in float32, not yet computed; accelerate calls this under mixed precision."""
        late = object.__new__(LateLogits)
        late.__dict__ |= {**self.__dict__, "dtype": torch.float32, "_logits": None}
        return late

    def tensor(self) -> Tensor:
        """The logits, with gradients where they are recorded.

        Raises:
            RuntimeError: the weight of `lm_head` has changed since the forward pass.
        """
        recording = torch.is_grad_enabled() and (self._hidden_states.requires_grad or self._weight.requires_grad)
        if self._logits is None or (recording and not self._logits.requires_grad):
            if not self._weight_is_unchanged():
                raise RuntimeError(
                    "the logits of this forward pass were not read before lm_head.weight changed: an optimizer step "
                    "has changed it, or FSDP or DeepSpeed has released it. Read output.logits right after the forward "
                    "pass, or call model.set_runtime(fuse_linear_cross_entropy=False)"
                )
            device = self._hidden_states.device.type
            as_then: Any = nullcontext()
            if torch.amp.is_autocast_available(device):
                as_then = torch.autocast(device, self._autocast, enabled=self._autocast is not None)
            with as_then:
                self._logits = F.linear(self._hidden_states, self._weight).to(self.dtype)
        return self._logits

    def _weight_is_unchanged(self) -> bool:
        # Fused optimizers and DeepSpeed do not raise the version counter, so values are compared as well.
        same_memory = _memory(self._weight) == self._memory_of_weight
        return same_memory and torch.equal(_sample(self._weight), self._sample_of_weight)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, cls.tensor, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def __reduce__(self) -> Any:
        return _unchanged, (self.tensor(),)

    def __repr__(self) -> str:
        return f"LateLogits({self.dtype}, {'not read yet' if self._logits is None else 'read'})"


def _delegate(name: str) -> Any:
    return lambda self, *args: getattr(self.tensor(), name)(*(_as_tensor(x) for x in args))


_OPERATORS = (
    "getitem len iter add radd sub rsub mul rmul truediv rtruediv pow matmul rmatmul neg abs eq ne lt le gt ge array"
)
for _name in _OPERATORS.split():
    setattr(LateLogits, f"__{_name}__", _delegate(f"__{_name}__"))


def _as_tensor(x: Any) -> Any:
    return x.tensor() if isinstance(x, LateLogits) else x


def _unchanged(x: Tensor) -> Tensor:
    return x


def _memory(weight: Tensor) -> tuple[int, int, int]:
    """Version, address and size: most functions that write to, move or release the weight change one of them."""
    return weight._version, weight.data_ptr(), weight.untyped_storage().nbytes()


def _sample(weight: Tensor) -> Tensor:
    """About 4,096 numbers of the weight. An optimizer step changes some of them."""
    return weight.detach().reshape(-1)[:: max(1, weight.numel() // 4096)].clone()


@dataclass(repr=False)
class OutputWithLateLogits(CausalLMOutputWithPast):
    """`CausalLMOutputWithPast` that may hold `LateLogits`; with the same fields."""

    def __post_init__(self) -> None:
        self.__dict__["_made"] = False  # transformers' own __post_init__ reads the fields
        super().__post_init__()
        self.__dict__["_made"] = True

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if isinstance(value, LateLogits) and super().__getattribute__("__dict__").get("_made"):
            return value.tensor()
        return value

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return _as_tensor(OrderedDict.__getitem__(self, key))
        names = list(self.keys())[key]
        return self[names] if isinstance(names, str) else tuple(self[name] for name in names)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.items())})"

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, or `default`."""
        return _as_tensor(OrderedDict.get(self, key, default))

    def __reduce__(self) -> Any:
        return CausalLMOutputWithPast(**{field.name: getattr(self, field.name) for field in fields(self)}).__reduce__()
