"""What `deltazoo.report` tells of layers, and whether they run so."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltazoo import _report, layers
from deltazoo._report import report
from deltazoo.layers import DeltaRuleAttention, rule
from deltazoo.ops import backends
from deltazoo.ops.call import RuleCall
from deltazoo.spec import list_rules

HIDDEN, HEADS, HEAD_DIM = 32, 2, 8


def make(rule: str = "gated_deltanet", **options: object) -> DeltaRuleAttention:
    return DeltaRuleAttention(rule, HIDDEN, HEADS, HEAD_DIM, layer_idx=0, **options)


def test_report_tells_backend_and_reason_of_every_layer() -> None:
    model = nn.ModuleDict(
        {"first": make("kda"), "mlp": layers.SwiGLU(8, 8), "second": make("efla", backend="reference")}
    )
    found = report(model)
    assert [(row.name, row.rule, row.backend) for row in found.layers] == [
        ("first", "kda", "chunkwise"),
        ("second", "efla", "reference"),
    ]
    assert all(row.reason for row in found.layers)
    lines = str(found).splitlines()
    assert lines[0].split() == ["layer", "rule", "update", "backend", "reason"]
    assert re.match("second +efla +no decay, erases under its key +reference +asked for", lines[2])


@pytest.mark.parametrize(
    ("rule", "options", "update"),
    [
        ("gla", {}, "decay per channel, no erase"),
        ("comba", {}, "decay per head, erases under another key, reads before the decay"),
        ("eda", {}, "decay per channel, erases under its key, 2 micro-steps"),
        ("delta_net", {"num_micro_steps": 3}, "no decay, erases under its key, 3 micro-steps"),
    ],
)
def test_report_tells_what_a_token_does(rule: str, options: dict[str, int], update: str) -> None:
    layer = layers.make_layer(rule, HIDDEN, HEADS, HEAD_DIM, **options)
    assert report(layer).layers[0].update == update


def test_report_of_a_bare_layer_and_of_none() -> None:
    assert report(make()).layers[0].name == "DeltaRuleAttention"
    assert str(report(nn.Linear(2, 2))) == "no delta-rule layers"


def test_report_runs_what_it_says() -> None:
    layer, x = make(backend="reference"), torch.randn(2, 9, HIDDEN)
    looped = layer(x)
    layer.backend = "chunkwise"
    torch.testing.assert_close(layer(x), looped)
    assert not torch.equal(layer(x), looped)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`torch.device("cuda")` is described as Hopper; gives the module that says what Gluon kernels lack."""
    gluon = pytest.importorskip("deltazoo.ops.triton.gluon")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(gluon, "MISSING", None)
    backends._obstacle.cache_clear()
    yield gluon
    backends._obstacle.cache_clear()


class Described(nn.Module):
    """A layer as it would describe itself with parameters of another kind."""

    def __init__(self, layer: DeltaRuleAttention, **changes: Any) -> None:
        super().__init__()
        description = _report._description(layer)
        assert description is not None
        self.rule = description._replace(**{"device": torch.device("cuda"), "dtype": torch.bfloat16, **changes})

    def describe_rule(self) -> _report.RuleDescription:
        return self.rule


def route_on_hopper(layer: DeltaRuleAttention, monkeypatch: pytest.MonkeyPatch, **options: Tensor) -> Any:
    """The route of the operator's last call in a forward pass, the one that mixes the values, in a batch of 132."""
    plan, problem = (pytest.importorskip(f"deltazoo.ops.triton.{name}") for name in ("plan", "problem"))
    calls: list[Any] = []

    def record(name: str, wanted: bool) -> None:
        def recorded(q: Tensor, k: Tensor, v: Tensor, *gates: Any, **more: Any) -> Any:
            beta, log_decay = gates if wanted else (None, *gates)
            steps, undecayed = more.get("num_micro_steps", 1), more.get("erase_reads") == "undecayed"
            rest = more["cu_seqlens"], None, more.get("erase_key"), undecayed, steps
            rows = 132 if more["cu_seqlens"] is None else 1
            tensors = (
                None if x is None else x.expand(rows, *x.shape[1:]) for x in (q.bfloat16(), k, v, beta, log_decay)
            )
            call = RuleCall(*tensors, 1.0, None, *rest)
            calls.append(plan.Plan(*problem.sizes_of(call, plan.Card(gluon=True), None)))
            return run(q, k, v, *gates, **more)

        run = getattr(rule, name)
        monkeypatch.setattr(rule, name, recorded)

    with monkeypatch.context() as monkeypatch:
        record("delta_rule", True)
        record("linear_attention", False)
        layer(torch.randn(1, 4, layer.hidden_size), **options)
    return calls[-1].route


@pytest.mark.parametrize("rule", list_rules())
def test_report_tells_which_kernels_run_on_hopper(rule: str, hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the operator's plan decides, from what a layer passes to it, for rows whole and packed."""
    expansion = layers.layer_class(rule).key_expansion
    layer = layers.make_layer(rule, HIDDEN, 1, 128 // expansion, expand_v=expansion, layer_idx=0)
    route = route_on_hopper(layer, monkeypatch)
    packed = route_on_hopper(layer, monkeypatch, cu_seqlens=torch.tensor([0, 1, 4]))
    assert packed.scans == "triton"
    (found,) = report(Described(layer)).layers
    start = "the GPU kernels support this call: "
    if route.scans == "gluon":
        forward, recorded, backward = (route.why.get(name) for name in ("forward", "recorded", "backward"))
        stages = ""
        if forward is None and recorded is not None:
            stages = f"; the forward pass in training and the backward pass in stages, since {recorded}"
            assert recorded == backward
        elif forward == backward and forward is not None:
            stages = f"; the forward pass and the backward pass in stages, since {forward}"
        elif forward is not None:
            stages = f"; the forward pass in stages, since {forward}; the backward pass in stages, since {backward}"
        assert found.reason == start + "kernels for Hopper, plain Triton kernels where rows are packed" + stages
        (alone,) = report(Described(layer, packs=False)).layers  # as accelerated layers are
        assert alone.reason == start + "kernels for Hopper" + stages
        assert ("decay is per channel" in stages) == (layer.spec.decay == "channel" or layer.key_expansion > 1)
    elif layer.spec.corrects:
        assert found.reason == start + "plain Triton kernels, since tokens have several micro-steps"
    else:
        assert found.reason == start + "plain Triton kernels, since there are no step sizes"


def test_report_tells_what_keeps_kernels_for_hopper_away(hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make()

    def reason(**changes: Any) -> str:
        described = Described(layer, **{"head_k_dim": 128, "head_v_dim": 128, **changes})
        (found,) = report(described).layers
        return found.reason.partition(": ")[2]

    assert reason() == "kernels for Hopper, plain Triton kernels where rows are packed"
    assert reason(head_k_dim=64) == "plain Triton kernels, since heads have 64 key and 128 value channels, not 128"
    assert reason(dtype=torch.float32) == "plain Triton kernels, since inputs are float32"
    assert reason(num_micro_steps=2) == "plain Triton kernels, since tokens have several micro-steps"
    monkeypatch.setattr(hopper, "MISSING", "Triton 9.9 lacks a part of Gluon")
    assert reason() == "plain Triton kernels, since Triton 9.9 lacks a part of Gluon"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert reason() == ""
