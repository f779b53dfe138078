"""From the raw gate to the step size the operator takes, and what goes into the operator."""

from functools import partial
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from deltazoo.layers.norm import at_least_float32
from deltazoo.layers.recompute import recomputable
from deltazoo.ops import step_size
from deltazoo.ops.named_choices import function_of
from deltazoo.spec import DeltaRuleSpec

__all__ = ["RuleInputs", "effective_step", "nonexpansive"]


class RuleInputs(NamedTuple):
    """The operator's arguments for the current tokens."""

    q: Tensor
    """`[B, T, H, K]`."""
    k: Tensor
    """`[B, T, H, K]`; n times the heads for n micro-steps per token, until `interleave`; so too v and beta."""
    v: Tensor
    """`[B, T, HV, V]`."""
    beta: Tensor | None
    """`[B, T, HV]` float32, the effective step size; None: no correction term."""
    log_decay: Tensor | None
    """`[B, T, HV]` or `[B, T, HV, K]` float32, natural log; None: no decay."""

    def arguments(self) -> tuple[Tensor | None, ...]:
        """As `delta_rule` takes them, or `linear_attention` if there is no correction term."""
        q, k, v, beta, log_decay = self
        return (q, k, v, log_decay) if beta is None else (q, k, v, beta, log_decay)

    def interleave(self, steps: int) -> "RuleInputs":
        """Lay the micro-steps of each token one after another along time, `[B, T * steps, ...]`.

        k, v and beta come with `steps` times the heads, those of the first step first. The query stands at the last
        step of each token, where it is read; the decay acts before the first.
        """

        def spread(x: Tensor) -> Tensor:
            return rearrange(x, "b t (n h) ... -> b (t n) h ...", n=steps)

        def place(x: Tensor, step: int) -> Tensor:
            spaced = x.new_zeros(x.shape[0], x.shape[1], steps, *x.shape[2:])
            spaced[:, :, step] = x
            return spaced.flatten(1, 2)

        return RuleInputs(
            recomputable(partial(place, step=steps - 1), self.q),
            spread(self.k),
            spread(self.v),
            None if self.beta is None else spread(self.beta),
            None if self.log_decay is None else recomputable(partial(place, step=0), self.log_decay),
        )

    def silence(self, real: Tensor) -> "RuleInputs":
        """Make tokens outside `real` `[B, T]` leave the state as it is: no write, no erase, no decay."""

        def silent(x: Tensor) -> Tensor:
            return x.masked_fill(~real.reshape(*real.shape, *[1] * (x.ndim - 2)), 0)

        beta = None if self.beta is None else silent(self.beta)
        log_decay = None if self.log_decay is None else silent(self.log_decay)
        return RuleInputs(self.q, self.k, recomputable(silent, self.v), beta, log_decay)


def effective_step(spec: DeltaRuleSpec, b: Tensor, k: Tensor, *, allow_neg_eigval: bool) -> Tensor:
    """Step size of a variant from its gate b in (0, 1).

    Args:
        spec: says which rule.
        b: `[B, T, HV]` float32.
        k: `[B, T, H, K]` as the operator will see it, rounding included.
        allow_neg_eigval: double the step, so that the eigenvalue along k reaches down to -1 (arXiv:2411.12537).

    Returns:
        `[B, T, HV]` float32, such that no transition expands the state.
    """
    function = function_of("step_size", spec.step_size, step_size.STEP_SIZES)
    beta = recomputable(function, b, k)
    if allow_neg_eigval:
        beta = 2 * beta
    if allow_neg_eigval or step_size.may_expand(function, unit_keys=spec.normalize_k):
        beta = nonexpansive(beta, k)
    return beta


def nonexpansive(beta: Tensor, k: Tensor) -> Tensor:
    """`min(beta, 2 / |k|^2)`: keeps the eigenvalue `1 - beta |k|^2` of the transition at -1 or above.

    A unit key rounded to bfloat16 has `|k|^2` up to 1.002. With beta = 2 its eigenvalue is then -1.004, and a token
    repeated 4,096 times grows the state some millionfold. The bound is taken from the key as rounded, in float32, and
    counts as a constant for gradients: it binds only where the gate is saturated.

    Args:
        beta: `[B, T, HV]` float32.
        k: `[B, T, H, K]` as the operator will see it.
    """
    squared_length = at_least_float32(k.detach()).square().sum(-1)
    bound = 2 / squared_length.repeat_interleave(beta.shape[2] // k.shape[2], dim=2)
    return torch.minimum(beta, bound.to(beta.dtype))
