"""Step sizes: functions from the gate `b` and the key to the effective step size `beta` of the delta rule.

The delta rule is one step of gradient descent on `0.5 * |S^T k - v|^2`. The functions below are four ways to take that
step: forward Euler, the exact flow over time `b`, the implicit (proximal) step, and the projection of Kaczmarz onto the
solutions of `S^T k = v`, relaxed by `b`. They differ only in the eigenvalue of the transition along `k`: `1 - b*lam`,
`exp(-b*lam)`, `1 / (1 + b*lam)` and `1 - b`, with `lam = k^T k`.

A spec names one of them (`STEP_SIZES`) or brings a function of its own, `f(b, k) -> beta`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from deltazoo.ops import fused as fused_ops
from deltazoo.ops.dtypes import at_least_float32, wide_dtype
from deltazoo.ops.recompute import recomputable

__all__ = [
    "OF_SQUARED_NORM",
    "STEP_SIZES",
    "StepSize",
    "effective",
    "euler",
    "exact",
    "gate_and_squared_norm",
    "implicit",
    "kaczmarz",
    "largest_gain",
    "may_expand",
    "of_value_heads",
]

StepSize = Callable[[Tensor, Tensor], Tensor]
"""Function of the gate b `[B, T, HV]` and the key `[B, T, H, K]` that gives the effective step size `[B, T, HV]`."""


def euler(b: Tensor, k: Tensor | None = None) -> Tensor:
    """Forward Euler, the plain delta rule: `beta = b` (arXiv:2406.06484).

    Args:
        b: gate, any shape, any float dtype.
        k: not used; all step sizes are called with it.

    Returns:
        `b` in float32 (float64 stays float64).
    """
    return at_least_float32(b)


def exact(b: Tensor, k: Tensor) -> Tensor:
    """Exact flow of `dS/dt = -k k^T S + k v^T` over time `b`: `beta = (1 - exp(-b*lam)) / lam`.

    Source: EFLA, arXiv:2512.12602.

    It is finite, with finite gradients, for every key: as `lam -> 0` it tends to `b`, as `lam -> inf` to `1 / lam`. The
    gate b `[B, T, HV]`, not negative, and the key k `[B, T, H, K]`, not normalised and rounded as for the operator, HV
    a multiple of H, give beta `[B, T, HV]` in float32 (float64 if either is).
    """
    return OF_SQUARED_NORM[exact](*gate_and_squared_norm(b, k))


def implicit(b: Tensor, k: Tensor) -> Tensor:
    """Implicit (proximal) step: `beta = b / (1 + b*lam)`.

    Source: Longhorn, arXiv:2407.14207, without its diagonal approximation of `k k^T`. Shapes and dtypes are those of
    `exact`.
    """
    return OF_SQUARED_NORM[implicit](*gate_and_squared_norm(b, k))


def kaczmarz(b: Tensor, k: Tensor) -> Tensor:
    """Relaxed projection of Kaczmarz: `beta = b / (lam + 1e-6)`, so that `b` is the share of the error removed.

    Source: arXiv:2605.08587; the constant is that of the authors' code.

    The longer a key, the smaller the value stored along it. For a short key beta is large, up to `1e6 * b` for a zero
    one, and `beta k v^T` at most `500 |v|`, at `|k| = 1e-3`. Shapes and dtypes are those of `exact`, b in [0, 1].
    """
    return OF_SQUARED_NORM[kaczmarz](*gate_and_squared_norm(b, k))


STEP_SIZES: dict[str, StepSize] = {"euler": euler, "exact": exact, "implicit": implicit, "kaczmarz": kaczmarz}
"""The step sizes that a spec can name."""


OF_SQUARED_NORM: dict[StepSize, Callable[[Tensor, Tensor], Tensor]] = {
    exact: lambda b, lam: b * _expm1_ratio(b * lam),
    implicit: lambda b, lam: b / (1 + b * lam),
    kaczmarz: lambda b, lam: b / (lam + 1e-6),
}
"""The step sizes that are functions of the gate and the squared length of the key, both `[B, T, HV]`, in that form.
With these `beta * lam` never exceeds 1."""


def effective(function: StepSize, b: Tensor, k: Tensor, *, fused: bool | None = None) -> Tensor:
    """The effective step size of a function; the backward pass keeps only b and k.

    Args:
        function, b, k: see `StepSize`.
        fused: whether a kernel computes the squared lengths of keys, see `deltazoo.ops.fused.takes_kernel`.
    """
    if function is euler:
        return euler(b)
    if function not in OF_SQUARED_NORM or not fused_ops.takes_kernel(fused, k, columns=k.shape[-1]):
        return recomputable(function, b, k)
    lengths = of_value_heads(fused_ops.squared_norm(k, fused=True), b.shape[2])
    return recomputable(OF_SQUARED_NORM[function], b, lengths)


def may_expand(step_size: StepSize, *, unit_keys: bool) -> bool:
    """Whether `beta * lam` can exceed 2 for a gate in [0, 1], so that the transition expands the state along the key.

    It is false for the functions of this module that cannot, true for every other function.
    """
    return step_size not in OF_SQUARED_NORM and not (step_size is euler and unit_keys)


def largest_gain(*, decays: bool) -> float:
    """The bound of the erase gain `beta e . k` in layers: 2, and just below it for a state that decays.

    At 2 one key repeated is reflected for ever, and the chunk form rounds every chunk of it alike. With a decay of less
    than 1e-5 per token its rounding errors stretched the state by up to 3e-5 per token on a CPU. The lower bound
    shrinks it by 2.4e-4. Without decay the chunk form is exact there except for 1e-6 per token.
    """
    return 2 * (1 - 2**-13) if decays else 2.0


def gate_and_squared_norm(b: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The gate and `lam = |k|^2` for every value head, both `[B, T, HV]` in float32, of which step sizes are functions.

    Args:
        b: `[B, T, HV]`.
        k: `[B, T, H, K]`; HV is a multiple of H.

    Returns:
        b and lam, in float64 if either input is.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    if k.ndim != 4 or b.ndim != 3 or b.shape[:2] != k.shape[:2] or b.shape[2] % k.shape[2]:
        raise ValueError(
            f"expected b [B, T, HV] and k [B, T, H, K], HV a multiple of H, got {tuple(b.shape)} and {tuple(k.shape)}"
        )
    dtype = wide_dtype(b, k)
    lam = fused_ops.squared_norm(k.to(dtype), fused=False)  # beta is below 1e-30 for keys beyond its bound
    return b.to(dtype), of_value_heads(lam, b.shape[2])


def of_value_heads(x: Tensor, num_heads: int) -> Tensor:
    """x `[B, T, H]` repeated for every value head, `[B, T, num_heads]`; neighbouring heads share a key head."""
    return x if x.shape[2] == num_heads else x.repeat_interleave(num_heads // x.shape[2], dim=2)


def _expm1_ratio(x: Tensor) -> Tensor:
    """`(1 - exp(-x)) / x` for x >= 0, continued by its series at 0 so that the gradient is finite there."""
    # Each branch gets only its own x: where() multiplies the other branch's gradient by zero, and 0 * inf is NaN.
    small = x < 1e-2
    near, far = torch.where(small, x, 0), torch.where(small, 1, x)
    series = 1 - near / 2 * (1 - near / 3 * (1 - near / 4 * (1 - near / 5 * (1 - near / 6))))
    return torch.where(small, series, -torch.expm1(-far) / far)
