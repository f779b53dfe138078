"""Run by test_shared_convolutions.py under torchrun: short convolutions of pieces against those of the whole rows.

Through Triton's interpreter on CPU ranks, or with a GPU for each.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from interpreter import quicken_the_interpreter
from one_thread_gloo import ONE_THREAD_GLOO

from deltazoo.layers.recompute_levels import run_block
from deltazoo.ops import ContextParallel
from deltazoo.ops.context.convolution import PieceBounds, convolved_piece
from deltazoo.ops.fused.short_conv_kernels import short_convs

GPU = os.environ.get("TRITON_INTERPRET") != "1"
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("cuda", RANK) if GPU else torch.device("cpu")
TOKENS, CHANNELS, OPTIONS = 30, (16, 16, 24), (True, 8, False)
DOCUMENTS = 0, 5, 5, 18, 19, 20, 30, 30
PIECES = {1: ((30,), (30,)), 2: ((10, 20), (28, 2)), 3: ((10, 2, 18), (1, 1, 28))}
"""One or two tokens are fewer than the convolution reaches back to."""


def compare(documents: tuple[int, ...] | None, lengths: tuple[int, ...], level: str) -> None:
    """Compare outputs and gradients of inputs, which have the bits of the whole rows on a CPU, and those of weights."""
    generator = torch.Generator().manual_seed(0)
    rows = 2 if documents is None else 1

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    inputs, gradients = ([draw(rows, TOKENS, C) for C in CHANNELS] for _ in range(2))
    weights = [draw(C, 1, 4).requires_grad_() for C in CHANNELS]
    begin = sum(lengths[:RANK])
    piece = slice(begin, begin + lengths[RANK])
    bounds = sequence = None
    if documents is not None:
        bounds = torch.tensor(documents, device=DEVICE)
        sequence = torch.searchsorted(bounds[1:], torch.arange(TOKENS, device=DEVICE), right=True)

    whole = [x.clone().requires_grad_() for x in inputs]
    expected = short_convs(*whole, *weights, None, sequence, bounds, *OPTIONS)
    sums = [y + y * y for y in expected]  # squares keep the outputs, or compute them again
    d_expected = torch.autograd.grad(sums, [*whole, *weights], gradients)

    parts = [x[:, piece].clone().requires_grad_() for x in inputs]
    context = ContextParallel(dist.group.WORLD, lengths=lengths)

    def convolved(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = convolved_piece(inputs, tuple(weights), PieceBounds(context, bounds), *OPTIONS)
        return *outputs, *(y + y * y for y in outputs)

    found = run_block(level, convolved, *parts, exchanges=True)
    d_found = torch.autograd.grad(found[3:], [*parts, *weights], [d[:, piece] for d in gradients])
    for x, mine in zip((*expected, *d_expected[:3]), (*found[:3], *d_found[:3]), strict=True):
        if GPU:  # whose compiler may contract other products in runs of another length
            torch.testing.assert_close(x[:, piece], mine, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(x[:, piece], mine)
    for d, mine in zip(d_expected[3:], d_found[3:], strict=True):
        dist.all_reduce(mine)
        torch.testing.assert_close(d, mine, rtol=1e-5, atol=1e-4)


def main() -> None:
    torch.set_num_threads(1)
    quicken_the_interpreter()
    if GPU:
        torch.cuda.set_device(DEVICE)
    dist.init_process_group(f"cpu:{ONE_THREAD_GLOO},cuda:nccl" if GPU else ONE_THREAD_GLOO)
    first, second = PIECES[SIZE]
    compare(None, first, "none")
    compare(DOCUMENTS, first, "elementwise")
    compare(DOCUMENTS, second, "block")
    dist.destroy_process_group()
    sys.stdout.flush()
    # All is compared. In 2 of some 45 runs a process aborted, by the time it took at its end ("terminate called without
    # an active exception"); the cause is not known.
    os._exit(0)


if __name__ == "__main__":
    main()
