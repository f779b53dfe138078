"""Recompute levels: they say which results a block keeps for the backward pass, and which it computes again there.

| level | kept per block | computed again |
|---|---|---|
| `none` | everything that autograd saves | nothing |
| `elementwise` | results of matrix products and of the operators | norms, activations, gates, convolutions |
| `states` | `elementwise` without chunk states and corrections, which linear layers can make again | these, too |
| `block` | the block's input | everything, as in transformers' gradient checkpointing |
| `nested` | the block's input | everything, and its linear or softmax layer a second time, after the MLP |

The block that runs again is the most that `block` holds: for a long row more than the inputs of all blocks. `nested`
holds its MLP or its layer at a time.

Matrix products are nearly all of the work and elementwise results most of the memory, so the levels between save memory
at little cost in time. Gradients are the same at every level.

The layers mark with `recomputable` (`deltazoo.ops.recompute`) which functions are computed again. A compiler sees
single operators instead, so `torch.compile` decides by their names, and keeps the states. The operator keeps states
only on Hopper, in heads of 128 channels and 16 bits; elsewhere `states` equals `elementwise`.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from deltazoo.ops.autograd_modes import scanning_again, transforming
from deltazoo.ops.recompute import recomputing

_EXCHANGED = {"_c10d_functional": ("",)}
"""All operators of torch.distributed, in the form of the table below."""

_PRODUCTS = _EXCHANGED | {
    "aten": ("mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_dot_product", "scaled_dot_product"),
    "deltazoo": ("triton_delta_rule", "segment_", "transition_", "add_rms_norm"),
}
"""Beginnings of operator names, by library: `elementwise` and `states` keep their results under `torch.compile`. Ours
are the rule, and a norm that adds to the residual stream."""

WHOLE_BLOCKS = ("block", "nested")
"""Levels at which a block runs twice."""

SMALL_BATCH = 2**23
"""Elements of hidden states up to which training keeps everything by default: 8,192 tokens of width 1,024. A block
then keeps about eight more numbers for each element, besides the operator's states: 3 GiB in 24 blocks of 16 bits."""


def level_of(chosen: str | None, device: torch.device, num_elements: float = math.inf) -> str:
    """The level of a training step on a device.

    The default is `states` for large batches on a GPU, where memory is scarce, otherwise `none`: a small batch leaves
    memory, and the GPU would wait for the host to launch things twice. The default is also `none` where hooks on saved
    tensors are active (offloading, other checkpointing), which recomputation cannot be combined with.

    Args:
        chosen: the level asked for; None: the default.
        device: device of the weights.
        num_elements: number of hidden states, tokens times width; a large batch unless given.
    """
    if chosen is not None:
        return chosen
    if not (_recomputes_by_default(device) and torch.is_grad_enabled()):
        return "none"
    if torch.compiler.is_compiling():  # compiled code waits for no host, and the size may be symbolic: no guard on it
        return "states"
    if num_elements <= SMALL_BATCH or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "none"
    return "states"


def _recomputes_by_default(device: torch.device) -> bool:
    return device.type == "cuda"


def run_block(level: str, forward: Callable[..., Tensor], *args: Any, exchanges: bool = False, **kwargs: Any) -> Tensor:
    """The result of `forward`, called so that it keeps for the backward pass what `level` says.

    Args:
        level: one of `deltazoo.runtime.RECOMPUTE_LEVELS`.
        forward: a function without side effects, since it may run twice; it may draw random numbers.
        exchanges: whether ranks exchange tensors in `forward`. The tensors they receive are kept, so that they exchange
            them once.
    """
    if level == "none" or transforming():  # under transforms a detached tensor would lose its tangent
        return forward(*args, **kwargs)
    whole = level in WHOLE_BLOCKS
    compiling = torch.compiler.is_compiling()
    if not whole and not compiling:
        with recomputing(), scanning_again() if level == "states" else nullcontext():
            return forward(*args, **kwargs)
    # Dropout, of adapters for example, is drawn again as it was. A compiler sees to that itself; a capture cannot read
    # the state of a generator, and captured training takes no blocks that draw and run twice.
    captures = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": not (compiling or captures)}
    if not whole or exchanges:
        keep = partial(_policy, _EXCHANGED if whole else _PRODUCTS)
        options["context_fn"] = partial(create_selective_checkpoint_contexts, keep)
    return checkpoint(forward, *args, **options, **kwargs)


def _policy(kept: Mapping[str, tuple[str, ...]], _: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = operator.name() if isinstance(operator, torch._ops.OpOverload) else ""
    library, _, rest = name.partition("::")
    keeps = library in kept and rest.startswith(kept[library])
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE
