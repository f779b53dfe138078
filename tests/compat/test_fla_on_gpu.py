"""The functions and modules on a GPU, where kernels compute norms, gates and convolutions, against the definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fla_definitions
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.compat import fla

pytestmark = pytest.mark.gpu
T, H, HV, K, V, D, W = 70, 1, 2, 32, 16, 32, 4
BOUNDS = torch.tensor([0, 5, 5, 6, T])
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 4e-2}
"""Root mean square of the error over that of the exact values, gradients of sums over tokens included."""


def compare(
    function: Callable[..., Any], meaning: Callable[..., Any], tensors: dict[str, Tensor], dtype: torch.dtype
) -> None:
    """Results and gradients on the GPU against those of the definition in float64 on the CPU."""
    rounded = {name: x.to(dtype) for name, x in tensors.items()}
    on_gpu = {name: x.cuda().requires_grad_() for name, x in rounded.items()}
    exact = {name: x.double().requires_grad_() for name, x in rounded.items()}
    actual, expected = function(**on_gpu), meaning(**exact)
    seeds = [torch.randn_like(x) for x in expected]
    found = [
        [
            *results,
            *torch.autograd.grad(
                [*results], [*inputs.values()], [s.to(r) for s, r in zip(seeds, results, strict=True)]
            ),
        ]
        for results, inputs in ((actual, on_gpu), (expected, exact))
    ]
    for name, mine, wanted in zip([*range(len(expected)), *tensors], *found, strict=True):
        error = (mine.cpu().double() - wanted).norm() / wanted.norm()
        assert error < TOLERANCE[dtype], (name, error.item())


def inputs(per_channel: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "q": torch.randn(1, T, H, K),
        "k": torch.randn(1, T, H, K),
        "v": torch.randn(1, T, HV, V),
        "g": torch.randn(1, T, HV, K) if per_channel else torch.randn(1, T, HV),
        "beta": torch.randn(1, T, HV),
        "A_log": torch.rand(HV),
        "dt_bias": torch.randn(HV * K if per_channel else HV),
        "initial_state": torch.randn(len(BOUNDS) - 1, HV, V, K),
    }


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("function", [fla.chunk_gated_delta_rule, fla.chunk_kda], ids=lambda x: x.__name__)
def test_rules(function: Callable[..., Any], lower_bound: float | None, dtype: torch.dtype) -> None:
    if lower_bound is not None and function is not fla.chunk_kda:
        pytest.skip("only KDA has a bounded gate")
    options = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "state_v_first": True}
    bound = {} if lower_bound is None else {"lower_bound": lower_bound}

    def ours(**tensors: Tensor) -> Any:
        gates = {"use_gate_in_kernel": True, "output_final_state": True, "cu_seqlens": BOUNDS.cuda()}
        return function(**tensors, **options, **gates, **bound)

    def meaning(**tensors: Tensor) -> Any:
        gate = "softplus" if lower_bound is None else "bounded"
        return fla_definitions.rule(**tensors, **options, **bound, gate=gate, cu_seqlens=BOUNDS)

    compare(ours, meaning, inputs(function is fla.chunk_kda), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("given", [("bias",), ("initial_state",), ("residual",), ()], ids=str)
def test_causal_conv1d(given: tuple[str, ...], packed: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sequences = len(BOUNDS) - 1 if packed else 1
    tensors = {"x": torch.randn(1, T, D), "weight": torch.randn(D, W)}
    more = {"bias": torch.randn(D), "initial_state": torch.randn(sequences, D, W), "residual": torch.randn(1, T, D)}
    tensors |= {name: more[name] for name in given}

    def ours(**tensors: Tensor) -> Any:
        bounds = BOUNDS.cuda() if packed else None
        return fla.causal_conv1d(**tensors, activation="silu", cu_seqlens=bounds, output_final_state=True)

    def meaning(**tensors: Tensor) -> Any:
        return fla_definitions.convolution(**tensors, activation="silu", cu_seqlens=BOUNDS if packed else None)

    compare(ours, meaning, tensors, dtype)
    with torch.no_grad():  # a state without a gradient goes to the kernel
        on_gpu = {name: x.cuda() for name, x in tensors.items()}
        expected = meaning(**{name: x.double() for name, x in tensors.items()})
        for mine, wanted in zip(ours(**on_gpu), expected, strict=True):
            torch.testing.assert_close(mine.cpu().double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("affine", [False, True])
def test_norms(affine: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = {"x": torch.randn(3, T, D), "g": torch.randn(3, T, D), "residual": torch.randn(3, T, D)}
    plain = fla.RMSNorm(D, elementwise_affine=affine, device="cuda")
    gated = fla.FusedRMSNormGated(D, elementwise_affine=affine, activation="sigmoid", device="cuda")

    def ours(x: Tensor, g: Tensor, residual: Tensor) -> Any:
        return plain(x), *plain(x, residual, prenorm=True), gated(x, g), gated(x, g, residual), fla.l2norm(x)

    def meaning(x: Tensor, g: Tensor, residual: Tensor) -> Any:
        both = fla_definitions.rms_norm(x, None, 1e-5, residual=residual)
        one = fla_definitions.rms_norm(x, None, 1e-5)
        return one, both, x + residual, one * g.sigmoid(), both * g.sigmoid(), fla_definitions.unit(x)

    compare(ours, meaning, tensors, dtype)


def test_a_step_writes_the_cache() -> None:
    torch.manual_seed(0)
    layer = fla.ShortConvolution(D, W, device="cuda")
    x = torch.randn(2, 3, D, device="cuda")
    whole, _ = layer(x)
    cache = torch.zeros(2, D, W, device="cuda")
    with torch.no_grad():
        steps = [layer(x[:, t : t + 1], cache=cache)[0] for t in range(3)]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cache[..., 1:], x.transpose(1, 2))


def test_packed_calls_are_captured_as_they_are() -> None:
    """What the message about `use_graph` says: other boundaries need no other graph."""
    given = {name: x.cuda() for name, x in inputs(True).items()}
    bounds = BOUNDS.cuda()

    def call() -> Tensor:
        with torch.no_grad():
            return fla.chunk_kda(**given, use_gate_in_kernel=True, state_v_first=True, cu_seqlens=bounds)[0]

    call()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    with torch.cuda.graph(graph):
        captured = call()
    for boundaries in (BOUNDS, torch.tensor([0, 1, 40, 69, T])):
        bounds.copy_(boundaries)
        graph.replay()
        result = captured.clone()
        assert torch.equal(result, call())
        assert not F.mse_loss(result, torch.zeros_like(result)).isnan()
