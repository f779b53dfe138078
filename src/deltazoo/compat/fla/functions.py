"""The rules' functions of flash-linear-attention: `chunk_*` and `fused_recurrent_*` of DeltaNet, Gated DeltaNet, KDA.

The operator chooses how to compute, so both forms of a rule give the same results, and both have gradients.
"""

import warnings
from typing import Any

import torch
from torch import Tensor

from deltazoo.compat.fla.modules import l2norm, refuse_context_parallelism, require_boundaries
from deltazoo.layers.state import is_decoding_step
from deltazoo.names import unknown
from deltazoo.ops import delta_rule, delta_rule_step, fused
from deltazoo.ops.decay import bounded_decay
from deltazoo.ops.dtypes import at_least_float32

_HINTS = ("chunk_size", "chunk_indices", "cu_seqlens_cpu", "safe_gate", "disable_recompute")
"""Options by which flash-linear-attention chooses how to compute; they change no result, and we ignore them."""


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule without decay (DeltaNet), computed by `deltazoo.delta_rule`.

    Args:
        q, k: `[B, T, H, K]`.
        v: `[B, T, H, V]`.
        beta: `[B, T, H]`, the step size, after its sigmoid.
        initial_state: `[N, H, K, V]`.
        scale, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, cu_seqlens_cpu: see `chunk_gated_delta_rule`.
        kwargs: hints of flash-linear-attention, and `head_first=False`.

    Returns:
        `[B, T, H, V]` in q's dtype, and the final state `[N, H, K, V]` float32 or None.
    """
    return _compute("chunk_delta_rule", locals())


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_delta_rule`; `deltazoo.delta_rule_step` computes one token after a state without gradients.

    Args:
        q, k, v, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens: see `chunk_delta_rule`.
        beta: `[B, T, H]`; ones unless given.

    Raises:
        NotImplementedError: a step size per value channel.
    """
    return _compute("fused_recurrent_delta_rule", locals())


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule with one decay per head (Gated DeltaNet), computed by `deltazoo.delta_rule`.

    Args:
        q, k: `[B, T, H, K]`.
        v: `[B, T, HV, V]`, HV a multiple of H.
        g: `[B, T, HV]`, log-decay, natural logarithm, at most 0. With `use_gate_in_kernel` the input of the gate.
        beta: `[B, T, HV]`, the step size; with `use_beta_sigmoid_in_kernel` the input of the sigmoid.
        scale: factor on q, `K ** -0.5` unless given.
        initial_state: `[N, HV, K, V]`; N = B, or the number of packed sequences.
        output_final_state: whether to return the final state; otherwise None stands in its place.
        use_qk_l2norm_in_kernel: whether `l2norm` acts on q and k first.
        use_beta_sigmoid_in_kernel: the step size is `sigmoid(beta)`.
        allow_neg_eigval: the step size is `2 * sigmoid(beta)`; needs `use_beta_sigmoid_in_kernel`.
        state_v_first: the initial and the final state are `[N, HV, V, K]`.
        cu_seqlens: `[N + 1]`, boundaries of sequences packed along T, with B = 1.
        cu_seqlens_cpu, chunk_indices: further forms of the boundaries; like `chunk_size` hints that change no result.
        cp_context: None.
        kwargs: `use_gate_in_kernel=True` with `A_log` `[HV]` and, if wanted, `dt_bias` `[HV]`: the log-decay is
            `-exp(A_log) * softplus(g + dt_bias)`; without it they are not read. Further hints, `head_first=False`, and
            `transpose_state_layout`, the old name of `state_v_first`.

    Returns:
        `[B, T, HV, V]` in q's dtype, and the final state float32 or None. A state with V first is a transposed view.

    Raises:
        ValueError, TypeError: arguments that do not fit together, or are unknown.
        NotImplementedError: a `cp_context`.
    """
    return _compute("chunk_gated_delta_rule", locals(), further=("use_gate_in_kernel", "A_log", "dt_bias"))


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_gated_delta_rule`; `deltazoo.delta_rule_step` computes one token after a state without gradients.

    Arguments are those of `chunk_gated_delta_rule` and:

    Args:
        g: `[B, T, HV]`; no decay per head unless given.
        gk: `[B, T, HV, K]`, log-decay per key channel, added to g.
        gv: None.
        beta: `[B, T, HV]`; ones unless given.

    Raises:
        NotImplementedError: `gv`, or a step size per value channel.
    """
    return _compute("fused_recurrent_gated_delta_rule", locals())


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: object = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule with one decay per key channel (Kimi Delta Attention), computed by `deltazoo.delta_rule`.

    Arguments are those of `chunk_gated_delta_rule` and:

    Args:
        g: `[B, T, HV, K]`.
        use_gate_in_kernel: the log-decay is `-exp(A_log) * softplus(g + dt_bias)` with `A_log` `[HV]` and, if wanted,
            `dt_bias` `[HV * K]` among `kwargs`; without it they are not read.
        lower_bound: with `use_gate_in_kernel`, the log-decay is `lower_bound * sigmoid(exp(A_log) * (g + dt_bias))`,
            where `A_log` may be left out.
        safe_gate, disable_recompute: hints that change no result.
        return_intermediate_states, use_graph: False.
        max_num_seqs: only read with `use_graph`.

    Raises:
        NotImplementedError: `cp_context`, `return_intermediate_states` or `use_graph`.
    """
    return _compute("chunk_kda", locals(), further=("A_log", "dt_bias"))


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_kda`; `deltazoo.delta_rule_step` computes one token after a state without gradients.

    Arguments are those of `chunk_kda`; `A_log` and `dt_bias` are only read with `use_gate_in_kernel`.

    Raises:
        NotImplementedError: a step size per value channel.
    """
    return _compute("fused_recurrent_kda", locals())


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule

_WIDTH_ONE = (
    "make every value channel a head of its own, v.flatten(2)[..., None], with a beta and a g for each of these heads, "
    "and give the output its shape back with view_as(v)"
)


def _compute(
    function: str, arguments: dict[str, Any], *, further: tuple[str, ...] = ()
) -> tuple[Tensor, Tensor | None]:
    """Output and final state of one of the functions; an option means the same in all functions that have it.

    `further` are options among its `kwargs` besides those that all functions take.
    """
    given, others = dict(arguments), dict(arguments.get("kwargs", {}))
    given |= {name: others.pop(name, None) for name in further}
    state_v_first = _take_state_layout(function, given.get("state_v_first", False), others)
    if state_v_first and "state_v_first" not in given:
        raise TypeError(f"{function} takes and returns states [N, H, K, V] alone, not transpose_state_layout=True")
    refuse_context_parallelism(function, given.get("cp_context"))
    require_boundaries(given["cu_seqlens"], given.get("cu_seqlens_cpu"))
    _refuse_options(function, given)

    q, k, v, beta, log_decay = given["q"], given["k"], given["v"], given["beta"], given.get("g")
    if beta is None and function.startswith("fused_recurrent"):
        beta = v.new_ones(v.shape[:3], dtype=torch.float32)
    _require_gate(function, "beta", beta, v, per_channel=False)
    if given.get("use_beta_sigmoid_in_kernel"):
        beta = torch.sigmoid(at_least_float32(beta)) * (2 if given["allow_neg_eigval"] else 1)
    gk = given.get("gk")
    if log_decay is not None or ("g" in given and "gk" not in given):
        _require_gate(function, "g", log_decay, v, per_channel=function.endswith("kda"))
    if given.get("use_gate_in_kernel"):
        if log_decay is None:
            raise ValueError(f"{function} with use_gate_in_kernel=True needs g, which the gate reads")
        log_decay = _log_decay(log_decay, given["A_log"], given["dt_bias"], given.get("lower_bound"))
    if gk is not None:
        _require_gate(function, "gk", gk, v, per_channel=True)
        log_decay = gk if log_decay is None else at_least_float32(log_decay)[..., None] + gk

    dtype, state, cu_seqlens = q.dtype, given["initial_state"], given["cu_seqlens"]
    if given["use_qk_l2norm_in_kernel"]:
        q, k = l2norm(q), l2norm(k)
    if state is not None and state_v_first:
        state = state.mT
    inputs, scale = (q, k, v, beta, log_decay), given["scale"]
    if state is not None and cu_seqlens is None and is_decoding_step(v):
        output, state = delta_rule_step(*inputs, state=state, scale=scale)
    else:
        output, state = delta_rule(*inputs, scale=scale, initial_state=state, cu_seqlens=cu_seqlens)
    if not given["output_final_state"]:
        return output.to(dtype), None
    return output.to(dtype), state.mT if state_v_first else state


def _refuse_options(function: str, given: dict[str, Any]) -> None:
    """Raise for options with which flash-linear-attention computes something that we do not, and contradicting ones."""
    beta = given["beta"]
    if function.startswith("fused_recurrent") and beta is not None and beta.shape == given["v"].shape:
        raise NotImplementedError(f"{function} has no step size per value channel (beta of v's shape): {_WIDTH_ONE}")
    if given.get("allow_neg_eigval") and not given["use_beta_sigmoid_in_kernel"]:
        raise ValueError(
            "allow_neg_eigval=True doubles sigmoid(beta) and needs use_beta_sigmoid_in_kernel=True: for a beta that "
            "went through its sigmoid before, pass 2 * beta"
        )
    if given.get("gv") is not None:
        raise NotImplementedError(f"{function} has no decay per value channel (gv): {_WIDTH_ONE}")
    if given.get("return_intermediate_states"):
        raise NotImplementedError(
            f"{function} returns no state of every chunk: call it on one piece after another with "
            "output_final_state=True, each from the state of the piece before"
        )
    if given.get("use_graph"):
        raise NotImplementedError(
            f"{function} needs no use_graph: capture the call without it. cu_seqlens must then end at the number of "
            "tokens, so give the padding at the end a sequence of its own"
        )
    if given.get("safe_gate") and given["use_gate_in_kernel"] and given["lower_bound"] is None:
        raise ValueError("safe_gate=True with use_gate_in_kernel=True needs lower_bound, the least log-decay")


def _log_decay(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None = None) -> Tensor:
    """The log-decay of a gate, float32 (float64 stays); `A_log` and `dt_bias` may have any shape of that size."""
    if A_log is None:
        if lower_bound is None:
            raise ValueError("use_gate_in_kernel=True needs A_log, the logarithm of the decay rate of each value head")
        A_log = g.new_zeros(g.shape[2], dtype=torch.float32)
    if dt_bias is None:
        dt_bias = g.new_zeros(g.shape[2:].numel(), dtype=torch.float32)
    A_log, dt_bias = A_log.flatten(), dt_bias.flatten()
    if lower_bound is not None:
        return bounded_decay(g, A_log, dt_bias, lower_bound)
    return fused.softplus_log_decay(g, A_log, dt_bias)


def _require_gate(function: str, name: str, gate: Any, v: Tensor, *, per_channel: bool) -> None:
    """Raise ValueError unless a gate has one value per value head, or per key channel of it."""
    if not isinstance(gate, Tensor):
        raise TypeError(f"{name} of {function} must be a tensor, got {type(gate).__name__}")
    if gate.shape[:3] != v.shape[:3] or gate.ndim != 3 + per_channel:
        expected = ", ".join(map(str, v.shape[:3])) + per_channel * ", K"
        hint = f"; {_OTHER_DECAY[function]}" if name == "g" else ""
        raise ValueError(f"{name} of {function} must have shape [{expected}], got {tuple(gate.shape)}{hint}")


_OTHER_DECAY = {
    "chunk_gated_delta_rule": "chunk_kda takes a decay per key channel",
    "fused_recurrent_gated_delta_rule": "gk is the decay per key channel",
    "chunk_kda": "chunk_gated_delta_rule takes a decay per head",
    "fused_recurrent_kda": "fused_recurrent_gated_delta_rule takes a decay per head",
}


def _take_state_layout(function: str, state_v_first: bool, options: dict[str, Any]) -> bool:
    """The value of `state_v_first`, given by its name or its old name; other further arguments are refused."""
    options = {name: value for name, value in options.items() if name not in _HINTS}
    if options.pop("head_first", False):
        raise ValueError(
            f"{function} takes [B, T, H, ...], and flash-linear-attention 0.6 has removed head_first: pass "
            "x.transpose(1, 2) of every input and output in place of head_first=True"
        )
    old_name = options.pop("transpose_state_layout", None)
    if old_name is not None:
        if state_v_first:
            raise ValueError("transpose_state_layout is the old name of state_v_first: pass state_v_first alone")
        warnings.warn("transpose_state_layout is the old name of state_v_first", DeprecationWarning, stacklevel=4)
        state_v_first = old_name
    if options:
        known = ("head_first", "transpose_state_layout", *_HINTS)
        raise TypeError(unknown(f"argument of {function}", next(iter(options)), known))
    return state_v_first
