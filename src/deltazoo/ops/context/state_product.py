"""Products of transitions and states, whose bits do not depend on how many there are."""

import torch
from torch import Tensor

__all__ = ["product"]


def product(a: Tensor, b: Tensor, added: Tensor | None = None, *, transposed: bool = False) -> Tensor:
    """`a @ b + added` over leading dimensions, or `a^T @ b + added`.

    Args:
        a: `[..., K, K]` float32, or float64 on a CPU.
        b: `[..., K, X]`, with the leading dimensions of a.
        added: as the result; zero unless given.
        transposed: take the transpose of a.

    Returns:
        `[..., K, X]`. On a GPU each product is computed by itself in tiles of a fixed size, in three TF32 terms.
    """
    if a.is_cuda:
        from deltazoo.ops.triton.transition_product import transition_product

        return transition_product(a, b, added, transposed)
    a = a.mT if transposed else a
    lead, (K, L), X = b.shape[:-2], a.shape[-2:], b.shape[-1]
    a, b = a.reshape(-1, K, L), b.reshape(-1, L, X)
    result = torch.bmm(a, b) if added is None else torch.baddbmm(added.reshape(-1, K, X), a, b)
    return result.view(*lead, K, X)
