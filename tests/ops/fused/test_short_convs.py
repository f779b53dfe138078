"""Convolutions of queries, keys and values in one launch, against three calls: equal bits but for the sums of the taps.

Interpreted on a CPU, by a child process since the interpreter must be chosen before Triton is imported, and on a GPU.
"""

from itertools import product
from pathlib import Path
from unittest import mock

import pytest
import torch
from fresh_process import run_interpreted
from torch import Tensor

from deltazoo.ops.fused import short_conv, short_conv_kernels
from deltazoo.ops.fused.short_conv_kernels import short_convs

LENGTHS = (1, 9, 0, 3)


def alone(
    x: Tensor, weight: Tensor, past: Tensor | None, sequence: Tensor | None, cu_seqlens: Tensor | None, head: int
) -> Tensor:
    return short_convs(x, None, None, weight, None, None, past, sequence, cu_seqlens, True, head, True)[0]


def results(
    together: bool, device: str, dtype: torch.dtype, channels: tuple[int, ...], head: int, v_head: int, packed: bool,
    continued: bool,
) -> list[Tensor]:  # fmt: skip
    """Outputs, gradients of the inputs, and of the taps, by one call or by three."""
    generator = torch.Generator().manual_seed(0)
    rows, T = (1, sum(LENGTHS)) if packed else (2, 13)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

    sequence = cu_seqlens = None
    if packed:
        lengths = torch.tensor(LENGTHS, device=device)
        sequence = torch.arange(len(LENGTHS), device=device).repeat_interleave(lengths)
        cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    inputs, weights = [draw(rows, T, C) for C in channels], [draw(C, 1, 4) for C in channels]
    heads, packing = (head, head, v_head), (sequence, cu_seqlens)
    past, pasts = None, [None] * 3
    if continued:
        past = draw(len(LENGTHS) if packed else rows, sum(channels), 3).detach()
        pasts = past.split(channels, 1)
    if together:
        outputs = short_convs(*inputs, *weights, past, *packing, True, head, v_head == head)
    else:
        calls = zip(inputs, weights, pasts, heads, strict=True)
        outputs = [alone(x, weight, part, *packing, size) for x, weight, part, size in calls]
    gradients = torch.autograd.grad(outputs, [*inputs, *weights], [draw(*y.shape).detach() for y in outputs])
    return [*(y.detach() for y in outputs), *gradients]


def close(mine: Tensor, theirs: Tensor) -> bool:
    return bool((mine - theirs).norm() <= 4 * torch.finfo(mine.dtype).eps * theirs.norm())


def check(device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    sizes = [
        ((16, 16, 16), 8, 8),
        ((16, 16, 40), 8, 0),
        ((24, 8, 40), 8, 0),
        ((16, 16, 5), 0, 0),
        ((150, 20, 300), 0, 0),
    ]
    for dtype, (channels, head, v_head), packed in product(dtypes, sizes, (False, True)):
        options = device, dtype, channels, head, v_head, packed, channels[2] == 40
        with mock.patch.object(short_conv_kernels, "launch", side_effect=short_conv_kernels.launch) as launch:
            found = results(True, *options)
        assert launch.call_count == 2, options
        expected = results(False, *options)
        for mine, theirs in zip(found[:6], expected[:6], strict=True):  # a compiler may contract other products
            assert torch.equal(mine, theirs) if device == "cpu" else close(mine, theirs), options
        for mine, theirs in zip(found[6:], expected[6:], strict=True):  # the programs' parts are others
            assert mine.dtype == dtype and close(mine, theirs), options


def check_apart(device: str) -> None:
    """Queries and keys normed differently, or heads of two sizes, take a launch each, and come out the same."""
    x = [torch.randn(1, 5, 16, device=device) for _ in range(3)]
    taps = [torch.randn(16, 4, device=device) for _ in range(3)]
    for heads in ((8, 0, 0), (8, 4, 0), (8, 8, 4)):
        found = short_conv.short_convolutions(tuple(x), tuple(taps), head_dims=heads, fused=True)
        for mine, a, weight, head in zip(found, x, taps, heads, strict=True):
            assert torch.equal(mine, alone(a, weight, None, None, None, head))


def test_interpreted() -> None:
    run_interpreted(Path(__file__))


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    check("cuda", (torch.float32, torch.bfloat16))
    check_apart("cuda")


if __name__ == "__main__":
    check("cpu", (torch.float32,))
    check_apart("cpu")
    x, taps = torch.randn(3, 1, 5, 16, requires_grad=True), torch.randn(3, 16, 4, requires_grad=True)
    leaves = [part.detach().requires_grad_() for part in (*x, *taps)]
    torch.library.opcheck(short_convs.overload, [*leaves, None, None, None, True, 8, False])
    torch.library.opcheck(
        short_convs.overload, [leaves[0], None, None, leaves[3], None, None, None, None, None, True, 8, True]
    )
