"""Products of transitions with states or other transitions as an operator of torch."""

from functools import lru_cache

import torch
import triton

from deltazoo.ops.operator import Operator
from deltazoo.ops.triton.chunk.transition_products import transition_product_kernel
from deltazoo.ops.triton.launch import Constants, launch

__all__ = ["transition_product"]


@lru_cache(maxsize=1024)
def _constants(n: int, K: int, X: int, transposed: bool) -> Constants:
    BK, BX = min(64, max(16, triton.next_power_of_2(K))), min(32, max(16, triton.next_power_of_2(X)))
    return Constants(
        n, -(-X // BX), -(-K // BK), X=X, K=K, BK=BK, BX=BX, TRANSPOSED=transposed, num_warps=4, num_stages=2
    )  # fmt: skip


def _launch(a, b, added, transposed):
    a, b, added = a.contiguous(), b.contiguous(), None if added is None else added.contiguous()
    out = torch.empty_like(b)
    K, X = b.shape[-2:]
    with torch.cuda.device_of(b):
        launch(transition_product_kernel, _constants(b.numel() // (K * X), K, X, transposed), a, b, added, out)
    return out


transition_product = Operator(
    "transition_product(Tensor a, Tensor b, Tensor? added, bool transposed) -> Tensor",
    _launch,
    lambda a, b, added, transposed: b.new_empty(b.shape),
)
"""`a @ b + added`, or `a^T @ b + added`: a `[..., K, K]`, the others `[..., K, X]`, all float32."""
