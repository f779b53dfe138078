"""What a training step of each rule computes in plain torch, where fused kernels run: nothing of the size of its input.

On meta tensors, where nothing is computed: autograd and the layers call the same functions as on a GPU.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

pytest.importorskip("triton")

from deltazoo.layers import make_layer  # noqa: E402
from deltazoo.ops.triton import operator  # noqa: E402
from deltazoo.spec import list_variants  # noqa: E402

MOVES_NOTHING = {
    *("alias", "as_strided", "chunk", "contiguous", "detach", "empty", "empty_like", "empty_strided", "expand"),
    *("flatten", "narrow", "new_empty", "permute", "reshape", "resize_", "select", "slice", "split"),
    *(
        "split_with_sizes",
        "squeeze",
        "t",
        "to",
        "transpose",
        "unbind",
        "unflatten",
        "unsqueeze",
        "view",
        "_unsafe_view",
    ),
}
"""A copy in one of these is an operation of its own within it."""
PRODUCTS = {"linear", "matmul", "mm", "addmm"}
SUMS = {"add", "sum"}
"""Of gradients: where a tensor is read twice, and for a bias."""
LEFT = {
    "gla": {"neg", "new_full"},  # its gate's sign; a step size of one, and the gradient that it does not need
    "eda": {"new_full", "zeros_like"},  # two micro-steps placed side by side
}
"""What is left of some rules."""


def large_operations(variant: str) -> set[str]:
    """Names of torch's functions that are called with at least half as many elements as the layer's input has."""
    B, T, H, K = 2, 64, 2, 32
    layer = make_layer(variant, H * K, H, K, expand_v=1, fused_kernels=True, layer_idx=0).to("meta", torch.bfloat16)
    x = torch.empty(B, T, H * K, device="meta", dtype=torch.bfloat16, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        y = layer(x)
        y.backward(torch.empty_like(y))
    assert layer.q_proj.weight.grad is not None
    names = set()
    for event in found.events():
        name = _name(event)
        shapes = [s for s in event.input_shapes if s and all(isinstance(size, int) for size in s)]
        large = sum(map(math.prod, shapes)) >= x.numel() // 2
        if large and name and name not in MOVES_NOTHING and not _is_part_of_another(event):
            names.add(name)
    return names


def _name(event: Any) -> str | None:
    return event.name.removeprefix("aten::") if event.name.startswith("aten::") else None


def _is_part_of_another(event: Any) -> bool:
    """Whether one of torch's functions has called it, as those of meta tensors call several."""
    while (event := event.cpu_parent) is not None:
        if (name := _name(event)) and name not in MOVES_NOTHING:
            return True
    return False


@pytest.mark.parametrize("variant", list_variants())
def test_nothing_of_the_inputs_size_is_plain(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "_dispatching", lambda: True)  # operators with fake results in place of launches
    assert large_operations(variant) - PRODUCTS - SUMS - LEFT.get(variant, set()) == set()
