"""The operator's inputs, the step size among them, and the call of the operator."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from deltazoo.layers.norm import at_least_float32
from deltazoo.layers.recompute import recomputable
from deltazoo.layers.sequences import WHOLE_ROWS, PackedSequences, PaddedSequences, Sequences
from deltazoo.layers.state import is_decoding_step
from deltazoo.ops import (
    DeltaRuleOutput,
    delta_rule,
    delta_rule_step,
    linear_attention,
    linear_attention_step,
    step_size,
)
from deltazoo.ops.named_choices import function_of
from deltazoo.spec import DeltaRuleSpec

__all__ = ["RuleInputs", "effective_step", "nonexpansive", "run_rule"]


class RuleInputs(NamedTuple):
    """The operator's arguments for the current tokens."""

    q: Tensor
    """`[B, T, H, K]`."""
    k: Tensor
    """`[B, T, H, K]`. With n micro-steps per token k, v and beta have n times the heads, until `interleave`."""
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
        """Put the micro-steps of each token one after another along time, `[B, T * steps, ...]`.

        k, v and beta come with `steps` times the heads, those of the first step first. The state is read at the last
        step of each token, so the query goes there. It decays before the first, so the decay goes there.
        """

        def spread(x: Tensor) -> Tensor:
            return rearrange(x, "b t (n h) ... -> b (t n) h ...", n=steps)

        def put_at(x: Tensor, step: int) -> Tensor:
            spaced = x.new_zeros(x.shape[0], x.shape[1], steps, *x.shape[2:])
            spaced[:, :, step] = x
            return spaced.flatten(1, 2)

        return RuleInputs(
            recomputable(partial(put_at, step=steps - 1), self.q),
            spread(self.k),
            spread(self.v),
            None if self.beta is None else spread(self.beta),
            None if self.log_decay is None else recomputable(partial(put_at, step=0), self.log_decay),
        )

    def mask_padding(self, sequences: Sequences) -> "RuleInputs":
        """Padding tokens neither write to, erase from, nor decay the state."""
        if not isinstance(sequences, PaddedSequences):
            return self
        padding = ~sequences.real

        def masked(x: Tensor) -> Tensor:
            return x.masked_fill(padding.reshape(*padding.shape, *[1] * (x.ndim - 2)), 0)

        beta = None if self.beta is None else masked(self.beta)
        log_decay = None if self.log_decay is None else masked(self.log_decay)
        return RuleInputs(self.q, self.k, recomputable(masked, self.v), beta, log_decay)


def run_rule(
    inputs: RuleInputs,
    state: Tensor | None = None,
    sequences: Sequences = WHOLE_ROWS,
    *,
    num_micro_steps: int = 1,
    in_place: bool = False,
    backend: str | None = None,
) -> DeltaRuleOutput:
    """Call the operator, in its form for one token where that is all there is.

    Args:
        inputs: the operator's arguments.
        state: `[N, HV, K, V]` float32 before the first token; zeros unless given.
        sequences: of the batch.
        num_micro_steps: steps per token.
        in_place: whether a decoding step may overwrite `state`.
        backend: of the operator.

    Returns:
        `[B, T, HV, V]` in v's dtype, and the state after the last token.
    """
    one_token = state is not None and is_decoding_step(inputs.v) and not isinstance(sequences, PackedSequences)
    if num_micro_steps > 1:
        inputs = inputs.interleave(num_micro_steps)
    if one_token:
        return _run_one_token(inputs, state, in_place, backend)  # type: ignore[arg-type]
    rule: Callable[..., DeltaRuleOutput] = linear_attention if inputs.beta is None else delta_rule
    cu_seqlens = sequences.cu_seqlens * num_micro_steps if isinstance(sequences, PackedSequences) else None
    output, state = rule(*inputs.arguments(), initial_state=state, cu_seqlens=cu_seqlens, backend=backend)
    return DeltaRuleOutput(output if num_micro_steps == 1 else output[:, num_micro_steps - 1 :: num_micro_steps], state)


def _run_one_token(inputs: RuleInputs, state: Tensor, in_place: bool, backend: str | None) -> DeltaRuleOutput:
    """The micro-steps of one token one by one; the output is that of the last."""
    step: Callable[..., DeltaRuleOutput] = linear_attention_step if inputs.beta is None else delta_rule_step
    output = inputs.v
    for i in range(inputs.v.shape[1]):
        arguments = (None if x is None else x[:, i : i + 1] for x in inputs.arguments())
        output, state = step(*arguments, state=state, inplace=in_place, backend=backend)
    return DeltaRuleOutput(output, state)


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
    repeated 4,096 times grows the state about a millionfold. The bound is taken from the key as rounded, in float32.
    For gradients it is a constant: it binds only where the gate is saturated.

    Args:
        beta: `[B, T, HV]` float32.
        k: `[B, T, H, K]` as the operator will see it.
    """
    squared_length = at_least_float32(k.detach()).square().sum(-1)
    bound = 2 / squared_length.repeat_interleave(beta.shape[2] // k.shape[2], dim=2)
    return torch.minimum(beta, bound.to(beta.dtype))
