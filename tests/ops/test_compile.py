"""The operators in torch's tools: opcheck, torch.compile in one graph, fake and meta tensors, autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from delta_rule_cases import DeltaRuleCase
from helpers import results_and_gradients
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from deltazoo.ops import DeltaRuleOutput, delta_rule, delta_rule_step, linear_attention

CASES = [
    DeltaRuleCase("plain", T=70, K=8, V=12),
    DeltaRuleCase("scalar_state", T=70, groups=2, K=8, V=12, decay="scalar", initial_state=True),
    DeltaRuleCase("channel_packed", lengths=(30, 0, 40), K=8, V=12, decay="channel", initial_state=True),
    DeltaRuleCase("erase_scalar", T=70, groups=2, K=8, V=12, decay="scalar", erase="gated"),
    DeltaRuleCase(
        "erase_undecayed_micro_steps",
        lengths=(30, 0, 5),
        K=8,
        V=12,
        decay="channel",
        erase="gated",
        erase_reads="undecayed",
        num_micro_steps=2,
        initial_state=True,
    ),
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, torch.float32) for case in CASES), (CASES[-1], torch.bfloat16)], ids=str
)
def test_registered_operators_pass_opcheck(case: DeltaRuleCase, dtype: torch.dtype) -> None:
    """Schema, fake implementation, autograd registration and AOT dispatch, static and dynamic."""
    inputs = case.make(dtype=dtype)
    leaves = {name: tensor.requires_grad_() for name, tensor in inputs.leaves().items()}
    arguments = inputs.arguments() | leaves
    ordered = [arguments[name] for name in ("q", "k", "v", "beta", "log_decay")]
    update = (None, arguments.get("erase_key"), inputs.erase_reads == "undecayed", inputs.num_micro_steps)
    rest = (0.25, arguments["initial_state"], arguments["cu_seqlens"], *update)
    torch.library.opcheck(torch.ops.deltazoo.chunkwise.default, (*ordered, *rest))
    gradients = (inputs.d_output, inputs.d_final_state)
    call = [x.detach() if isinstance(x, Tensor) else x for x in (*ordered, *rest)]
    _, _, *kept = torch.ops.deltazoo.chunkwise.default(*call)
    torch.library.opcheck(torch.ops.deltazoo.chunkwise_backward.default, (*call, *kept, *gradients))


def test_operator_of_linear_attention_passes_opcheck() -> None:
    inputs = CASES[1].make(dtype=torch.float32)
    leaves = {name: tensor.requires_grad_() for name, tensor in inputs.leaves().items()}
    q, k, v, g = (leaves[name] for name in ("q", "k", "v", "log_decay"))
    arguments = (q, k, v, None, g, 0.25, leaves["initial_state"], None, None, None, False, 1)
    torch.library.opcheck(torch.ops.deltazoo.chunkwise.default, arguments)


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="aot_eager", fullgraph=True, **options)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiles_in_one_graph_with_the_same_results_and_gradients(case: DeltaRuleCase) -> None:
    inputs = case.make(dtype=torch.float32)

    def layer(**arguments: Any) -> DeltaRuleOutput:
        """The operator with operations before and after it, as in a layer."""
        arguments["q"], arguments["k"] = torch.nn.functional.silu(arguments["q"]), arguments["k"] * 0.5
        output, state = delta_rule(**arguments)
        return DeltaRuleOutput(output.tanh(), state)

    expected = results_and_gradients(layer, inputs)
    actual = results_and_gradients(compiled(layer), inputs)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name])


def test_lengths_vary_without_a_graph_for_each() -> None:
    """Five lengths need two compilations: the first, and one with a symbolic length."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    function = torch.compile(lambda *tensors: delta_rule(*tensors).output, backend=counter, fullgraph=True)
    for T in (70, 71, 64, 130, 200):
        inputs = DeltaRuleCase("length", T=T, K=8, V=12, decay="scalar").make(dtype=torch.float32)
        tensors = [inputs.arguments()[name] for name in ("q", "k", "v", "beta", "log_decay")]
        torch.testing.assert_close(function(*tensors), delta_rule(*tensors).output)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("update", [{}, dict(erase="gated", erase_reads="undecayed", num_micro_steps=2)], ids=str)
def test_a_decode_step_compiles_in_one_graph(update: dict[str, Any]) -> None:
    case = DeltaRuleCase("token", T=1, groups=2, decay="channel", initial_state=True, **update)
    inputs = case.make(dtype=torch.float32)
    arguments = inputs.arguments()
    state, _ = arguments.pop("initial_state"), arguments.pop("cu_seqlens")
    step = compiled(lambda **tensors: delta_rule_step(**tensors))
    torch.testing.assert_close(step(**arguments, state=state), delta_rule_step(**arguments, state=state))


def test_linear_attention_compiles_in_one_graph() -> None:
    arguments = CASES[1].make(dtype=torch.float32).arguments()
    del arguments["beta"]
    function = compiled(lambda **tensors: linear_attention(**tensors))
    torch.testing.assert_close(function(**arguments), linear_attention(**arguments))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_fake_tensors_know_the_shapes_dtypes_and_layouts(case: DeltaRuleCase, dtype: torch.dtype) -> None:
    inputs = case.make(dtype=dtype)
    real = results_and_gradients(delta_rule, inputs)

    def faked(**arguments: Any) -> DeltaRuleOutput:
        return delta_rule(**arguments, backend="chunkwise")

    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fields = {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in vars(inputs).items()}
        fake = results_and_gradients(faked, type(inputs)(**fields))
    for name, tensor in real.items():
        assert (fake[name].shape, fake[name].dtype) == (tensor.shape, tensor.dtype), name
        assert fake[name].stride() == tensor.stride(), name


def test_meta_tensors_pass_through() -> None:
    arguments = {n: x.to("meta") for n, x in CASES[1].make(dtype=torch.bfloat16).leaves().items()}
    output, state = delta_rule(**arguments)
    assert output.device.type == state.device.type == "meta"
    assert output.shape == (2, 70, 4, 12) and state.shape == (2, 4, 8, 12)


def test_autocast_casts_q_k_v_as_for_a_matrix_product_and_keeps_gates_and_state_in_float32() -> None:
    inputs = CASES[3].make(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = results_and_gradients(delta_rule, inputs)
    rounded = inputs.arguments() | {n: getattr(inputs, n).bfloat16() for n in ("q", "k", "v", "erase_key")}
    expected = delta_rule(**rounded)
    assert actual["output"].dtype == torch.bfloat16 and actual["final_state"].dtype == torch.float32
    assert torch.equal(actual["output"], expected.output) and torch.equal(actual["final_state"], expected.final_state)
    assert all(actual[f"d_{name}"].dtype == torch.float32 for name in inputs.leaves())


def test_autocast_leaves_float64_alone() -> None:
    arguments = CASES[1].make(dtype=torch.float64).arguments()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = delta_rule(**arguments)
    outside = delta_rule(**arguments)
    assert torch.equal(inside.output, outside.output) and torch.equal(inside.final_state, outside.final_state)


def test_autocast_of_a_step_is_that_of_the_sequence() -> None:
    inputs = DeltaRuleCase("token", T=1, decay="scalar", initial_state=True).make(dtype=torch.float32)
    arguments = inputs.arguments()
    state, _ = arguments.pop("initial_state"), arguments.pop("cu_seqlens")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step = delta_rule_step(**arguments, state=state)
        sequence = delta_rule(**arguments, initial_state=state)
    assert step.output.dtype == sequence.output.dtype == torch.bfloat16
    assert step.final_state.dtype == sequence.final_state.dtype == torch.float32
    torch.testing.assert_close(step, sequence, rtol=1e-2, atol=1e-2)


def test_no_graph_is_kept_without_gradients() -> None:
    arguments = CASES[1].make(dtype=torch.float32).arguments()
    arguments["q"].requires_grad_()
    with torch.no_grad():
        assert not any(x.requires_grad for x in delta_rule(**arguments))
    with torch.inference_mode():
        assert not any(x.requires_grad for x in delta_rule(**arguments))
    assert delta_rule(**arguments).output.requires_grad
