"""The scan over tokens: its two forms against a loop over tokens, and the kernel against torch."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from fused_cases import HALF, Case, Results, opcheck, test_interpreted, test_on_the_gpu  # noqa: F401
from torch import Tensor

pytest.importorskip("triton")

from deltazoo.ops.fused import scan, token_scan  # noqa: E402

BOUNDS = [0, 0, 40, 41, 41, 70]
"""Of packed sequences, two of them empty."""


def inputs(
    shape: tuple[int, ...], *, damped: bool, shared: bool = False, packed: bool = False, dtype: torch.dtype
) -> list[Tensor | None]:
    """Decay, what a token adds, damping, start and boundaries."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype)

    B, T, D = shape
    bounds = torch.tensor(BOUNDS, dtype=torch.int32) if packed else None
    decay, added = draw(B, T, 1 if shared else D), draw(B, T, D)
    start = draw(len(BOUNDS) - 1 if packed else B, D).to(torch.promote_types(dtype, torch.float32))
    return [decay, added, 3 * draw(B, T, D) if damped else None, start, bounds]


def loop(decay: Tensor, added: Tensor, damping: Tensor | None, start: Tensor, bounds: Tensor | None) -> tuple:
    """The formula, token by token, one sequence after another."""
    B, T, D = added.shape
    begins = [T * row for row in range(B + 1)] if bounds is None else bounds.tolist()
    a, b = decay.expand(B, T, D).flatten(0, 1), added.flatten(0, 1)
    c = torch.zeros_like(b) if damping is None else damping.flatten(0, 1)
    before, final = [], []
    for n, (begin, end) in enumerate(zip(begins, begins[1:], strict=False)):
        p = start[n]
        for t in range(begin, end):
            before.append(p)
            h = a[t] * p + b[t]
            p = h / (1 + c[t] * h)
        final.append(p)
    return torch.stack(before).view(B, T, D), torch.stack(final)


KINDS = [
    {"damped": damped, "shared": shared, "packed": packed}
    for damped in (False, True)
    for shared in (False, True)
    for packed in (False, True)
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_torch_computes_the_loop(kind: dict[str, bool]) -> None:
    given = inputs((1 if kind["packed"] else 2, 70, 3), dtype=torch.float64, **kind)
    leaves = [x.requires_grad_() for x in given if x is not None and x.is_floating_point()]
    results = [function(*given) for function in (loop, token_scan)]
    weights = [torch.rand_like(x) for x in results[0]]
    found = [(*made, *torch.autograd.grad(made, leaves, weights)) for made in results]
    torch.testing.assert_close(found[1], found[0], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("damped", [False, True])
def test_one_token_after_another_is_the_scan(damped: bool) -> None:
    decay, added, damping, start, _ = inputs((2, 6, 3), damped=damped, dtype=torch.float64)
    before, final = token_scan(decay, added, damping, start)
    for t in range(6):
        tokens = [None if x is None else x[:, t : t + 1] for x in (decay, added, damping)]
        held, start = token_scan(*tokens, start)
        torch.testing.assert_close(held[:, 0], before[:, t], rtol=1e-14, atol=0)
    torch.testing.assert_close(start, final, rtol=1e-14, atol=0)


@dataclass(frozen=True)
class Scan(Case):
    """Both results and all gradients."""

    shape: tuple[int, int, int] = (2, 70, 12)
    damped: bool = True
    shared: bool = False
    packed: bool = False

    def run(self, device: str, *, fused: bool, dtype: torch.dtype | None = None) -> Results:
        given = inputs(self.shape, damped=self.damped, shared=self.shared, packed=self.packed, dtype=self.dtype)
        wide = dtype or self.dtype
        moved = [None if x is None else x.to(device) for x in given]
        moved[:3] = [None if x is None else x.to(wide) for x in moved[:3]]
        moved[3] = moved[3].to(torch.promote_types(wide, torch.float32))
        leaves = {"decay": None if self.shared else moved[0], "added": moved[1], "damping": moved[2], "start": moved[3]}
        leaves = {name: x.requires_grad_() for name, x in leaves.items() if x is not None}
        results = token_scan(*moved, fused=fused)
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(x.shape, generator=generator).to(x) for x in results]
        gradients = torch.autograd.grad(results, [*leaves.values()], weights)
        made = dict(zip(("before", "final"), (x.detach() for x in results), strict=True))
        return made | {f"d_{name}": x for name, x in zip(leaves, gradients, strict=True)}


CASES: list[Case] = [
    Scan("scan"),
    Scan("scan_undamped", damped=False),
    Scan("scan_shared", damped=False, shared=True),
    Scan("scan_packed", (1, 70, 5), packed=True),
    Scan("scan_packed_undamped", (1, 70, 5), damped=False, packed=True),
    Scan("scan_of_one_channel", (3, 300, 1)),
    Scan("scan_of_many_channels", (1, 65, 40)),
    Scan("scan_half", (2, 20, 12), damped=False, shared=True, dtype=HALF),
]

MORE_ON_A_GPU: list[Case] = [Scan("scan_of_1000_tokens", (2, 1000, 100)), Scan("scan_of_64", (1, 64, 200))]


def test_inputs_that_do_not_fit() -> None:
    decay, added, damping, start, _ = inputs((2, 6, 3), damped=True, dtype=torch.float32)
    expected = r"expected decay \[B, T, D or 1\].*N = 2, got "
    for given in ((decay[:, :5], added), (decay, added, damping[..., :1]), (decay, added, damping, start[:1])):
        with pytest.raises(ValueError, match=expected):
            token_scan(*given)


def check_operators() -> None:
    for damped in (False, True):
        opcheck((scan._token_scan, *inputs((2, 5, 3), damped=damped, dtype=torch.float32)))
