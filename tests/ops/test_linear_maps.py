"""Linear maps of one input as one function: the same results and gradients, and who is called as a module."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from deltazoo import layers, list_rules
from deltazoo.layers import DeltaRuleAttention, LayerInput, SwiGLU, make_layer
from deltazoo.ops.linear_maps import linear_maps
from deltazoo.ops.recompute import recomputing


@pytest.fixture(autouse=True, params=[1 << 20, 0], ids=["few_rows", "many_rows"])
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for an input of few rows, and as for one of many, for which small maps are one product."""
    monkeypatch.setattr("deltazoo.ops.linear_maps._MANY_ROWS", request.param)


def three_maps(dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    return [nn.Linear(6, n, bias=False, dtype=dtype) for n in (5, 70, 1)]


def one_by_one(x: Tensor, maps: list[nn.Module]) -> list[Tensor]:
    return [linear(x) for linear in maps]


def gradients(results: list[Tensor], x: Tensor, maps: list[nn.Module], **options: bool) -> tuple[Tensor, ...]:
    loss = sum((y.square().sum() for y in results), torch.zeros(()))
    weights = [p for linear in maps for p in linear.parameters() if p.requires_grad]
    return torch.autograd.grad(loss, [x, *weights], **options)


def functions_of(results: list[Tensor]) -> set[str]:
    return {y.grad_fn.name() for y in results if y.grad_fn is not None}


def test_results_and_gradients() -> None:
    maps, x = three_maps(), torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    maps[1].weight.requires_grad_(False)
    joint, apart = linear_maps(x, maps), one_by_one(x, maps)
    assert functions_of(joint) == {"_LinearMapsBackward"}
    torch.testing.assert_close(joint, apart)
    torch.testing.assert_close(gradients(joint, x, maps), gradients(apart, x, maps))


def test_a_result_that_is_not_used() -> None:
    maps, x = three_maps(), torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    found, expected = (
        torch.autograd.grad(f(x, maps)[2].sum(), [x, *(m.weight for m in maps)], allow_unused=True)
        for f in (linear_maps, one_by_one)
    )
    assert found[1] is None and found[2] is None
    torch.testing.assert_close((found[0], found[3]), (expected[0], expected[3]))


def test_second_derivatives() -> None:
    maps, x = three_maps(), torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    second = []
    for f in (linear_maps, one_by_one):
        first = gradients(f(x, maps), x, maps, create_graph=True)
        second.append(torch.autograd.grad(sum(g.square().sum() for g in first), [x, *(m.weight for m in maps)]))
    torch.testing.assert_close(*second)


def test_under_autocast() -> None:
    maps, x = three_maps(torch.float32), torch.randn(5, 6, requires_grad=True)
    results = []
    for f in (linear_maps, one_by_one):
        with torch.autocast("cpu", torch.bfloat16):
            y = f(x, maps)
        assert {one.dtype for one in y} == {torch.bfloat16}
        results.append([*y, *gradients([one.float() for one in y], x, maps)])
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)
    assert [g.dtype for g in results[0][3:]] == [torch.float32] * 4


@pytest.mark.parametrize("why", ["bias", "hook", "adapter", "dtype"])
def test_other_modules_are_called(why: str) -> None:
    maps, x = three_maps(), torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    called: list[object] = []
    if why == "bias":
        maps[0] = nn.Linear(6, 5, dtype=torch.float64)
    elif why == "hook":
        maps[0].register_forward_hook(lambda *call: called.append(call))
    elif why == "adapter":
        maps[0] = nn.Sequential(maps[0], nn.Identity())
    else:
        maps[0] = nn.Sequential(nn.Linear(6, 5, bias=False))
        maps[0].forward = lambda x: maps[0][0](x.float())
    joint, apart = linear_maps(x, maps), one_by_one(x, maps)
    torch.testing.assert_close(joint, apart)
    assert functions_of(joint[1:]) == {"_LinearMapsBackward"} and "_LinearMapsBackward" not in functions_of(joint[:1])
    assert len(called) == (2 if why == "hook" else 0)


def test_without_gradients_each_module_is_called() -> None:
    maps, x = three_maps(), torch.randn(4, 6, dtype=torch.float64)
    assert "_LinearMapsBackward" not in functions_of(linear_maps(x, maps))
    with torch.no_grad():
        assert not functions_of(linear_maps(x.requires_grad_(), maps))


def test_a_layer_is_exported_for_any_number_of_tokens() -> None:
    length = torch.export.Dim("T", min=2, max=100_000)
    with torch.no_grad():
        torch.export.export(SwiGLU(16, 32), (torch.randn(1, 5, 16),), dynamic_shapes={"x": {1: length}})


def test_results_may_be_changed_in_place() -> None:
    for y in linear_maps(torch.randn(4, 6, dtype=torch.float64, requires_grad=True), three_maps()):
        y.add_(1)


@pytest.mark.parametrize("rule", ["delta_net", "gated_deltanet", "kda"])
def test_a_layer_saves_its_input_once(rule: str) -> None:
    layer = DeltaRuleAttention(rule, 16, 2, backend="chunkwise").double()
    x = torch.randn(1, 5, 16, dtype=torch.float64, requires_grad=True)
    function = LayerInput(x, layer).project("q_proj").grad_fn
    assert function is not None and function.name() == "_LinearMapsBackward"
    gates = {"delta_net": 1, "gated_deltanet": 3, "kda": 3}[rule]
    assert len(function.saved_tensors) == 1 + 3 + gates


@pytest.mark.parametrize("rule", list_rules())
def test_no_map_of_a_layers_input_is_computed_by_itself(rule: str, monkeypatch) -> None:
    layer = make_layer(rule, 16, 2, backend="chunkwise").double()
    x = torch.randn(1, 5, 16, dtype=torch.float64, requires_grad=True)
    apart: list[nn.Module] = []
    forward = nn.Linear.forward

    def watched(linear: nn.Linear, y: Tensor) -> Tensor:
        if y is x:
            apart.append(linear)
        return forward(linear, y)

    monkeypatch.setattr(nn.Linear, "forward", watched)
    y = layer(x)
    assert all(linear.bias is not None for linear in apart)
    y.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    joint = LayerInput(x, layer).project("q_proj").grad_fn
    maps = [module for name in layer.input_projections if (module := getattr(layer, name, None)) is not None]
    assert len(joint.saved_tensors) == 1 + len(maps) - len(apart)


def test_recomputation_keeps_the_weights_and_the_input_of_the_maps() -> None:
    mlp, x = SwiGLU(8, 16).double(), torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(mlp(x).square().sum(), [x, *mlp.parameters()])
    with recomputing():
        y = mlp(x)
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), [x, *mlp.parameters()]), expected)


def test_tensors_without_data() -> None:
    x = torch.empty(1, 5, 16, device="meta", requires_grad=True)
    assert DeltaRuleAttention("delta_net", 16, 2, backend="chunkwise").to("meta")(x).shape == x.shape
    assert SwiGLU(16, 32).to("meta")(x).shape == x.shape


def test_a_sequence_of_three_modules() -> None:
    layer = DeltaRuleAttention("kda", 16, 2, backend="chunkwise").double()
    layer.f_proj.append(nn.ReLU())
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    expected = layer(x)
    torch.testing.assert_close(layer(x.requires_grad_()), expected)


class TwiceTheNorm(layers.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_an_output_norm_of_another_class_is_called() -> None:
    layer, x = DeltaRuleAttention("delta_net", 16, 2, backend="chunkwise"), torch.randn(1, 5, 16)
    expected = 2 * layer(x)
    layer.o_norm = TwiceTheNorm(8)
    torch.testing.assert_close(layer(x), expected)
