"""Configurations by name, equal parameters, the same numbers from one seed; every experiment can take a step."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import pytest
import torch

from deltazoo.layers import DeltaRuleAttention
from deltazoo.spec import list_rules
from experiments import Recipe, fitting, parse_configuration, run_configuration
from experiments.configurations import OPTIONS, label_of
from experiments.fitting import _schedule
from experiments.network import LabModel, build_model
from experiments.suites import SUITES
from experiments.tasks.overwrite import OVERWRITE
from experiments.tasks.parity import PARITY
from experiments.training_update import Questions, Update

EXPERIMENTS = {
    f"{suite}-{experiment.name}": experiment
    for suite, claims in SUITES.items()
    for claim in claims
    for experiment in claim.experiments
}
TINY = Recipe(hidden_size=16, num_heads=2, head_dim=8, train_lengths=(3, 9), test=(9, 20), test_sequences=8, steps=4)


def size(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_options_change_the_layer_they_name() -> None:
    configuration = parse_configuration("efla+channel-decay+neg+x2+slow-decay")
    layer = build_model(configuration, replace(TINY, mlp_ratio=8.0), PARITY).layers[0].mixer
    assert layer.spec.step_size == "exact" and layer.spec.decay == "channel" and layer.spec.dt_range == (1e-6, 1e-4)
    assert layer.allow_neg_eigval and layer.num_micro_steps == 2
    assert parse_configuration("delta_net+raw-key").spec.normalize_k is False
    assert parse_configuration("kda+erase").options == {"allow_neg_eigval": True, "neg_eigval": "erase"}
    assert label_of("kda+neg+x2") == "KDA [-1,1], 2 steps"
    assert set(OPTIONS) >= {"neg", "erase", "x2", "x3", "raw-key", "scalar-decay", "channel-decay"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("delta", "unknown rule 'delta'; did you mean 'delta_net'"),
        ("delta_net+x9", "unknown option 'x9'"),
        ("softmax+neg", "takes no options"),
        ("delta_net+unit-key", "is so already: normalize_k=True"),
        ("kda+channel-decay", "is so already"),
    ],
)
def test_unknown_and_idle_options_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_configuration(name)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_configurations_of_an_experiment_have_equal_parameters(name: str) -> None:
    experiment = EXPERIMENTS[name]
    with torch.device("meta"):
        sizes = {
            configuration: size(build_model(parse_configuration(configuration), experiment.recipe, experiment.task))
            for configuration in experiment.configurations
        }
    assert max(sizes.values()) <= 1.02 * min(sizes.values()), sizes


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if not name.startswith("mini")])
def test_fused_kernels_take_every_configuration_and_leave_its_parameters(name: str) -> None:
    experiment = EXPERIMENTS[name]
    with torch.device("meta"):
        for configuration in map(parse_configuration, experiment.configurations):
            plain, fused = (
                build_model(configuration, experiment.recipe, experiment.task, fused_kernels=fused)
                for fused in (False, True)
            )
            shapes = [{name: p.shape for name, p in model.named_parameters()} for model in (plain, fused)]
            assert shapes[0] == shapes[1]
            mixers = [module for module in fused.modules() if isinstance(module, DeltaRuleAttention)]
            assert len(mixers) == (0 if configuration.spec is None else experiment.recipe.num_layers)
            for mixer in mixers:
                assert mixer.fused_kernels == (mixer.conv_size > 0 or mixer.spec.output_gate != "none")


@pytest.mark.parametrize("name", ["kda+neg", "efla+scalar-decay", "linear_attention", "softmax"])
def test_autocast_trains_what_float32_trains(name: str) -> None:
    """Logits stay below 4 here, where bfloat16 rounds by up to 2^-7; the mean loss moves by less than that."""
    recipe = replace(TINY, steps=6, mlp_multiple=8, mlp_ratio=6.0)
    half, full = (
        run_configuration(PARITY, parse_configuration(name), replace(recipe, bf16=bf16), seed=0)
        for bf16 in (True, False)
    )
    assert half.parameters == full.parameters
    for (_, loss, _), (_, expected, _) in zip(half.curve, full.curve, strict=True):
        assert loss != expected and abs(loss - expected) < 2**-7


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["kda+neg", "efla+scalar-decay", "neg_delta_net+x2", "linear_attention", "softmax"])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_gpu_trains_what_the_cpu_trains(name: str, bf16: bool) -> None:
    """Float32 kernels add up in another order, which six steps of AdamW enlarge; bfloat16 as in the test above."""
    recipe = replace(TINY, steps=6, mlp_ratio=6.0, bf16=bf16)
    there, here = (
        run_configuration(PARITY, parse_configuration(name), recipe, seed=0, device=device)
        for device in ("cuda:0", "cpu")
    )
    assert there.device == "cuda:0" and there.parameters == here.parameters
    for (_, loss, _), (_, expected, _) in zip(there.curve, here.curve, strict=True):
        assert abs(loss - expected) < (2**-6 if bf16 else 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("name", list_rules())
def test_a_gpu_records_an_update_of_every_rule(name: str) -> None:
    """Nothing in a rule makes the host wait for the GPU: no warning that it is trained without a CUDA graph."""
    recipe = replace(TINY, hidden_size=32, head_dim=16, mlp_ratio=8.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "trained without")
        run_configuration(PARITY, parse_configuration(name), recipe, seed=0, device="cuda:0")


@pytest.mark.parametrize("name", ["kda+neg", "neg_delta_net+x2", "softmax"])
def test_padding_changes_neither_loss_nor_update(name: str) -> None:
    batch = PARITY.sample(4, 7, torch.Generator().manual_seed(0))
    cpu, after = torch.device("cpu"), []
    for padded_to in (None, 12):
        torch.manual_seed(0)
        model = build_model(parse_configuration(name), replace(TINY, mlp_ratio=6.0), PARITY)
        questions = Questions.of(batch, cpu, padded_to=padded_to)
        assert questions.inputs.shape == (4, padded_to or 7) and len(questions.tokens) == questions.inputs.numel()
        found = Update(model, TINY)(questions, 1e-2)
        after.append(torch.cat([found.double(), *(p.detach().double().flatten() for p in model.parameters())]))
    # AdamW's first update is the gradient's sign times the learning rate, but for gradients near its epsilon, 1e-8.
    assert (after[0] - after[1])[:2].abs().max() < 1e-6
    assert ((after[0] - after[1]).abs() > 1e-4).float().mean() < 0.01


def test_mlp_widths_are_multiples() -> None:
    recipe = replace(TINY, hidden_size=64, mlp_ratio=4.0, mlp_multiple=8)
    for configuration in ("linear_attention", "gated_deltanet", "kda", "softmax"):
        width = build_model(parse_configuration(configuration), recipe, PARITY).layers[0].up.out_features
        assert width % 8 == 0 and width > 0


def test_a_configuration_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="leave none for it: raise mlp_ratio=1.0"):
        build_model(parse_configuration("gated_deltanet+x4"), replace(TINY, mlp_ratio=1.0), PARITY)


def test_an_mlp_width_too_coarse_to_make_counts_equal_is_refused() -> None:
    with pytest.raises(ValueError, match="with MLP widths in steps of 8, .* lower mlp_multiple"):
        build_model(parse_configuration("neg_delta_net+x2"), replace(TINY, mlp_ratio=6.0, mlp_multiple=8), PARITY)


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if "byte_text" not in name])
def test_every_experiment_takes_a_step(name: str) -> None:
    experiment = EXPERIMENTS[name]
    recipe = experiment.recipe
    if "digits" in name:
        pytest.importorskip("sklearn", reason="the digits task needs scikit-learn")
    short = recipe.train_lengths if "digits" in name else (min(recipe.train_lengths[0], 64),) * 2
    short = (max(short[0], experiment.task.shortest), max(short[1], experiment.task.shortest))
    recipe = replace(
        recipe,
        steps=1,
        batch_size=2,
        draw_ahead=1,
        test_sequences=2,
        train_lengths=short,
        test=recipe.test[:1],
        bf16=False,
    )
    if isinstance(recipe.test[0], int) and recipe.test[0] > 256:
        recipe = replace(recipe, test=(short[1],))
    for configuration in experiment.configurations[:2]:
        outcome = run_configuration(experiment.task, parse_configuration(configuration), recipe, seed=0)
        (score,) = outcome.scores.values()
        assert score.answers > 0 and 0 <= score.accuracy <= 1 and score.bits > 0
        assert len(outcome.curve) == 1


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others() -> None:
    def numbers(seed: int, configuration: str = "kda+neg"):
        outcome = run_configuration(PARITY, parse_configuration(configuration), TINY, seed=seed)
        return outcome.scores, outcome.curve

    assert numbers(0) == numbers(0)
    assert numbers(0) != numbers(1)


def test_configurations_of_one_seed_see_the_same_data(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[torch.Tensor]] = {}
    for configuration in ("delta_net", "kda+neg", "linear_attention"):
        inputs: list[torch.Tensor] = []
        original = LabModel.forward

        def forward(self, tokens, positions, inputs=inputs, original=original):
            inputs.append(tokens)
            return original(self, tokens, positions)

        monkeypatch.setattr(LabModel, "forward", forward)
        run_configuration(PARITY, parse_configuration(configuration), TINY, seed=3)
        monkeypatch.setattr(LabModel, "forward", original)
        seen[configuration] = inputs
    first, *others = seen.values()
    assert len(first) == TINY.steps + len(TINY.test)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_test_data_do_not_depend_on_the_seed_nor_on_other_conditions_scores() -> None:
    frozen = replace(TINY, steps=1, learning_rate=1e-9)
    narrow = replace(frozen, test=(9,))
    wide, alone = (
        run_configuration(PARITY, parse_configuration("delta_net"), recipe, seed=0) for recipe in (frozen, narrow)
    )
    assert wide.scores["9"] == alone.scores["9"]


def test_drawing_ahead_keeps_the_number_of_steps() -> None:
    outcome = run_configuration(PARITY, parse_configuration("delta_net"), replace(TINY, steps=7, draw_ahead=3), seed=0)
    assert outcome.curve[-1][0] == 7


def test_schedule_and_curriculum() -> None:
    recipe = replace(TINY, steps=100, warmup=0.1, curriculum=0.5, train_lengths=(4, 32))
    rates = [_schedule(step, recipe) for step in range(100)]
    assert rates[0] == 0.1 and max(rates) == rates[9] == 1.0 and rates[-1] < 0.01
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert (recipe.longest(0), recipe.longest(25), recipe.longest(50), recipe.longest(99)) == (16, 24, 32, 32)


def test_a_loss_that_is_not_finite_stops_the_configuration() -> None:
    with pytest.raises(ArithmeticError, match="delta_net on parity: the loss is"):
        run_configuration(
            PARITY, parse_configuration("delta_net"), replace(TINY, learning_rate=1e30, clip=1e30), seed=0
        )


def test_answers_of_nan_are_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may be finite at the lengths of its training, and not at those of a test."""
    answer = fitting.answer
    monkeypatch.setattr(fitting, "answer", lambda *arguments: answer(*arguments) * math.nan)
    with pytest.raises(ArithmeticError, match="parity, tested at .*: the answers cost nan nats"):
        run_configuration(PARITY, parse_configuration("delta_net"), replace(TINY, steps=2), seed=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_lengths": (9, 3)}, "got 9, 3|got \\(9, 3\\)"),
        ({"steps": 0}, "at least 1"),
        ({"learning_rate": 0.0}, "must be positive, got 0.0"),
        ({"warmup": 1.0}, "warmup must lie"),
        ({"mlp_multiple": 0}, "mlp_multiple must be at least 1, got 0"),
        ({"bare": True}, "a bare model has no MLP"),
    ],
)
def test_recipes_that_make_no_sense_are_refused(change, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)


@pytest.mark.slow
def test_negative_eigenvalues_track_parity_and_positive_ones_do_not() -> None:
    """The first claim of the mini suite, whole."""
    recipe = replace(EXPERIMENTS["mini-parity"].recipe, test=(128,))
    reached = {
        configuration: run_configuration(PARITY, parse_configuration(configuration), recipe, seed=0)
        .scores["128"]
        .accuracy
        for configuration in ("neg_delta_net", "delta_net")
    }
    assert reached["neg_delta_net"] >= 0.90 and reached["delta_net"] <= 0.60, reached


@pytest.mark.slow
def test_the_delta_rule_overwrites_and_linear_attention_does_not() -> None:
    recipe = EXPERIMENTS["mini-overwrite"].recipe
    reached = {
        configuration: run_configuration(OVERWRITE, parse_configuration(configuration), recipe, seed=0)
        .scores["16"]
        .accuracy
        for configuration in ("delta_net", "linear_attention")
    }
    assert reached["delta_net"] >= 0.95 and reached["linear_attention"] <= 0.75, reached
