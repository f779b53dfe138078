"""The operator's inputs, the step size among them, and the call of the operator."""

from functools import partial
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from deltazoo.layers.sequences import WHOLE_ROWS, PackedSequences, RightPaddedSequences, Sequences, SharedSequences
from deltazoo.layers.state import is_decoding_step
from deltazoo.names import function_of
from deltazoo.ops import (
    DeltaRuleOutput,
    delta_rule,
    delta_rule_step,
    linear_attention,
    linear_attention_step,
    step_size,
)
from deltazoo.ops import fused as fused_ops
from deltazoo.ops.recompute import recomputable
from deltazoo.spec import RuleSpec
from deltazoo.spec import StepForm as StepForm  # rule files of earlier versions import it from here


class RuleInputs(NamedTuple):
    """The operator's arguments for the current tokens."""

    q: Tensor
    """`[B, T, H, K]`."""
    k: Tensor
    """`[B, T, H, K]`. With n micro-steps k, v, beta and erase_key have n times the heads, in the order of the steps."""
    v: Tensor
    """`[B, T, HV, V]`."""
    beta: Tensor | None
    """`[B, T, HV]` float32, the effective step size; None: no correction term."""
    log_decay: Tensor | None
    """`[B, T, HV]` or `[B, T, HV, K]` float32, natural log; None: no decay."""
    erase_key: Tensor | None = None
    """`[B, T, H, K]` in k's dtype, the key under which a token erases; None: k."""

    def interleave(self, steps: int) -> "RuleInputs":
        """Put the micro-steps of each token side by side along time, `[B, T * steps, ...]`, as the operator wants."""

        spread: dict[str, Any] = {name: getattr(self, name) for name in ("k", "v", "beta", "erase_key")}
        for name, x in spread.items():
            spread[name] = None if x is None else rearrange(x, "b t (n h) ... -> b (t n) h ...", n=steps)
        return self._replace(**spread)

    def bounded(
        self, largest_gain: float | None = None, *, by_rounding: bool = False, fused: bool | None = False
    ) -> "RuleInputs":
        """Inputs with step sizes that keep the erase gain `beta e . k` at `largest_gain` or below (`bounded_step`).

        The bound is `deltazoo.ops.step_size.largest_gain` unless given.
        """
        if self.beta is None:
            return self
        if largest_gain is None:
            largest_gain = step_size.largest_gain(decays=self.log_decay is not None)
        bound: dict[str, Any] = {"largest_gain": largest_gain, "by_rounding": by_rounding, "fused": fused}
        return self._replace(beta=bounded_step(self.beta, self.k, self.erase_key, **bound))

    def mask_padding(self, sequences: Sequences) -> "RuleInputs":
        """Inputs whose padding tokens neither write to, erase from, nor decay the state."""
        if not isinstance(sequences, RightPaddedSequences):
            return self
        masked = partial(_fill_padding, sequences)
        beta, log_decay = (None if x is None else masked(x) for x in (self.beta, self.log_decay))
        return self._replace(v=recomputable(masked, self.v), beta=beta, log_decay=log_decay)


def _fill_padding(sequences: RightPaddedSequences, x: Tensor, value: float = 0) -> Tensor:
    """x `[B, T, ...]` with the value at padding."""
    return x.masked_fill(sequences.padding.reshape(*sequences.padding.shape, *[1] * (x.ndim - 2)), value)


def run_rule(
    inputs: RuleInputs,
    state: Tensor | None = None,
    sequences: Sequences = WHOLE_ROWS,
    *,
    erase_reads: str = "decayed",
    num_micro_steps: int = 1,
    in_place: bool = False,
    scale: float | None = None,
    backend: str | None = None,
    precision: str | None = None,
) -> DeltaRuleOutput:
    """The operator's output; a single token after a state takes the operator's form for one token.

    Args:
        inputs: the operator's arguments.
        state: `[N, HV, K, V]` float32 before the first token; zeros unless given.
        sequences: the sequences of the batch.
        erase_reads, scale, backend, precision: see `deltazoo.delta_rule`.
        num_micro_steps: steps per token.
        in_place: whether a decoding step may overwrite `state`.

    Returns:
        `[B, T, HV, V]` in v's dtype, and the state after the last token.

    Raises:
        ValueError, TypeError, NotImplementedError: see `deltazoo.delta_rule`.
    """
    if num_micro_steps > 1:
        inputs = inputs.interleave(num_micro_steps)
    q, k, v, beta, log_decay, erase_key = inputs
    correction: dict[str, Any] = dict(erase_key=erase_key, erase_reads=erase_reads, num_micro_steps=num_micro_steps)
    cu_seqlens = None
    if isinstance(sequences, (PackedSequences, SharedSequences)):
        cu_seqlens = sequences.cu_seqlens
    elif state is not None and is_decoding_step(q):
        step: dict[str, Any] = dict(state=state, inplace=in_place, scale=scale, backend=backend)
        if beta is None:
            return linear_attention_step(q, k, v, log_decay, **step)
        return delta_rule_step(q, k, v, beta, log_decay, **correction, **step)
    rows: dict[str, Any] = dict(initial_state=state, cu_seqlens=cu_seqlens, scale=scale, backend=backend)
    if isinstance(sequences, SharedSequences):
        rows["context"] = sequences.context
    if beta is None:
        return linear_attention(q, k, v, log_decay, **rows)
    return delta_rule(q, k, v, beta, log_decay, **correction, **rows, precision=precision)


def run_scan(
    decay: Tensor,
    added: Tensor,
    damping: Tensor | None = None,
    state: Tensor | None = None,
    sequences: Sequences = WHOLE_ROWS,
    *,
    start: Tensor | None = None,
    fused: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """The numbers p before each token, and the state after the last: a further state of a rule, one number per channel.

        h_t = decay_t p_{t-1} + added_t        p_t = h_t / (1 + damping_t h_t)

    With a decay of zero p before a token is what the token before it added. Padding leaves p as it is.

    Args:
        decay: `[B, T, *channels]`, or `[B, T]`, one number per token.
        added: `[B, T, *channels]`; not negative with a damping.
        damping: of the shape of `added`, not negative; None: zero.
        state: `[N, *channels]` float32 before the first token, as returned; None: the sequences begin.
        sequences: of the batch.
        start: p before the first token of a sequence, `channels`; None: zeros. The state is p minus `start`, so that
            zeros are the state of a sequence that begins.
        fused: whether a kernel computes it, see `deltazoo.ops.fused.takes_kernel`; the layer's `fused_kernels`.

    Returns:
        `[B, T, *channels]` in the dtype of added, and `[N, *channels]` float32 (float64 stays).

    Raises:
        NotImplementedError: ranks share rows (context parallelism).
    """
    if isinstance(sequences, SharedSequences):
        raise NotImplementedError(
            "ranks that share rows (context parallelism) do not hand on the state of `run_scan`: a layer that calls it "
            "sets `shares_rows = False`"
        )
    channels = added.shape[2:]
    if isinstance(sequences, RightPaddedSequences):
        decay, added = _fill_padding(sequences, decay, 1), _fill_padding(sequences, added)
        damping = None if damping is None else _fill_padding(sequences, damping)
    cu_seqlens = sequences.cu_seqlens if isinstance(sequences, PackedSequences) else None
    num_sequences = len(added) if cu_seqlens is None else len(cu_seqlens) - 1
    before = None if state is None else state.flatten(1)
    if start is not None:
        start = start.flatten().expand(num_sequences, -1)
        before = start if before is None else start + before
    decay = decay[..., None] if decay.ndim == 2 else decay.flatten(2)
    flat = decay, added.flatten(2), None if damping is None else damping.flatten(2)
    p, after = fused_ops.token_scan(*flat, before, cu_seqlens, fused=fused)
    after = after if start is None else after - start
    return p.view(*p.shape[:2], *channels), after.view(num_sequences, *channels)


def check_shape_of(name: str, spec: RuleSpec, found: object, gate: Tensor) -> None:
    """Raise ValueError unless a rule's own function returned a tensor of the shape of the gate that it got."""
    shape = tuple(found.shape) if isinstance(found, Tensor) else found
    if shape != gate.shape:
        dimensions = "[B, T, HV]" if gate.ndim == 3 else "[B, T, HV, K]"
        raise ValueError(
            f"the {name} of {spec.name!r} must be {dimensions} as its gate, {tuple(gate.shape)}, got {shape}"
        )


class EffectiveStep:
    """The step size of a rule from its gate, such that no transition expands the state.

    Args:
        spec: a rule with a correction term.
        allow_neg_eigval: double the step, so that the eigenvalue along k reaches down to -1 (arXiv:2411.12537).

    Attributes:
        precision: precision of the operator for these step sizes, in a layer whose keys are those of the spec. It is
            "fast" if only the rounding of unit keys can bring the erase gain above 1. The operator's threshold allows
            for that rounding: its default gives the same bits in more launches. Otherwise it is None, the default.
    """

    def __init__(self, spec: RuleSpec, *, allow_neg_eigval: bool) -> None:
        self.spec, self.doubles = spec, allow_neg_eigval
        self.function = function_of("step_size", spec.step_size, step_size.STEP_SIZES)
        expands = step_size.may_expand(self.function, unit_keys=spec.normalize_k)
        self.precision = None if expands or allow_neg_eigval else "fast"
        # Layers with erase keys of their own bound the gain under those.
        largest_gain = step_size.largest_gain(decays=spec.decay != "none" and spec.erase_key == "tied")
        self._bound: dict[str, Any] = dict(largest_gain=largest_gain, by_rounding=not expands)

    def __call__(self, b: Tensor, k: Tensor, *, fused: bool | None = False) -> Tensor:
        """The step size `[B, T, HV]` float32.

        Args:
            b: `[B, T, HV]` float32, the gate in (0, 1).
            k: `[B, T, H, K]` as the operator will see it, rounding included.
            fused: whether kernels compute functions of the keys, see `deltazoo.ops.fused.takes_kernel`.

        Raises:
            ValueError: a step size of another shape.
        """
        beta = step_size.effective(self.function, b, k, fused=fused)
        check_shape_of("step size", self.spec, beta, b)
        if self.doubles:
            beta = 2 * beta
        return beta if self.precision == "fast" else bounded_step(beta, k, fused=fused, **self._bound)


def bounded_step(
    beta: Tensor,
    k: Tensor,
    erase_key: Tensor | None = None,
    *,
    largest_gain: float = 2.0,
    by_rounding: bool = False,
    fused: bool | None = False,
) -> Tensor:
    """`min(beta, 2 / (e . k))`: keeps the eigenvalue `1 - beta e . k` of the transition at -1 or above.

    A unit key rounded to bfloat16 has `|k|^2` up to 1.002. With beta = 2 its eigenvalue is then -1.004, and a token
    repeated 4,096 times grows the state about a millionfold. The bound is computed in float32 from the rounded keys.
    With an erase key of its own a token repeated stays bounded, but a product of different tokens may grow
    (`RuleSpec.nonexpansive`). If `e . k` is not positive, no step size keeps the eigenvalue at 1 or below, and beta
    stays as it is.

    Args:
        beta: `[B, T, HV]` float32.
        k: `[B, T, H, K]` as the operator will see it.
        erase_key: e, of k's shape and dtype; None: e = k.
        largest_gain: bound of the gain `beta e . k`. A rule that reads the state before its decay has the eigenvalue
            `exp(g) - beta e . k`, which a bound of 1 keeps at -1 or above; a rule with a decay takes
            `deltazoo.ops.step_size.largest_gain`.
        by_rounding: whether only a saturated gate and the rounding of keys bring beta above the bound. Gradients then
            take the bound for a constant; otherwise they go through it to the keys.
        fused: whether a kernel computes `e . k` for a constant bound, see `deltazoo.ops.fused.takes_kernel`.

    Returns:
        `[B, T, HV]`, in beta's dtype.
    """
    e = k if erase_key is None else erase_key
    if by_rounding:
        k, e = k.detach(), e.detach()
    gain = fused_ops.erase_gain(k, e, fused=fused if by_rounding else False)
    bound = largest_gain / gain.clamp_min(1e-15)  # 1e-15 squared, in the gradient, is a number of float32
    return clip_step(beta, step_size.of_value_heads(bound, beta.shape[2]).to(beta.dtype))


def clip_step(beta: Tensor, bound: Tensor) -> Tensor:
    """`min(beta, bound)`, as a function that the checks of rules replace."""
    return torch.minimum(beta, bound)
