"""The rules' functions against loops over tokens: every option, packed sequences, states in both layouts, gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fla_definitions
import pytest
import torch
from pairwise import pairwise
from torch import Tensor

from deltazoo.compat import fla

B, T, H, HV, K, V = 2, 9, 2, 4, 5, 3
BOUNDS = torch.tensor([0, 4, 4, 5, T])
CHUNK = {"delta": fla.chunk_delta_rule, "gdn": fla.chunk_gated_delta_rule, "kda": fla.chunk_kda}
RECURRENT = {
    "delta": fla.fused_recurrent_delta_rule,
    "gdn": fla.fused_recurrent_gated_delta_rule,
    "kda": fla.fused_recurrent_kda,
}


def inputs(rule: str, *, batch: int = B, tokens: int = T, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """q, k, v, beta and, but for DeltaNet, g in the range of a log-decay."""
    torch.manual_seed(0)
    value_heads = H if rule == "delta" else HV
    made = {
        "q": torch.randn(batch, tokens, H, K),
        "k": 0.4 * torch.randn(batch, tokens, H, K),
        "v": torch.randn(batch, tokens, value_heads, V),
        "beta": torch.rand(batch, tokens, value_heads),
    }
    if rule == "gdn":
        made["g"] = -torch.rand(batch, tokens, HV)
    if rule == "kda":
        made["g"] = -torch.rand(batch, tokens, HV, K)
    return {name: x.to(dtype).requires_grad_() for name, x in made.items()}


def gate_parameters(rule: str) -> dict[str, Tensor]:
    torch.manual_seed(1)
    size = HV if rule == "gdn" else HV * K
    made = {"A_log": torch.rand(HV), "dt_bias": torch.randn(size)}
    return {name: x.double().requires_grad_() for name, x in made.items()}


def assert_same(
    function: Callable[..., Any], tensors: dict[str, Tensor], options: dict[str, Any], meaning: dict[str, Any]
) -> None:
    """Outputs, states and all gradients, that of the final state's use included; ``meaning`` for the definition."""
    actual = function(**tensors, **options, output_final_state=True)
    expected = fla_definitions.rule(**tensors, **meaning)
    seeds = [torch.randn_like(x) for x in expected]
    results = []
    for output in (actual, expected):
        loss = sum((x * seed).sum() for x, seed in zip(output, seeds, strict=True))
        results.append([*output, *torch.autograd.grad(loss, list(tensors.values()))])
    for name, mine, theirs in zip(["o", "state", *tensors], *results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("functions", [CHUNK, RECURRENT], ids=["chunk", "fused_recurrent"])
@pytest.mark.parametrize("rule", CHUNK)
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_outputs_states_and_gradients(functions: dict[str, Any], rule: str, packed: bool) -> None:
    tensors = inputs(rule, batch=1 if packed else B)
    sequences = len(BOUNDS) - 1 if packed else B
    tensors["initial_state"] = torch.randn(sequences, tensors["v"].shape[2], K, V, dtype=torch.float64)
    tensors["initial_state"].requires_grad_()
    options: dict[str, Any] = {"scale": 0.3, "use_qk_l2norm_in_kernel": True}
    options |= {"cu_seqlens": BOUNDS} if packed else {}
    assert_same(functions[rule], tensors, options, options)


@pytest.mark.parametrize(
    ("functions", "rule", "bias", "neg", "v_first"),
    pairwise([CHUNK, RECURRENT], ["gdn", "kda"], *[[True, False]] * 3),
)
def test_gates_in_the_kernel(functions: dict[str, Any], rule: str, bias: bool, neg: bool, v_first: bool) -> None:
    tensors = inputs(rule) | gate_parameters(rule)
    tensors["beta"] = torch.randn(B, T, HV, dtype=torch.float64, requires_grad=True)
    if not bias:
        del tensors["dt_bias"]
    shape = (B, HV, V, K) if v_first else (B, HV, K, V)
    tensors["initial_state"] = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    options = {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": neg, "state_v_first": v_first}
    assert_same(functions[rule], tensors, {**options, "use_gate_in_kernel": True}, {**options, "gate": "softplus"})


@pytest.mark.parametrize("function", [fla.chunk_kda, fla.fused_recurrent_kda])
@pytest.mark.parametrize("missing", [(), ("A_log",), ("dt_bias",), ("A_log", "dt_bias")], ids=str)
def test_bounded_gate(function: Callable[..., Any], missing: tuple[str, ...]) -> None:
    tensors = inputs("kda") | gate_parameters("kda")
    for name in missing:
        del tensors[name]
    assert_same(
        function,
        tensors,
        {"use_gate_in_kernel": True, "lower_bound": -5.0, "safe_gate": True},
        {"gate": "bounded", "lower_bound": -5.0},
    )


def test_gate_parameters_in_the_shapes_of_checkpoints() -> None:
    tensors, gates = inputs("kda"), gate_parameters("kda")
    flat = fla.chunk_kda(**tensors, use_gate_in_kernel=True, **gates)[0]
    shaped = {"A_log": gates["A_log"].view(1, 1, HV, 1), "dt_bias": gates["dt_bias"].view(HV, K)}
    assert torch.equal(fla.chunk_kda(**tensors, use_gate_in_kernel=True, **shaped)[0], flat)


def test_gate_parameters_are_not_read_without_the_gate() -> None:
    tensors = inputs("gdn")
    expected = fla.chunk_gated_delta_rule(**tensors)[0]
    assert torch.equal(fla.chunk_gated_delta_rule(**tensors, **gate_parameters("gdn"))[0], expected)


def test_decay_per_key_channel_beside_that_of_the_head() -> None:
    tensors = inputs("gdn")
    gk = -torch.rand(B, T, HV, K, dtype=torch.float64)
    both = fla.fused_recurrent_gated_delta_rule(**tensors, gk=gk)[0]
    one = {**tensors, "g": tensors["g"][..., None] + gk}
    torch.testing.assert_close(both, fla_definitions.rule(**one)[0])
    alone = fla.fused_recurrent_gated_delta_rule(**{**tensors, "g": None}, gk=gk)[0]
    torch.testing.assert_close(alone, fla_definitions.rule(**{**tensors, "g": gk})[0])


def test_no_beta_means_ones_and_no_g_no_decay() -> None:
    tensors = inputs("gdn")
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    expected = fla_definitions.rule(q, k, v, torch.ones(B, T, HV, dtype=torch.float64))[0]
    torch.testing.assert_close(fla.fused_recurrent_gated_delta_rule(q, k, v)[0], expected)
    torch.testing.assert_close(fla.fused_recurrent_delta_rule(q, k, v)[0], expected)


@pytest.mark.parametrize("rule", CHUNK)
def test_no_final_state_unless_asked(rule: str) -> None:
    assert CHUNK[rule](**inputs(rule))[1] is None


@pytest.mark.parametrize("rule", CHUNK)
def test_one_token_at_a_time_without_gradients(rule: str) -> None:
    tensors = {name: x.detach() for name, x in inputs(rule).items()}
    options = {} if rule == "delta" else {"state_v_first": True}
    whole, last = CHUNK[rule](**tensors, **options, output_final_state=True)
    state, outputs = None, []
    with torch.no_grad():
        for t in range(T):
            token = {name: x[:, t : t + 1] for name, x in tensors.items()}
            o, state = RECURRENT[rule](**token, **options, initial_state=state, output_final_state=True)
            outputs.append(o)
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(state, last, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("rule", CHUNK)
def test_half_precision_and_autocast_keep_the_dtype_of_q(rule: str) -> None:
    exact = inputs(rule, dtype=torch.float32)
    half = {name: x.detach().bfloat16() for name, x in exact.items()}
    o, state = CHUNK[rule](**half, use_qk_l2norm_in_kernel=True, output_final_state=True)
    expected = fla_definitions.rule(**{name: x.double() for name, x in half.items()}, use_qk_l2norm_in_kernel=True)
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    torch.testing.assert_close(o.double(), expected[0], rtol=0.02, atol=0.02)
    torch.testing.assert_close(state.double(), expected[1], rtol=0.02, atol=0.02)
    with torch.autocast("cpu", torch.bfloat16):
        assert CHUNK[rule](**exact)[0].dtype == torch.float32


@pytest.mark.parametrize("rule", CHUNK)
def test_hints_change_nothing(rule: str) -> None:
    tensors = inputs(rule, batch=1)
    hints: dict[str, Any] = {"cu_seqlens_cpu": BOUNDS.clone(), "chunk_size": 32, "head_first": False}
    hints |= {"chunk_indices": torch.zeros(4, 2)} if rule == "gdn" else {}
    hints |= {"disable_recompute": True, "safe_gate": True} if rule == "kda" else {}
    expected = CHUNK[rule](**tensors, cu_seqlens=BOUNDS)[0]
    assert torch.equal(CHUNK[rule](**tensors, cu_seqlens=BOUNDS, **hints)[0], expected)


def test_the_old_name_of_the_state_layout() -> None:
    tensors = inputs("kda")
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        _, state = fla.chunk_kda(**tensors, output_final_state=True, transpose_state_layout=True)
    assert torch.equal(state, fla.chunk_kda(**tensors, output_final_state=True, state_v_first=True)[1])
    with pytest.raises(ValueError, match="old name of state_v_first"):
        fla.chunk_kda(**tensors, state_v_first=True, transpose_state_layout=True)
    with pytest.warns(DeprecationWarning), pytest.raises(TypeError, match="states .N, H, K, V. alone"):
        fla.chunk_delta_rule(**inputs("delta"), transpose_state_layout=True)


def test_aliases() -> None:
    assert fla.chunk_gdn is fla.chunk_gated_delta_rule
    assert fla.fused_recurrent_gdn is fla.fused_recurrent_gated_delta_rule


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_l2norm(dtype: torch.dtype) -> None:
    x = torch.randn(3, 4, 6).to(dtype)
    wanted = fla_definitions.unit(x.double())
    torch.testing.assert_close(fla.l2norm(x).double(), wanted, rtol=8e-3, atol=1e-6)
    wide = fla.l2norm(x, output_dtype=torch.float64)
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide, wanted, rtol=1e-5, atol=1e-6)


def value_channels(x: Tensor) -> Tensor:
    return torch.rand_like(x)


REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("chunk_delta_rule", {"head_first": True}, ValueError, r"x.transpose\(1, 2\)"),
    ("chunk_gated_delta_rule", {"head_first": True}, ValueError, r"x.transpose\(1, 2\)"),
    ("chunk_delta_rule", {"chunk_sise": 64}, TypeError, "did you mean 'chunk_size'"),
    ("chunk_gated_delta_rule", {"cp_context": object()}, NotImplementedError, "cp_context=None"),
    ("chunk_kda", {"cp_context": object()}, NotImplementedError, "cp_context=None"),
    ("chunk_kda", {"use_graph": True}, NotImplementedError, "capture the call without it"),
    ("chunk_kda", {"return_intermediate_states": True}, NotImplementedError, "output_final_state=True"),
    ("chunk_kda", {"use_gate_in_kernel": True}, ValueError, "needs A_log"),
    ("chunk_kda", {"use_gate_in_kernel": True, "safe_gate": True}, ValueError, "needs lower_bound"),
    ("chunk_gated_delta_rule", {"use_gate_in_kernel": True}, ValueError, "needs A_log"),
    ("chunk_gated_delta_rule", {"allow_neg_eigval": True}, ValueError, r"pass 2 \* beta"),
    ("fused_recurrent_kda", {"allow_neg_eigval": True}, ValueError, r"pass 2 \* beta"),
    ("chunk_gated_delta_rule", {"cu_seqlens_cpu": BOUNDS}, ValueError, "pass cu_seqlens as well"),
    ("chunk_gated_delta_rule", {"cu_seqlens": BOUNDS}, ValueError, "batch size 1"),
    ("fused_recurrent_gated_delta_rule", {"gv": value_channels}, NotImplementedError, "a head of its own"),
    ("fused_recurrent_gated_delta_rule", {"beta": value_channels}, NotImplementedError, "a head of its own"),
    ("fused_recurrent_kda", {"beta": value_channels}, NotImplementedError, "a head of its own"),
    ("fused_recurrent_gated_delta_rule", {"g": None, "use_gate_in_kernel": True}, ValueError, "needs g"),
]


@pytest.mark.parametrize(
    ("name", "options", "error", "message"), REFUSED, ids=lambda x: x if isinstance(x, str) else ""
)
def test_refused(name: str, options: dict[str, Any], error: type[Exception], message: str) -> None:
    tensors: dict[str, Any] = inputs("kda" if "kda" in name else "gdn" if "gated" in name else "delta")
    options = {key: x(tensors["v"]) if x is value_channels else x for key, x in options.items()}
    with pytest.raises(error, match=message):
        getattr(fla, name)(**(tensors | options))


@pytest.mark.parametrize("functions", [CHUNK, RECURRENT], ids=["chunk", "fused_recurrent"])
@pytest.mark.parametrize("rule", CHUNK)
def test_keys_without_channels_are_refused(functions: dict[str, Any], rule: str) -> None:
    tensors = {name: x[..., :0] if name in ("q", "k") else x for name, x in inputs(rule).items()}
    if rule == "kda":
        tensors["g"] = tensors["g"][..., :0]
    with pytest.raises(ValueError, match="head dimensions must be positive, got K=0 and V=3"):
        functions[rule](**tensors)


def test_gates_of_the_wrong_shape_name_the_function_that_takes_them() -> None:
    gdn, kda = inputs("gdn"), inputs("kda")
    with pytest.raises(ValueError, match="chunk_kda takes a decay per key channel"):
        fla.chunk_gated_delta_rule(**kda)
    with pytest.raises(ValueError, match="gk is the decay per key channel"):
        fla.fused_recurrent_gated_delta_rule(**kda)
    with pytest.raises(ValueError, match="chunk_gated_delta_rule takes a decay per head"):
        fla.chunk_kda(**gdn)


@pytest.mark.parametrize("with_g", [True, False])
def test_a_decay_per_channel_has_channels(with_g: bool) -> None:
    """One per head would be taken for g, and added to a g of as many tokens as heads by broadcasting."""
    tensors = inputs("gdn", tokens=HV)
    g = tensors.pop("g")
    with pytest.raises(ValueError, match=r"gk of .* must have shape \[2, 4, 4, K\], got \(2, 4, 4\)"):
        fla.fused_recurrent_gated_delta_rule(**tensors, g=g if with_g else None, gk=-torch.rand(B, HV, HV))


def test_the_alternative_for_gates_of_value_channels_is_right() -> None:
    """What the message recommends, against a loop in which every value channel has a decay and a step size."""
    tensors = {name: x.detach() for name, x in inputs("gdn").items()}
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    beta, gv = torch.rand_like(v), -torch.rand_like(v)
    o, _ = fla.fused_recurrent_gated_delta_rule(q, k, v.flatten(2)[..., None], gv.flatten(2), beta=beta.flatten(2))
    S = torch.zeros(B, HV, K, V, dtype=v.dtype)
    expected = []
    for t in range(T):
        key, query = (x[:, t].repeat_interleave(HV // H, 1)[..., None] for x in (k, q))
        S = S * gv[:, t, :, None].exp()
        S = S + key * (beta[:, t] * (v[:, t] - (key * S).sum(2)))[:, :, None]
        expected.append(K**-0.5 * (query * S).sum(2))
    torch.testing.assert_close(o.view_as(v), torch.stack(expected, dim=1))


def test_the_functions_compile_without_a_break() -> None:
    tensors = inputs("kda", batch=1) | gate_parameters("kda")
    options = {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "state_v_first": True}

    def call(**tensors: Tensor) -> Any:
        return fla.chunk_kda(**tensors, **options, cu_seqlens=BOUNDS, output_final_state=True)

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    for actual, expected in zip(compiled(**tensors), call(**tensors), strict=True):
        torch.testing.assert_close(actual, expected)
    torch._dynamo.reset()
