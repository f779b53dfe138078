"""Figures of layers whose keys and gates are set by hand, and of every rule beside matrices in float64."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_loops import model_of
from foreign_models import FUSED, accelerated
from model_kinds import KINDS, model_of_kind
from outside_rule import RULES, forget_rules
from tiny_families import tiny_original
from tiny_models import tiny_model, tokens
from torch import Tensor
from transitions import factors_and_writes

import deltazoo
from deltazoo.cli.options import load_rule_file
from deltazoo.compat.transformers.layer import AcceleratedLayer
from deltazoo.diagnosis import Diagnosis, Figures, pictures
from deltazoo.diagnosis.pictures import draw_records
from deltazoo.diagnosis.rule_calls import delta_rule_layers, recorded_calls
from deltazoo.layers import DeltaRuleAttention, GatedDeltaNet, LayerStates, RuleInputs, make_layer
from deltazoo.layers.state import LayerState
from deltazoo.models import DeltaRuleConfig, DeltaRuleForCausalLM

HIDDEN, KEYS = 16, 8


def by_hand(
    beta: Tensor,
    log_decay: Tensor | None = None,
    keys: Tensor | None = None,
    erase_keys: Tensor | None = None,
    rule: str = "gated_deltanet",
    **options: Any,
) -> tuple[Figures, ...]:
    """Figures of a layer that passes these to the operator, for `T` tokens and `HV` heads: beta `[T, HV]`, log-decay
    `[T, HV]` or `[T, HV, K]`, keys `[T, K]`, the first unit vector unless given; values are ones."""
    num_tokens, heads = beta.shape
    layer = make_layer(rule, HIDDEN, heads, KEYS, use_short_conv=False, expand_v=1.0, **options).double()
    keys = torch.eye(KEYS)[:1].expand(num_tokens, -1) if keys is None else keys

    def per_head(x: Tensor) -> Tensor:
        return x.double()[None, :, None].expand(1, num_tokens, heads, KEYS).contiguous()

    k = per_head(keys)
    decay = None if log_decay is None else log_decay.double()[None]
    erase_key = None if erase_keys is None else per_head(erase_keys)
    inputs = RuleInputs(k, k, torch.ones_like(k), beta.double()[None], decay, erase_key)
    layer.rule_inputs = lambda *_: inputs  # type: ignore[method-assign]
    (found,) = deltazoo.diagnose(layer, torch.randn(1, num_tokens, HIDDEN).double()).layers
    return found.heads


def test_gain_and_eigenvalue_of_one_key() -> None:
    """A head with gains 0.2 and 1.6 in turns and a half-life of 10 tokens, and one with a constant gain."""
    beta = torch.tensor([[0.2, 0.5], [1.6, 0.5]]).repeat(64, 1)
    decay = 0.5**0.1
    first, second = by_hand(beta, torch.full((128, 2), math.log(decay)))
    assert first.gain == pytest.approx((0.2, 0.2, 0.2, first.gain.median, 1.6, 1.6, 1.6))
    assert first.gain_above_one == 0.5 and second.gain_above_one == 0
    assert (first.eigenvalue.min, first.eigenvalue.max) == pytest.approx((decay * -0.6, decay * 0.8))
    assert second.eigenvalue == pytest.approx((decay * 0.5,) * 7)
    assert first.half_life == pytest.approx((10,) * 7)
    assert first.chunk_norm == pytest.approx(decay**64, rel=2e-4)  # across the key nothing is erased
    # The fixed point of s = decay * 0.5 * s + 0.5 in each of the value channels.
    assert second.state_norm == pytest.approx(0.5 / (1 - decay * 0.5) * math.sqrt(KEYS))
    assert second.state_growth == pytest.approx(1)
    assert len(second.state_norms) == 2 and second.state_norms[1] == second.state_norm


def test_half_lives_per_channel() -> None:
    half_lives = torch.arange(1, KEYS + 1).double() ** 2
    rates = -math.log(2) / half_lives
    # The mean rate counts: half of the tokens decay twice as fast, the others not at all.
    log_decay = rates * torch.tensor([2.0, 0.0]).repeat(32)[:, None, None]
    (head,) = by_hand(torch.rand(64, 1), log_decay, rule="kda")
    assert head.half_life == pytest.approx((1, 1, 9, 25, 36, 64, 64))
    assert by_hand(torch.rand(64, 1), rule="delta_net")[0].half_life is None


def test_erasing_under_another_key_before_the_decay() -> None:
    e = torch.zeros(64, KEYS)
    e[:, 0] = 0.75
    decay = torch.full((64, 1), math.log(0.5))
    (head,) = by_hand(torch.full((64, 1), 0.8), decay, erase_keys=e, rule="comba")
    assert head.gain == pytest.approx((0.6,) * 7)
    assert head.eigenvalue == pytest.approx((-0.1,) * 7)


def test_growth_without_writes_is_the_largest_singular_value() -> None:
    """A gain of 3 doubles what lies along the key, with the other sign, at every token."""
    (head,) = by_hand(torch.full((128, 1), 3.0), rule="delta_net")
    assert head.eigenvalue == pytest.approx((-2,) * 7)
    assert head.chunk_norm == pytest.approx(2.0**64, rel=2e-4)
    assert head.state_norms == pytest.approx([(2.0**n - 1) * math.sqrt(KEYS) for n in (64, 128)], rel=1e-6)
    assert head.state_growth == pytest.approx(2.0**64)


def test_gates() -> None:
    """Each gate's logit is a feature of the token: shut for a quarter of them, open for another one."""
    x = torch.zeros(1, 8, HIDDEN)
    x[0, :2, 0], x[0, 2:4, 0] = -6, 6
    layer = make_layer("kda", HIDDEN, 1, KEYS)
    silu = make_layer("gated_deltanet", HIDDEN, 1, KEYS, num_v_heads=2)
    for linear in (layer.b_proj, layer.g_proj[0], silu.b_proj, silu.g_proj):
        torch.nn.init.zeros_(linear.weight)
        linear.weight.data[:, 0] = 1
    torch.nn.init.eye_(layer.g_proj[1].weight)
    (head,) = deltazoo.diagnose(layer, x).layers[0].heads
    assert head.gates == {"step": (0.25, 0.25), "output": (0.25, 0.25)}
    for head in deltazoo.diagnose(silu, x).layers[0].heads:
        assert head.gates == {"step": (0.25, 0.25), "output": (0.25, None)}


@pytest.mark.parametrize(
    ("rule", "options", "gates"),
    [
        ("gated_deltanet2", {"num_v_heads": 4}, {"erase", "write", "output"}),
        ("eda", {}, {"step", "erase", "output"}),
        ("kda", {"decay_lower_bound": -5.0}, {"step", "decay", "output"}),
        ("gated_deltaproduct", {"num_v_heads": 4}, {"step", "output"}),
        ("delta_net", {}, {"step"}),
        ("mamba2_style", {}, {"output"}),
    ],
)
def test_every_gate_of_a_rule_is_there(rule: str, options: dict[str, Any], gates: set[str]) -> None:
    layer = make_layer(rule, HIDDEN, 2, KEYS, **options)
    for head in deltazoo.diagnose(layer, torch.randn(2, 9, HIDDEN)).layers[0].heads:
        assert {*head.gates} == gates


@pytest.mark.parametrize("options", [{}, {"allow_neg_eigval": True, "num_v_heads": 4}], ids=["plain", "doubled"])
@pytest.mark.parametrize("rule", deltazoo.list_rules())
def test_every_rule_beside_matrices(rule: str, options: dict[str, Any]) -> None:
    """States and products of transitions are those of explicit factors, multiplied token by token in float64."""
    try:
        layer = make_layer(rule, HIDDEN, 2, 4, initializer_range=0.5, layer_idx=0, **options).double()
    except ValueError:
        assert options  # the rule takes no doubled step
        return
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    seen: list[RuleInputs] = []
    x = torch.randn(2, 150, HIDDEN).double()
    with torch.no_grad(), recorded_calls({"layer": layer}, lambda _, call: seen.append(call.inputs)):
        layer(x)
    (found,) = deltazoo.diagnose(layer, x).layers
    factors, writes = factors_and_writes(layer, seen[0])
    state, product, norms, products = torch.zeros_like(writes[:, 0]), torch.eye(writes.shape[3]).double(), [], []
    for token in range(150):
        state = factors[:, token] @ state + writes[:, token]
        product = factors[:, token] @ product
        if token % 64 == 63:
            norms.append(torch.linalg.matrix_norm(state).mean(0))
            products.append(torch.linalg.matrix_norm(product, 2))
            product = torch.eye(writes.shape[3]).double()
    at_end = torch.linalg.matrix_norm(state)
    for number, head in enumerate(found.heads):
        assert head.state_norm == pytest.approx(at_end[:, number].mean().item(), rel=1e-6)
        assert head.state_norms == pytest.approx([norm[number].item() for norm in norms], rel=1e-6)
        assert head.chunk_norm == pytest.approx(torch.stack(products)[..., number].max().item(), rel=1e-3)
        assert (head.gain is None) == (not layer.spec.corrects)


def agree(found: Diagnosis, expected: Diagnosis, rel: float = 1e-4) -> None:
    assert [layer.name for layer in found.layers] == [layer.name for layer in expected.layers]
    for mine, theirs in zip(found.records(), expected.records(), strict=True):
        norms = mine.pop("state_norms"), theirs.pop("state_norms")
        assert norms[0] == pytest.approx(norms[1], rel=rel)
        for name, value in theirs.items():
            assert mine[name] == (pytest.approx(value, rel=rel, abs=1e-6) if type(value) is float else value), name


@pytest.mark.parametrize("kind", ["gated_deltanet", "hybrid", "llama 1:1", *FUSED])
def test_padding_and_packing_leave_the_figures_alone(kind: str) -> None:
    """Rows of 130 and 70 tokens: padded on the left or on the right and packed, in all kinds of models."""
    model = model_of(kind)
    long, short = tokens(1, 130)[0].clamp(3, 50), tokens(1, 70, seed=1)[0].clamp(3, 50)
    alone = [deltazoo.diagnose(model, row[None]) for row in (long, short)]

    right = torch.stack([long, torch.cat([short, torch.full((60,), 3)])])
    left = torch.stack([long, torch.cat([torch.full((60,), 3), short])])
    mask = torch.ones(2, 130, dtype=torch.long)
    mask[1, 70:] = 0
    batches: list[dict[str, Any]] = [
        {"input_ids": right, "attention_mask": mask},
        {"input_ids": left, "attention_mask": mask.flip(1), "labels": left},
    ]
    if kind not in ("qwen4_exp", "glm5_next"):  # sparse softmax layers refuse packed sequences
        positions = torch.cat([torch.arange(130), torch.arange(70)])
        batches.append({"input_ids": torch.cat([long, short])[None], "position_ids": positions[None]})
    first = deltazoo.diagnose(model, batches[0])
    assert (first.num_tokens, first.num_sequences) == (200, 2)
    for one, two, both in zip(alone[0].records(), alone[1].records(), first.records(), strict=True):
        assert both["gain_max"] == pytest.approx(max(one["gain_max"], two["gain_max"]), rel=1e-4)
        assert both["state_norm"] == pytest.approx((one["state_norm"] + two["state_norm"]) / 2, rel=1e-4)
        assert both["chunk_norm"] == pytest.approx(max(one["chunk_norm"], two["chunk_norm"]), rel=1e-3)
        weighted = (130 * one["step_gate_shut"] + 70 * two["step_gate_shut"]) / 200
        assert both["step_gate_shut"] == pytest.approx(weighted, abs=1e-6)
    for batch in batches[1:]:
        found = deltazoo.diagnose(model, batch)
        assert (found.num_tokens, found.num_sequences) == (200, 2)
        if "position_ids" in batch and kind in FUSED:  # the first token of a document has a decay of -inf there
            for mine, theirs in zip(found.records(), first.records(), strict=True):
                for name in ("gain_max", "state_norm", "output_gate_shut"):
                    assert mine[name] == pytest.approx(theirs[name], rel=1e-3)
        else:
            agree(found, first, rel=1e-3)


@pytest.mark.parametrize("kind", ["eda", "llama all", "qwen3_next"])
def test_the_model_is_left_as_it_was(kind: str) -> None:
    model = model_of(kind).train()
    model.get_submodule("model").layers[0].eval()
    batch = tokens(2, 70).clamp(3, 50)
    modes = [module.training for module in model.modules()]
    attributes = [{*vars(module)} for module in model.modules()]
    before = model(batch, use_cache=False).logits
    deltazoo.diagnose(model, {"input_ids": batch, "labels": batch})
    assert [module.training for module in model.modules()] == modes
    assert [{*vars(module)} for module in model.modules()] == attributes
    assert not any(m._forward_hooks for m in model.modules() if "Attention" in type(m).__name__)
    assert torch.equal(model(batch, use_cache=False).logits, before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_a_layer_raises_leaves_no_hook() -> None:
    layer = GatedDeltaNet(HIDDEN, 2, layer_idx=0)
    states = LayerStates()
    layer(torch.randn(1, 3, HIDDEN), past_key_values=states)
    with pytest.raises(ValueError, match="from their first token: pass no past_key_values"):
        deltazoo.diagnose(layer, {"hidden_states": torch.randn(1, 3, HIDDEN), "past_key_values": states})
    assert "apply_rule" not in vars(layer) and not layer._forward_hooks
    with pytest.raises(ValueError, match="no token but padding"):
        deltazoo.diagnose(
            layer, {"hidden_states": torch.randn(1, 3, HIDDEN), "attention_mask": torch.zeros(1, 3).int()}
        )


@pytest.mark.parametrize("kind", KINDS)
def test_an_operator_that_may_not_run_is_not_described(kind: str) -> None:
    """A rule of another kind put into `apply_rule` by hand: reports say so, and a diagnosis is refused."""
    model = model_of_kind(kind)
    name, layer = next(iter(delta_rule_layers(model).items()))
    assert all("did not come with deltazoo" not in found.reason for found in deltazoo.report(model).layers)
    run = layer.apply_rule
    layer.apply_rule = lambda *arguments, **options: run(*arguments, **options)
    found, *others = deltazoo.report(model).layers
    assert found.name == name and "but apply_rule of this layer did not come with deltazoo" in found.reason
    assert all("did not come with deltazoo" not in other.reason for other in others)
    with pytest.raises(ValueError, match=f"apply_rule of {name} was replaced: it may not run"):
        deltazoo.diagnose(model, tokens(1, 9))


def test_a_forward_pass_without_the_operator_is_not_described() -> None:
    class Skips(DeltaRuleAttention):
        def forward(self, hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
            return hidden_states

    layer = Skips("delta_net", HIDDEN, 2)
    assert "but forward of this layer did not come with deltazoo" in deltazoo.report(layer).layers[0].reason
    with pytest.raises(ValueError, match="which the forward pass of Skips did not call"):
        deltazoo.diagnose(layer, torch.randn(1, 3, HIDDEN))


def test_one_token_of_an_accelerated_model_that_goes_on() -> None:
    """Its step passes the operator an option by name."""
    model = accelerated("qwen3_next")
    layer: Any = next(module for module in model.modules() if isinstance(module, AcceleratedLayer))
    q = torch.randn(1, 1, 2, 8)
    inputs, state = RuleInputs(q, q, q, torch.rand(1, 1, 2), -torch.rand(1, 1, 2)), torch.zeros(1, 2, 8, 8)
    with (
        recorded_calls({"layer": layer}, lambda name, call: None),
        pytest.raises(ValueError, match="from their first token: pass no past_key_values"),
    ):
        layer.apply_rule(inputs, LayerState(None, state), in_place=True)


def test_a_model_without_delta_rule_layers() -> None:
    with pytest.raises(ValueError, match=r"deltazoo.accelerate\(model\) first"):
        deltazoo.diagnose(tiny_original("llama"), tokens(1, 5))


def test_compiled_models_and_other_dtypes() -> None:
    model = tiny_model("neg_gated_deltanet")
    batch = tokens(2, 100)
    expected = deltazoo.diagnose(model, batch)
    compiled: Any = torch.compile(model, backend="eager")
    assert [layer.heads for layer in deltazoo.diagnose(compiled, batch).layers] == [
        layer.heads for layer in expected.layers
    ]
    agree(deltazoo.diagnose(copy.deepcopy(model).double(), batch), expected, rel=1e-3)
    with torch.autocast("cpu", torch.bfloat16):
        found = deltazoo.diagnose(model, batch)
    for mine, theirs in zip(found.records(), expected.records(), strict=True):
        assert mine["state_norm"] == pytest.approx(theirs["state_norm"], rel=0.05)


def test_warnings_are_sentences() -> None:
    beta = torch.full((128, 3), 0.5)
    beta[:51, 2] = 1.97
    beta[:3, 1] = 2.6
    decay = torch.full((128, 3), math.log(0.9999))
    decay[:, 0] = math.log(0.05)
    layer = GatedDeltaNet(HIDDEN, 3, KEYS, use_short_conv=False, expand_v=1.0).double()
    k = torch.eye(KEYS).double()[:1].expand(1, 128, 3, KEYS)
    inputs = RuleInputs(k, k, torch.ones_like(k), beta.double()[None], decay.double()[None])
    layer.rule_inputs = lambda *_: inputs  # type: ignore[method-assign]
    torch.nn.init.zeros_(layer.g_proj.weight)
    layer.g_proj.weight.data[KEYS : 2 * KEYS, 0] = -10
    found = deltazoo.diagnose(layer, torch.ones(1, 128, HIDDEN).double())
    assert found.warnings == [
        "GatedDeltaNet head 1: a token multiplies what is stored along its key by -1.6 (erase gain 0.5 to 2.6): the "
        "state expands. Bound the gain to [0, 2], as deltazoo.layers.bounded_step does, or normalise keys",
        "GatedDeltaNet head 2: erase gain up to 1.97, with an eigenvalue below -0.9 on 40% of tokens and a decay of "
        "0.9999 there: near expansion",
        "GatedDeltaNet head 0: the decay halves every channel within 0.23 tokens: the head carries next to nothing "
        "from token to token",
        "GatedDeltaNet head 1: the output gate is shut on 100% of tokens: the head hardly contributes",
    ]
    assert str(found).splitlines()[-4:] == found.warnings


def test_records_summary_and_picture(tmp_path: Path) -> None:
    model = tiny_model("hybrid_kda", num_hidden_layers=4, layer_types=["linear_attention", "full_attention"] * 2)
    found = deltazoo.diagnose(model, tokens(2, 200))
    records = found.records()
    assert [(record["layer"], record["head"]) for record in records] == [
        (f"model.layers.{layer}.attn", head) for layer in (0, 2) for head in (0, 1)
    ]
    assert len({frozenset(record) for record in records}) == 1
    assert json.loads(json.dumps(records, allow_nan=False)) == records
    summary = found.summary()
    assert summary["gain_max"] == max(record["gain_max"] for record in records)
    assert summary["half_life_min"] == min(record["half_life_median"] for record in records)
    linear = deltazoo.diagnose(tiny_model("linear_attention"), tokens(2, 20))
    assert {*linear.summary()} == {"chunk_norm_max", "state_norm_max"}
    for number, diagnosis in enumerate((found, linear)):
        path = diagnosis.save_picture(tmp_path / f"{number}.png")
        assert path.read_bytes().startswith(b"\x89PNG")


def test_each_colour_bar_stands_beside_its_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(pictures, "save_figure", lambda figure, path: drawn.append(figure) or path)
    found = deltazoo.diagnose(tiny_model("kda"), tokens(2, 200))
    draw_records(found.records(), tmp_path / "unused.png")
    (figure,) = drawn
    figure.draw_without_rendering()
    maps = [axis for axis in figure.axes if axis.images]
    bars = [axis.images[0].colorbar.ax for axis in maps]
    assert len(bars) == 5
    for axis, bar in zip(maps, bars, strict=True):
        assert 0 < bar.get_window_extent().x0 - axis.get_window_extent().x1 < 0.2 * figure.dpi


def train_on_noise(mixer: str, folder: Path) -> deltazoo.DiagnoseCallback:
    """Twelve steps of a model whose keys start long."""
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    sizes = dict(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_heads=2, intermediate_size=48)
    model = DeltaRuleForCausalLM(DeltaRuleConfig(mixer=mixer, **sizes))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.attn.k_proj.weight.mul_(10)
    rows = [{"input_ids": row, "labels": row} for row in tokens(64, 200)]
    arguments = TrainingArguments(
        str(folder), max_steps=12, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    callback = deltazoo.DiagnoseCallback(trainer, tokens(2, 200, seed=1), every=4)
    trainer.add_callback(callback)
    trainer.train()
    return callback


def test_a_diverging_run_is_recognised(tmp_path: Path) -> None:
    """Keys of any length, which nothing bounds: the output norm hides the growing state from the loss, not from us."""
    with forget_rules():
        (name,) = load_rule_file(RULES / "expands_the_state.py")
        diverging, bounded = train_on_noise(name, tmp_path), train_on_noise("neg_delta_net", tmp_path)
    logged = [x for x in diverging.trainer.state.log_history if "diagnose_state_norm_max" in x]
    assert [x["step"] for x in logged] == [0, 4, 8, 12]
    assert logged[0]["diagnose_gain_max"] > 2 and logged[-1]["diagnose_state_norm_max"] > 1e6
    losses = [x["loss"] for x in diverging.trainer.state.log_history if "loss" in x]
    assert len(losses) == 12 and max(losses) < 4.5
    assert diverging.latest is not None and bounded.latest is not None
    for kind in ("the state expands", "more than writes of one size explain"):
        assert any(kind in sentence for sentence in diverging.latest.warnings)
        assert not any(kind in sentence for sentence in bounded.latest.warnings)
    assert bounded.latest.summary()["gain_max"] <= 2 + 1e-5


def test_a_layer_that_gets_nan() -> None:
    model = tiny_model("gated_deltanet")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = math.nan
    found = deltazoo.diagnose(model, tokens(1, 70))
    assert [layer.heads[0].finite for layer in found.layers] == [True, False]
    assert found.warnings == [
        "NaN comes first in the output of model.layers.0.mlp.down_proj, whose weight holds NaN",
        "model.layers.1.attn: the operator gets NaN or infinity",
    ]
    assert math.isnan(found.summary()["state_norm_max"]) and math.isnan(found.summary()["half_life_min"])


@pytest.mark.parametrize("kind", KINDS)
def test_nan_behind_the_last_layer(kind: str) -> None:
    """No delta-rule layer sees it."""
    model = model_of_kind(kind)
    assert deltazoo.diagnose(model, tokens(1, 70)).not_finite is None
    model.lm_head.weight.data[7] = math.nan
    found = deltazoo.diagnose(model, tokens(1, 70))
    assert found.warnings[0] == found.not_finite
    assert found.not_finite == "NaN comes first in the output of lm_head, whose weight holds NaN"
    assert found.not_finite in str(found) and not model.lm_head._forward_hooks
    assert all(head.finite for layer in found.layers for head in layer.heads)


def test_the_callback_refuses_no_steps() -> None:
    with pytest.raises(ValueError, match="at least 1 step, got 0"):
        deltazoo.DiagnoseCallback(None, tokens(1, 2), every=0)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["neg_gated_deltanet", "gated_deltanet2", "gated_deltaproduct"])
def test_on_a_gpu(rule: str) -> None:
    """The same figures as on a CPU: in float32, and from bfloat16 inputs as the kernels see them."""
    model = tiny_model(rule, head_dim=64)
    batch = tokens(2, 300)
    expected = deltazoo.diagnose(model, batch)
    agree(deltazoo.diagnose(copy.deepcopy(model).cuda(), batch), expected, rel=2e-3)
    for mine, theirs in zip(
        deltazoo.diagnose(model.cuda().bfloat16(), batch).records(), expected.records(), strict=True
    ):
        assert mine["finite"] and mine["state_norm"] == pytest.approx(theirs["state_norm"], rel=0.1)


def test_layers_are_found_by_path() -> None:
    layers = torch.nn.Sequential(GatedDeltaNet(HIDDEN, 2), DeltaRuleAttention("kda", HIDDEN, 2))
    found = deltazoo.diagnose(layers, torch.randn(1, 70, HIDDEN))
    assert [(layer.name, layer.rule) for layer in found.layers] == [("0", "gated_deltanet"), ("1", "kda")]
