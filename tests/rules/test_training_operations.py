"""What a training step of each rule computes in plain torch, where fused kernels run: nothing of the size of its input.

On meta tensors, where nothing is computed: autograd and the layers call the same functions as on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton")

from deltazoo.layers import LayerStates, Sequences, describe_sequences, make_layer  # noqa: E402
from deltazoo.layers.sequences import WHOLE_ROWS  # noqa: E402
from deltazoo.layers.state import StateAccess  # noqa: E402
from deltazoo.spec import get_rule, list_rules  # noqa: E402
from deltazoo.swap.layer import drop_in_class  # noqa: E402

PRODUCTS = {"mm", "addmm"}
MEMORY = {"empty", "empty_like", "new_empty"}
SUMS = {"add", "sum", "zeros"}
"""Of gradients: where a tensor is read twice, and for a bias. Zeros are those of results that operators keep to
themselves; only calls that are watched make them."""
BELOW = "lt" if torch.__version__ >= "2.14" else "le"
"""Comparison in the gradient of a clamp, which torch 2.14 made zero at its bound."""
LEFT = {
    "gla": ({"neg"}, {"neg"}),  # its gate's sign
    "isotropic_kdn": ({"exp", "mean", "mul"}, {"div", "mul"}),  # the mean of the decays
    "diagonal_kdn": (  # what the scan takes, and the gain
        {"_to_copy", "add", "clamp_max", "exp", "mul", "pow", "softplus", "sum"},
        {"_to_copy", BELOW, "mul", "pow", "softplus_backward", "where"},
    ),
    "momentum": ({"add", "cat", "mul", "neg"}, {"mul", "neg"}),  # twice as many channels
    "eda": ({"zeros_like", "cat"}, set()),  # two micro-steps placed side by side
}
"""What is left of some rules, forward and backward."""


class LargeOperations(TorchDispatchMode):
    """Names of torch's functions that make as many elements as the layer's input has, or read them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.names = size, set[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        read, made = ([x for x in tree_leaves(tree) if isinstance(x, Tensor)] for tree in ((args, kwargs), results))
        storages = {x.untyped_storage()._cdata for x in read}
        is_view = all(x.untyped_storage()._cdata in storages for x in made) and not function._schema.is_mutable
        name = function.overloadpacket.__name__
        moved = made if name.startswith("new_") else read + made  # what is new has the device of what is read
        if function.namespace == "aten" and not is_view and any(x.numel() >= self.size for x in moved):
            self.names.add(name)
        return results


@pytest.mark.parametrize("rule", list_rules())
def test_nothing_of_the_inputs_size_is_plain(rule: str) -> None:
    B, T, H, K = 2, 64, 2, 32
    layer = make_layer(rule, H * K, H, K, expand_v=1, fused_kernels=True, layer_idx=0).to("meta", torch.bfloat16)
    x = torch.empty(B, T, H * K, device="meta", dtype=torch.bfloat16, requires_grad=True)
    with LargeOperations(x.numel() // 2) as forward:
        y = layer(x)
    with LargeOperations(x.numel() // 2) as backward:
        y.backward(torch.empty_like(y))
    assert layer.q_proj.weight.grad is not None
    left_forward, left_backward = LEFT.get(rule, (set(), set()))
    assert forward.names - PRODUCTS - MEMORY == left_forward
    assert backward.names - PRODUCTS - MEMORY - SUMS == left_backward
    assert forward.names & PRODUCTS and backward.names & PRODUCTS


@pytest.mark.parametrize("rule", list_rules())
def test_nothing_is_plain_in_a_swapped_layer(rule: str) -> None:
    """As `swap_attention` makes it: no SiLU, biases of gates, queries and keys turned before they are normalised."""
    B, T, H, K = 2, 64, 2, 32
    spec = get_rule(rule)
    biases = {"gate_bias": spec.output_gate == "full", "beta_bias": spec.corrects}
    options = {"activation": "identity", "expand_v": 1, "fused_kernels": True, "layer_idx": 0, "num_layers": 4}
    layer = drop_in_class(rule)(rule, H * K, H, K, **biases, **options).to("meta", torch.bfloat16)
    x = torch.empty(B, T, H * K, device="meta", dtype=torch.bfloat16, requires_grad=True)
    angles = torch.empty(1, T, K, device="meta", dtype=torch.bfloat16)
    with LargeOperations(x.numel() // 2) as forward:
        y = layer(x, rotary=(angles, angles))
    with LargeOperations(x.numel() // 2) as backward:
        y.backward(torch.empty_like(y))
    left_forward, left_backward = LEFT.get(rule, (set(), set()))
    assert forward.names - PRODUCTS - MEMORY == left_forward
    assert backward.names - PRODUCTS - MEMORY - SUMS == left_backward


def test_which_calls_sum_up_the_moment_in_one_kernel() -> None:
    """Whole rows without states; the operator serves packed rows, caches, few long rows and other backends."""

    def fused(B: int, T: int, store: Any = None, sequences: Sequences = WHOLE_ROWS, **options: Any) -> bool:
        layer: Any = make_layer("pgdn", 64, 2, 32, fused_kernels=True, layer_idx=0, **options)
        return layer._sums_fused(torch.empty(B, T, 2, 32, device="meta"), StateAccess(store, 0), sequences)

    packed = describe_sequences(1, 64, cu_seqlens=torch.tensor([0, 10, 64]))
    assert fused(2, 64) and fused(1, 512) and fused(2, 64, backend="triton")
    assert not fused(1, 513)
    assert not fused(2, 64, LayerStates())
    assert not fused(2, 64, backend="chunkwise")
    assert not fused(1, 64, sequences=packed)
