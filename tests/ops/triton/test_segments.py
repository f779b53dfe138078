"""The kernels on the segments of a sequence that ranks share, through Triton's interpreter: they equal the chunk form.

The interpreter has to be chosen before Triton is imported, so a child process computes.
"""

from __future__ import annotations

import pytest
from fresh_process import run_interpreted

pytest.importorskip("triton")

CODE = """
import torch
import torch.nn.functional as F
from deltazoo.ops import ContextParallel, delta_rule
from deltazoo.ops.context.product import pair_of_two, with_middles
from deltazoo.ops.context.product import transition_halves, transition_pair, transition_product

def inputs(tokens, steps, decay, erase):
    torch.manual_seed(0)
    k = F.normalize(torch.randn(1, tokens * steps, 1, 16), dim=-1)
    decays = [None, -0.1 * torch.rand(1, tokens, 2), -0.1 * torch.rand(1, tokens, 2, 16)]
    erase_key = F.normalize(k + 0.3 * torch.randn_like(k), dim=-1) if erase else None
    x = dict(q=torch.randn(1, tokens, 1, 16), k=k, v=torch.randn(1, tokens * steps, 2, 16))
    x |= dict(beta=torch.rand(1, tokens * steps, 2), log_decay=decays[decay], erase_key=erase_key)
    return {name: t for name, t in x.items() if t is not None}

for decay, steps, erase, tokens, bounds in [
    (0, 1, False, 192, None), (2, 1, True, 128, None), (1, 2, False, 150, [0, 40, 40, 110, 150])
]:
    x = inputs(tokens, steps, decay, erase)
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    x["initial_state"] = torch.randn(1 if bounds is None else len(bounds) - 1, 2, 16, 16)
    found = []
    for backend, context in (("chunkwise", None), ("triton", ContextParallel(segment_length=64))):
        leaves = {name: t.clone().requires_grad_() for name, t in x.items()}
        output, final = delta_rule(
            **leaves, cu_seqlens=cu_seqlens, num_micro_steps=steps, backend=backend, context=context
        )
        found.append((output, final, *torch.autograd.grad(output.sin().sum() + final.cos().sum(), leaves.values())))
    for expected, y in zip(*found, strict=True):
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)

for K, X in ((16, 16), (24, 40), (96, 16)):
    a, b, c = torch.randn(3, 2, K, K), torch.randn(3, 2, K, X), torch.randn(3, 2, K, X)
    for transposed in (False, True):
        expected = (a.mT if transposed else a) @ b
        torch.testing.assert_close(transition_product(a, b, None, transposed), expected, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(transition_product(a, b, c, transposed), expected + c, rtol=1e-5, atol=1e-4)
        found = transition_halves(a, b, c, transposed)
        torch.testing.assert_close(found, with_middles(a, b, c, transposed), rtol=1e-5, atol=1e-4)

    pairs = torch.randint(-3, 4, (6, 2, K, K + X)).float()  # exact in any order of NumPy's products
    halves = [x for half in (pairs[::2], pairs[1::2]) for x in (half[..., :K], half[..., K:])]
    found = transition_pair(*halves)
    torch.testing.assert_close(found, pair_of_two(*halves), rtol=1e-5, atol=1e-4)
    earlier_M, earlier_X, M, X = halves
    assert torch.equal(found[..., :K], transition_product(M, earlier_M, None, False))
    assert torch.equal(found[..., K:], transition_product(M, earlier_X, X, False))
"""


def test_kernels_on_segments() -> None:
    run_interpreted(CODE)
