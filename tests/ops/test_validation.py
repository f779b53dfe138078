"""Bad arguments: each is refused with a ValueError that says what was passed and what was expected."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from delta_rule_cases import DeltaRuleCase

from deltazoo.ops import (
    ContextParallel,
    api,
    backends,
    check_values,
    delta_rule,
    delta_rule_step,
    linear_attention,
    linear_attention_step,
    resolve_backend,
    validation,
)

B, T, H, HV, K, V = 2, 6, 2, 4, 8, 5
CASE = DeltaRuleCase("valid", B=B, T=T, H=H, groups=2, K=K, V=V, decay="scalar", initial_state=True)
PACKED = DeltaRuleCase("valid_packed", lengths=(2, 0, 4), H=H, groups=2, K=K, V=V, decay="scalar", initial_state=True)


def arguments(case: DeltaRuleCase = CASE, **changes: Any) -> dict[str, Any]:
    return case.make(dtype=torch.float32).arguments() | changes


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def refuses(function: Callable[..., Any], *expected: str, **arguments_: Any) -> None:
    """``function`` raises a ValueError that contains every one of ``expected``."""
    with pytest.raises(ValueError, match=re.escape(expected[0])) as error:
        function(**arguments_)
    assert all(text in str(error.value) for text in expected), str(error.value)


@pytest.mark.parametrize("backend", ["reference", "chunkwise", None])
@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("q", zeros(B, T, H), ("q must have 4 dimensions", "(2, 6, 2)")),
        ("k", zeros(T, H, K), ("k must have 4 dimensions", "(6, 2, 8)")),
        ("v", zeros(B, T, HV * V), ("v must have 4 dimensions", "(2, 6, 20)")),
        ("q", zeros(B, T, H, K + 1), ("q and k must have the same shape", "(2, 6, 2, 9)", "(2, 6, 2, 8)")),
        ("q", zeros(B, T, HV, K), ("q and k must have the same shape", "(2, 6, 4, 8)", "(2, 6, 2, 8)")),
        ("k", zeros(B, H, T, K), ("q and k must have the same shape", "(2, 2, 6, 8)", "(2, 6, 2, 8)")),
        ("v", zeros(B, T + 1, HV, V), ("v must have shape (2, 6, HV, V)", "(2, 7, 4, 5)")),
        ("v", zeros(B + 1, T, HV, V), ("v must have shape (2, 6, HV, V)", "(3, 6, 4, 5)")),
        ("v", zeros(B, T, 3, V), ("multiple of the key heads", "3", "2")),
        ("v", zeros(B, T, 1, V), ("multiple of the key heads", "1", "2")),
        ("v", zeros(B, T, HV, 0), ("head dimensions must be positive", "V=0")),
        ("beta", zeros(B, T), ("beta must have shape (2, 6, 4)", "(2, 6)")),
        ("beta", zeros(B, T, H), ("beta must have shape (2, 6, 4)", "(2, 6, 2)")),
        ("beta", zeros(B, T, HV, 1), ("beta must have shape (2, 6, 4)", "(2, 6, 4, 1)")),
        ("log_decay", zeros(B, T), ("log_decay must have shape (2, 6, 4) or (2, 6, 4, 8)", "(2, 6)")),
        ("log_decay", zeros(B, T, HV, V), ("log_decay must have shape (2, 6, 4) or (2, 6, 4, 8)", "(2, 6, 4, 5)")),
        ("log_decay", zeros(B, T, H, K), ("log_decay must have shape (2, 6, 4) or (2, 6, 4, 8)", "(2, 6, 2, 8)")),
        ("initial_state", zeros(B, HV, V, K), ("initial_state must have shape (2, 4, 8, 5)", "(2, 4, 5, 8)")),
        ("initial_state", zeros(1, HV, K, V), ("initial_state must have shape (2, 4, 8, 5)", "(1, 4, 8, 5)")),
        ("initial_state", zeros(B, H, K, V), ("initial_state must have shape (2, 4, 8, 5)", "(2, 2, 8, 5)")),
        ("initial_state", zeros(HV, K, V), ("initial_state must have shape (2, 4, 8, 5)", "(4, 8, 5)")),
    ],
    ids=lambda x: x if isinstance(x, str) else "x".join(map(str, getattr(x, "shape", ()))),
)
def test_wrong_shapes(name: str, value: torch.Tensor, expected: tuple[str, ...], backend: str | None) -> None:
    refuses(delta_rule, *expected, **arguments(**{name: value}), backend=backend)


@pytest.mark.parametrize("function", [delta_rule, delta_rule_step, linear_attention, linear_attention_step])
def test_keys_without_channels(function: Callable[..., Any]) -> None:
    """The default of scale once divided by their number."""
    inputs: dict[str, Any] = {"q": zeros(B, 1, H, 0), "k": zeros(B, 1, H, 0), "v": zeros(B, 1, HV, V)}
    if function in (delta_rule, delta_rule_step):
        inputs["beta"] = zeros(B, 1, HV)
    if function in (delta_rule_step, linear_attention_step):
        inputs["state"] = zeros(B, HV, 0, V)
    refuses(function, "head dimensions must be positive, got K=0 and V=5", **inputs)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("q", zeros(B, T, H, K, dtype=torch.int64), ("q must be float32", "torch.int64")),
        ("k", zeros(B, T, H, K, dtype=torch.complex64), ("k must be float32", "torch.complex64")),
        ("v", zeros(B, T, HV, V, dtype=torch.bool), ("v must be float32", "torch.bool")),
        ("v", zeros(B, T, HV, V, dtype=torch.float8_e4m3fn), ("v must be float32", "torch.float8_e4m3fn")),
        ("v", zeros(B, T, HV, V, dtype=torch.bfloat16), ("must share a dtype", "torch.float32", "torch.bfloat16")),
        ("q", zeros(B, T, H, K, dtype=torch.float64), ("must share a dtype", "torch.float64", "torch.float32")),
        ("beta", zeros(B, T, HV, dtype=torch.int32), ("beta must be a floating-point tensor", "torch.int32")),
        ("log_decay", zeros(B, T, HV, dtype=torch.int64), ("log_decay must be a floating-point tensor", "torch.int64")),
        (
            "initial_state",
            zeros(B, HV, K, V, dtype=torch.int8),
            ("initial_state must be", "torch.int8"),
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else str(getattr(x, "dtype", "")),
)
def test_wrong_dtypes(name: str, value: torch.Tensor, expected: tuple[str, ...]) -> None:
    refuses(delta_rule, *expected, **arguments(**{name: value}))


@pytest.mark.parametrize("backend", ["reference", "chunkwise", None])
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"erase_key": zeros(B, T, HV, K)}, ("erase_key must have the shape and dtype of k", "(2, 6, 4, 8)")),
        ({"erase_key": zeros(B, T, H, K).double()}, ("erase_key must have the shape and dtype of k", "torch.float64")),
        ({"erase_reads": "undecay"}, ("unknown erase_reads 'undecay'; did you mean 'undecayed'?",)),
        ({"erase_reads": None}, ("unknown erase_reads None",)),
        ({"num_micro_steps": 0}, ("num_micro_steps must be a whole number of at least 1, got 0",)),
        ({"num_micro_steps": 1.0}, ("num_micro_steps must be a whole number of at least 1, got 1.0",)),
        ({"num_micro_steps": True}, ("num_micro_steps must be a whole number of at least 1, got True",)),
        ({"num_micro_steps": 2}, ("k must have shape (2, 12, 2, 8)", "num_micro_steps=2", "(2, 6, 2, 8)")),
        (
            {"num_micro_steps": 2, "k": zeros(B, 2 * T, H, K)},
            ("v must have shape (2, 12, HV, V)", "(2, 6, 4, 5)"),
        ),
        (
            {"num_micro_steps": 2, "k": zeros(B, 2 * T, H, K), "v": zeros(B, 2 * T, HV, V)},
            ("beta must have shape (2, 12, 4)", "(2, 6, 4)"),
        ),
        (
            {"num_micro_steps": 2}
            | {"k": zeros(B, 2 * T, H, K), "v": zeros(B, 2 * T, HV, V), "beta": zeros(B, 2 * T, HV)}
            | {"log_decay": zeros(B, 2 * T, HV)},
            ("log_decay must have shape (2, 6, 4) or (2, 6, 4, 8)", "(2, 12, 4)"),
        ),
    ],
    ids=str,
)
def test_wrong_erase_keys_and_micro_steps(
    changes: dict[str, Any], expected: tuple[str, ...], backend: str | None
) -> None:
    refuses(delta_rule, *expected, **arguments(**changes), backend=backend)


def test_a_step_checks_erase_keys_and_micro_steps() -> None:
    inputs = DeltaRuleCase("token", T=1, num_micro_steps=2, erase="free", initial_state=True).make().arguments()
    state, _ = inputs.pop("initial_state"), inputs.pop("cu_seqlens")
    refuses(delta_rule_step, "unknown erase_reads 'never'", **inputs | {"erase_reads": "never"}, state=state)
    refuses(delta_rule_step, "k must have shape", **inputs | {"num_micro_steps": 3}, state=state)
    refuses(delta_rule_step, "erase_key must have", **inputs | {"erase_key": inputs["erase_key"][:, :1]}, state=state)


def test_linear_attention_has_no_erase_key() -> None:
    inputs = arguments()
    del inputs["beta"]
    for name, value in (("erase_key", inputs["k"]), ("erase_reads", "decayed"), ("num_micro_steps", 1)):
        with pytest.raises(TypeError, match=name):
            linear_attention(**inputs, **{name: value})


@pytest.mark.parametrize("name", ["q", "k", "v", "beta", "log_decay", "initial_state"])
def test_tensors_on_different_devices(name: str) -> None:
    moved = arguments()[name].to("meta")
    refuses(delta_rule, "all tensors must be on one device", f"{name} on meta", "on cpu", **arguments(**{name: moved}))


def test_cu_seqlens_on_another_device() -> None:
    inputs = arguments(PACKED)
    inputs["cu_seqlens"] = inputs["cu_seqlens"].to("meta")
    refuses(delta_rule, "all tensors must be on one device", "cu_seqlens on meta", **inputs)


@pytest.mark.parametrize("backend", ["reference", "chunkwise", None])
@pytest.mark.parametrize("kind", ["scalar", "channel"])
def test_positive_log_decay(kind: str, backend: str | None) -> None:
    log_decay = -torch.rand(B, T, HV, K) if kind == "channel" else -torch.rand(B, T, HV)
    log_decay[1, 3, 2] = 0.25
    refuses(delta_rule, "log_decay must be <= 0", "0.25", **arguments(log_decay=log_decay), backend=backend)


@pytest.mark.parametrize("backend", ["reference", "chunkwise"])
def test_nan_hides_no_positive_log_decay(backend: str) -> None:
    inputs = arguments()
    inputs["log_decay"][0, :2, 0] = torch.tensor([torch.nan, 5.0])
    refuses(delta_rule, "log_decay must be <= 0", "got a value of 5", **inputs, backend=backend)
    inputs["log_decay"][0, 1, 0] = -5.0  # NaN alone goes through, so that a diverged model can be looked at
    assert delta_rule(**inputs, backend=backend).output.isnan().any()


def test_zero_and_minus_infinity_are_log_decays() -> None:
    log_decay = zeros(B, T, HV)
    log_decay[:, 2] = -torch.inf
    assert delta_rule(**arguments(log_decay=log_decay)).output.isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "chunkwise", None])
@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ([1, 3, 6], ("cu_seqlens must start at 0", "got 1")),
        ([-1, 3, 6], ("cu_seqlens must start at 0", "got -1")),
        ([0, 3, 5], ("cu_seqlens must end at the number of tokens, 6", "got 5")),
        ([0, 3, 7], ("cu_seqlens must end at the number of tokens, 6", "got 7")),
        ([0, 4, 2, 6], ("cu_seqlens must not descend", "4", "2")),
        ([0, 7, 6], ("cu_seqlens must not descend", "7", "6")),
    ],
    ids=str,
)
def test_cu_seqlens_that_do_not_cover_the_tokens(
    bounds: list[int], expected: tuple[str, ...], backend: str | None
) -> None:
    changes = {"cu_seqlens": torch.tensor(bounds), "initial_state": None}
    refuses(delta_rule, *expected, **arguments(PACKED, **changes), backend=backend)


@pytest.mark.parametrize(
    ("cu_seqlens", "expected"),
    [
        (torch.tensor([0.0, 6.0]), ("cu_seqlens must be int32 or int64", "torch.float32")),
        (torch.tensor([[0, 6]]), ("cu_seqlens must have shape [N + 1]", "(1, 2)")),
        (torch.tensor(6), ("cu_seqlens must have shape [N + 1]", "()")),
        (torch.tensor([0]), ("cu_seqlens must have shape [N + 1]", "(1,)")),
        (torch.tensor([0, 6, 6]), ("initial_state must have shape (2, 4, 8, 5)", "(3, 4, 8, 5)")),
    ],
    ids=str,
)
def test_cu_seqlens_of_the_wrong_kind(cu_seqlens: torch.Tensor, expected: tuple[str, ...]) -> None:
    refuses(delta_rule, *expected, **arguments(PACKED, cu_seqlens=cu_seqlens))


def test_packing_needs_batch_size_one() -> None:
    inputs = arguments(initial_state=None, cu_seqlens=torch.tensor([0, 6]))
    refuses(delta_rule, "packed sequences (cu_seqlens) need batch size 1", "got 2", **inputs)


@pytest.mark.parametrize(
    ("function", "needed"),
    [(delta_rule, ()), (linear_attention, ()), (delta_rule_step, ("state",)), (linear_attention_step, ("state",))],
    ids=lambda x: getattr(x, "__name__", ""),
)
@pytest.mark.parametrize(
    ("name", "hint"), [("chunk", "chunkwise"), ("Triton", "triton"), ("refrence", "reference"), ("cuda", None)]
)
def test_unknown_backend_names_the_nearest_match(
    name: str, hint: str | None, function: Callable[..., Any], needed: tuple[str, ...]
) -> None:
    inputs = DeltaRuleCase("token", T=1, initial_state=True).make(dtype=torch.float32).arguments()
    state = inputs.pop("initial_state")
    if "linear" in function.__name__:
        del inputs["beta"]
    if needed:
        del inputs["cu_seqlens"]
        inputs["state"] = state
    known = [] if hint is None else [f"did you mean {hint!r}"]
    refuses(function, f"unknown backend {name!r}", *known, "triton", "chunkwise", "reference", **inputs, backend=name)


def test_a_named_backend_that_cannot_run_raises_and_names_another() -> None:
    with pytest.raises(NotImplementedError, match="triton.*chunkwise"):
        delta_rule(**arguments(), backend="triton")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("state", zeros(1, HV, K, V), ("state must have shape (2, 4, 8, 5)", "(1, 4, 8, 5)")),
        ("state", zeros(B, HV, K, V, dtype=torch.int32), ("state must be a floating-point tensor", "torch.int32")),
        ("beta", zeros(B, HV), ("beta must have shape (2, 1, 4)", "(2, 4)")),
        ("log_decay", zeros(B, HV), ("log_decay must have shape (2, 1, 4) or (2, 1, 4, 8)", "(2, 4)")),
        ("q", zeros(B, H, K), ("q must have 4 dimensions", "(2, 2, 8)")),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_wrong_arguments_of_a_step(name: str, value: torch.Tensor, expected: tuple[str, ...]) -> None:
    inputs = arguments(DeltaRuleCase("token", B=B, T=1, H=H, groups=2, K=K, V=V, decay="scalar", initial_state=True))
    state = inputs.pop("initial_state")
    del inputs["cu_seqlens"]
    refuses(delta_rule_step, *expected, **inputs | {"state": state} | {name: value})


@pytest.mark.parametrize("value", [None, [1], zeros(1, HV, K, V)], ids=["None", "list", "shape"])
def test_the_state_of_a_step_is_named_as_it_is_passed(value: Any) -> None:
    inputs = arguments(DeltaRuleCase("token", B=B, T=1, H=H, groups=2, K=K, V=V))
    del inputs["initial_state"], inputs["cu_seqlens"]
    with pytest.raises((TypeError, ValueError), match="^state must"):
        delta_rule_step(**inputs, state=value)


def test_a_step_takes_one_token_and_no_positive_decay() -> None:
    inputs = arguments()
    state = inputs.pop("initial_state")
    del inputs["cu_seqlens"]
    refuses(delta_rule_step, "a step takes one token (T = 1), got T = 6", "delta_rule", **inputs, state=state)
    token = {name: tensor[:, :1] for name, tensor in inputs.items()}
    token["log_decay"] = token["log_decay"] + 3
    refuses(delta_rule_step, "log_decay must be <= 0", **token, state=state)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"log_decay": zeros(B, T, H)}, ("log_decay must have shape (2, 6, 4) or (2, 6, 4, 8)", "(2, 6, 2)")),
        ({"log_decay": zeros(B, T, HV) + 1}, ("log_decay must be <= 0", "1")),
        ({"k": zeros(B, T, H, K + 1)}, ("q and k must have the same shape",)),
        ({"initial_state": zeros(B, HV, V, K)}, ("initial_state must have shape (2, 4, 8, 5)",)),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_linear_attention_checks_the_same(changes: dict[str, torch.Tensor], expected: tuple[str, ...]) -> None:
    inputs = arguments(**changes)
    del inputs["beta"]
    refuses(linear_attention, *expected, **inputs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({name: 0.5}, f"{name} must be a tensor, got float")
            for name in ("q", "k", "v", "beta", "log_decay", "initial_state", "erase_key")
        ),
        *(({name: None}, f"{name} must be a tensor, got None") for name in "qkv"),
        ({"cu_seqlens": [0, 2, 2, 6]}, "cu_seqlens must be a tensor, got list; torch.tensor"),
        ({"scale": torch.tensor(1.0, requires_grad=True)}, "scale must be a number, got a tensor"),  # no gradient
        ({"context": "cp"}, "context must be a ContextParallel, got str"),
        ({"cu_seqlen": torch.tensor([0, 6])}, "cu_seqlen"),
    ],
    ids=str,
)
def test_arguments_of_another_type_are_refused(changes: dict[str, Any], message: str) -> None:
    inputs = arguments(PACKED, **changes)
    with pytest.raises(TypeError, match=message):
        delta_rule(**inputs)
    if not {"beta", "erase_key"} & changes.keys():
        del inputs["beta"]
        with pytest.raises(TypeError, match=message):
            linear_attention(**inputs)


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_scale_that_is_not_finite_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match=f"scale must be finite, got {scale}"):
        delta_rule(**arguments(), scale=scale)


@pytest.mark.parametrize(
    "context", [None, ContextParallel(), ContextParallel(lengths=(T,))], ids=["none", "one", "lengths"]
)
def test_arguments_are_checked_once(context: ContextParallel | None, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(api, "check_shapes", lambda *given: checked.append(given))
    delta_rule(**arguments(), context=context)
    assert len(checked) == 1


def test_no_step_size_is_refused() -> None:
    """It once computed linear attention."""
    x, state = torch.randn(1, 1, 2, 4), zeros(1, 2, 4, 4)
    for call in (lambda: delta_rule(x, x, x, None), lambda: delta_rule_step(x, x, x, None, state=state)):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="beta must be a tensor, got None; .* call linear_attention"):
            call()


def test_heads_before_tokens_are_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """[B, H, T, K] is taken for [B, T, H, K] if the sizes fit."""
    monkeypatch.setattr(validation, "_warned_of_heads_first", False)
    x, beta = torch.randn(1, 2, 130, 4), torch.rand(1, 2, 130)

    @torch.compile(fullgraph=True, backend="eager")
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return delta_rule(x, x, x, beta).output

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(x)
        linear_attention(x[:, :, :128], x[:, :, :128], x[:, :, :128])
        delta_rule_step(x[:, :1], x[:, :1], x[:, :1], beta[:, :1], state=zeros(1, 130, 4, 4))
    message = r"\(1, 2, 130, 4\) is taken as \[B, T, H, K\].*pass q.transpose\(1, 2\)"
    with pytest.warns(UserWarning, match=message) as caught:
        delta_rule(x, x, x, beta)
        delta_rule(x, x, x, beta)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.gpu
def test_values_on_a_gpu_are_checked_when_asked_for() -> None:
    inputs = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in arguments().items()}
    inputs["log_decay"] = inputs["log_decay"] + 5
    delta_rule(**inputs)
    with check_values():
        refuses(delta_rule, "log_decay must be <= 0", **inputs)
    delta_rule(**inputs)


def test_resolve_backend_says_which_and_why() -> None:
    call = {"device": "cpu", "dtype": torch.float32, "head_k_dim": 64, "head_v_dim": 64}
    for name in ("reference", "chunkwise"):
        chosen, reason = resolve_backend(name, **call)
        assert chosen == name and reason
    chosen, reason = resolve_backend(None, **call)
    assert chosen == "chunkwise" and "triton" in reason
    with pytest.raises(NotImplementedError, match="triton"):
        resolve_backend("triton", **call)
    with pytest.raises(ValueError, match="unknown backend 'tritn'.*did you mean 'triton'"):
        resolve_backend("tritn", **call)


def test_an_undecayed_read_with_a_decay_per_channel_is_no_call_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_obstacle", lambda *_: None)
    call = dict(device="cpu", dtype=torch.float32, head_k_dim=64, head_v_dim=64)
    assert resolve_backend(None, **call)[0] == "triton"
    why = "its kernels have no undecayed read with a decay per key channel"
    assert resolve_backend(None, **call, undecayed_channels=True) == ("chunkwise", f"no triton: {why}")
    case = replace(CASE, decay="channel", erase_reads="undecayed")
    with pytest.raises(NotImplementedError, match=f"{why}; use backend='chunkwise'"):
        delta_rule(**arguments(case), backend="triton")
    expected = delta_rule(**arguments(case), backend="chunkwise")
    assert all(torch.equal(x, y) for x, y in zip(expected, delta_rule(**arguments(case)), strict=True))
