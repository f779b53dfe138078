"""The language-modelling loss without the logits of all positions, which take more memory than a small model.

In half precision the logits of 32,768 tokens and a vocabulary of 32,000 take 2 GiB. The loss needs them and their
gradients in float32. Here a few rows of logits exist at a time (`deltazoo.ops.fused.linear_cross_entropy`).

Most trainers never read the logits of a training step, but TRL's do. For these `output.logits`, `output["logits"]`,
`output[1]` and `output.to_tuple()` compute them when they are first read, with gradients. `values()` and `items()` give
a `LateLogits` instead: DDP, FSDP2 and accelerate use them to pass outputs on.
"""

from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast

from deltazoo.ops.autograd_modes import transforming
from deltazoo.ops.dtypes import autocast_dtype
from deltazoo.ops.fused import IGNORED, linear_cross_entropy
from deltazoo.ops.linear_maps import is_hooked


def fuses_loss(model: Any) -> bool:
    """Whether a training step of the model uses `loss_without_logits`.

    Unless the runtime option `fuse_linear_cross_entropy` says otherwise, it does so wherever loss and gradients are the
    same. Three cases compute all logits: compiled code, which cannot compute them later; function transforms; and a
    model in float64, whose loss transformers computes in float32.
    """
    if model.runtime.fuse_linear_cross_entropy is not None:
        return model.runtime.fuse_linear_cross_entropy
    return (
        torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not transforming()
        and loss_obstacle(model) is None
        and model.lm_head.weight.dtype != torch.float64
    )


def loss_without_logits(
    model: Any,
    hidden_states: Tensor,
    labels: Tensor,
    *,
    num_items_in_batch: Tensor | int | None = None,
    shift_labels: Tensor | None = None,
) -> Tensor:
    """The loss that transformers' `ForCausalLMLoss` computes from `model.lm_head(hidden_states)`.

    Args:
        model: a model with `runtime` options, an `lm_head` and a `loss_function`.
        hidden_states: `[B, T, hidden_size]`, or `[N, hidden_size]`.
        labels: `[B, T]` or `[N]`; token t predicts label t + 1.
        num_items_in_batch: divisor of the summed loss; default: the number of labels that are not ignored.
        shift_labels: labels in place of `labels` of which number t is predicted by token t.

    Raises:
        ValueError: the model has another loss function, or a head that is more than a matrix; the labels do not fit the
            positions.
    """
    reason = loss_obstacle(model)
    if reason:
        raise ValueError(
            "fuse_linear_cross_entropy computes cross-entropy from the weight of a plain lm_head, but "
            f"{reason}: call model.set_runtime(fuse_linear_cross_entropy=False)"
        )
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    targets = shift_labels.reshape(-1).to(hidden_states.device)
    loss = linear_cross_entropy(hidden_states.reshape(-1, hidden_states.shape[-1]), model.lm_head.weight, targets)
    if num_items_in_batch is None:
        return loss / (targets != IGNORED).sum()
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


def loss_obstacle(model: Any) -> str | None:
    """The reason why `loss_without_logits` does not compute the loss of a model; None if it does."""
    head = model.lm_head
    if model.loss_function is not ForCausalLMLoss:
        return f"the model's loss_function is {model.loss_function!r}"
    if type(head) is not nn.Linear:
        return f"lm_head is of {type(head)}"
    if head.bias is not None:
        return "lm_head has a bias"
    if isinstance(head.weight, DTensor):
        return "the weight of lm_head is spread over several devices"
    if is_hooked(head):
        return "lm_head has hooks"
    if type(head.weight) not in (nn.Parameter, Tensor):
        return f"the weight of lm_head is of {type(head.weight)}"
    return None


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
            # Fused optimizers and DeepSpeed do not raise the version counter, so values are compared as well.
            same_memory = _memory(self._weight) == self._memory_of_weight
            if not (same_memory and torch.equal(_sample(self._weight), self._sample_of_weight)):
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

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.tensor().__reduce_ex__(protocol)

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
