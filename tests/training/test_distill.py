"""Small distillations on real text: every stage improves the model; a killed one resumes with equal results."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import write_text_folder
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    TrainerCallback,
)

from deltazoo.diagnosis import pictures
from deltazoo.diagnosis.pictures import draw_distillation
from deltazoo.swap import swap_attention, swapped_layers
from deltazoo.training import distill as module
from deltazoo.training.config import STAGES, Recipe, TokenizerConfig, from_mapping
from deltazoo.training.data import read_corpus
from deltazoo.training.distill import (
    Distillation,
    DistillationTrainer,
    choose_trained_parameters,
    distill,
    divergence,
    teacher_forced,
)
from deltazoo.training.tokens import (
    PackedRows,
    Row,
    TokenizedText,
    build_tokenizer,
    collate_side_by_side,
    encode_documents,
    pack_in_order,
)
from deltazoo.training.trainer import training_arguments

STAGE = {"row_length": 48, "rows_per_batch": 4, "log_every": 2, "evaluate_every": 8, "evaluation_rows": 4}
STAGE |= {"precision": "fp32", "weight_decay": 0.0}


def recipe(text: Path, output: Path) -> Recipe:
    values = {
        "output": str(output),
        "data": {"text": str(text), "validation_fraction": 0.2, "max_validation_bytes": 3000},
        "align": {**STAGE, "steps": 16, "learning_rate": 1e-2, "save_every": 8},
        "distill": {**STAGE, "steps": 16, "learning_rate": 3e-3, "save_every": 8},
        "finetune": {**STAGE, "steps": 4, "learning_rate": 3e-4, "save_every": 4},
    }
    return from_mapping(Recipe, values)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, and a Llama of a few thousand parameters trained on a little of it."""
    folder = tmp_path_factory.mktemp("distillation")
    data = recipe(write_text_folder(folder / "text", bytes_per_file=8000), folder / "unused").data
    corpus = read_corpus(data)
    tokenizer = build_tokenizer(TokenizerConfig(vocab_size=320), corpus.train)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, bos_token_id=0, eos_token_id=1))
    rows = PackedRows(encode_documents(tokenizer, corpus.train), 48, num_rows=480, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for first in range(0, 480, 4):
        model(**collate_side_by_side([rows[n] for n in range(first, first + 4)])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for part in (model, tokenizer):
        part.save_pretrained(folder / "original")
    return folder


def original_of(home: Path, **options: Any) -> Any:
    """The trained Llama, in evaluation mode as `from_pretrained` leaves it."""
    return AutoModelForCausalLM.from_pretrained(home / "original", **options)


def swapped(home: Path, rule: str = "gated_deltanet", layers: Any = "all", **options: Any) -> Any:
    """The trained Llama with its layers swapped; the random parts of new layers are the same every time."""
    model = original_of(home, **options)
    torch.manual_seed(1)
    swap_attention(model, rule, layers)
    return model


def distilled(home: Path, config: Recipe, model: Any = None, **options: Any) -> Distillation:
    tokenizer = AutoTokenizer.from_pretrained(home / "original")
    return distill(model or swapped(home), original_of(home), tokenizer, config, **options)


def held_out_rows(home: Path) -> list[Row]:
    data = recipe(home / "text", home).data
    documents = read_corpus(data).validation
    return pack_in_order(encode_documents(AutoTokenizer.from_pretrained(home / "original"), documents), 48)


def trainer_of(config: Recipe, name: str, home: Path, model: Any) -> DistillationTrainer:
    run = module._as_run(name, config, "gated_deltanet")
    tokenizer = AutoTokenizer.from_pretrained(home / "original")
    text = TokenizedText(read_corpus(config.data), tokenizer)
    return DistillationTrainer(config.stages[name], original_of(home), model, run, training_arguments(run), text)


@pytest.fixture(scope="module")
def unbroken(home: Path) -> Distillation:
    return distilled(home, recipe(home / "text", home / "unbroken"))


def losses(result: Distillation, stage: str) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in result.histories[stage] if "loss" in entry}


def batch(home: Path) -> dict[str, torch.Tensor]:
    found = collate_side_by_side(held_out_rows(home)[:4])
    return {name: found[name] for name in ("input_ids", "position_ids")}


def test_alignment_brings_each_layer_closer_to_its_teacher(unbroken: Distillation) -> None:
    found = losses(unbroken, "align")
    assert found[16] < 0.8 * found[2]


def test_each_stage_scores_better_than_the_transfer_alone(unbroken: Distillation) -> None:
    scores = unbroken.scores
    assert list(scores) == ["original", "transfer", "align", "distill", "finetune"]
    assert scores["original"] < scores["transfer"]
    assert scores["align"] < scores["transfer"]
    assert scores["distill"] < scores["transfer"]
    assert scores["finetune"] < scores["transfer"]


def test_the_distillation_loss_falls(unbroken: Distillation) -> None:
    found = losses(unbroken, "distill")
    assert found[16] < found[2]


def test_the_result_is_a_checkpoint_of_its_own(unbroken: Distillation) -> None:
    model = AutoModelForCausalLM.from_pretrained(unbroken.model_path)
    assert sorted(swapped_layers(model)) == [0, 1]
    assert AutoTokenizer.from_pretrained(unbroken.model_path).eos_token_id == 1


def test_a_model_of_nan_has_no_score(home: Path, tmp_path: Path) -> None:
    model = swapped(home)
    model.lm_head.weight.data[7] = float("nan")
    with pytest.raises(FloatingPointError, match="negative log-likelihood of the held-out text is nan"):
        distilled(home, recipe(home / "text", tmp_path / "run"), model)


def test_all_curves_come_in_one_picture(unbroken: Distillation, tmp_path: Path) -> None:
    path = draw_distillation(tmp_path / "loss.png", unbroken.histories, unbroken.scores, "a distillation")
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("names", [("finetune",), ("align", "distill"), ("align", "distill", "finetune")])
def test_nothing_written_in_the_picture_is_cut_off(
    unbroken: Distillation, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(pictures, "save_figure", lambda figure, path, dpi: drawn.append(figure))
    histories = {name: unbroken.histories[name] for name in names}
    draw_distillation(Path("unused"), histories, unbroken.scores, "kda in 12 of 24 attention slots of " + "folder/" * 8)
    [figure] = drawn
    figure.draw_without_rendering()
    everything, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert everything.x0 >= 0 and everything.y0 >= 0
    assert everything.x1 <= width and everything.y1 <= height
    (star, *_) = (line for axis in figure.axes for line in axis.get_lines() if line.get_marker() == "*")
    assert not star.get_clip_on(), "whole, also where the last score lies at the edge of the panel"
    labels = [axis.yaxis.label.get_window_extent() for axis in figure.axes]
    assert all(label.height <= figure.axes[0].bbox.height for label in labels), "no longer than the axis"


@contextmanager
def dying(monkeypatch: pytest.MonkeyPatch, stage: str, after: int) -> Iterator[None]:
    """Kill the process in that stage after this many steps; 0: before the stage begins."""

    class Plug(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == after:
                raise KeyboardInterrupt

    train = DistillationTrainer.train

    def with_plug(trainer: DistillationTrainer, *args: Any, **kwargs: Any) -> Any:
        if Path(trainer.args.output_dir).name == stage:
            if not after:
                raise KeyboardInterrupt
            trainer.add_callback(Plug())
        return train(trainer, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(DistillationTrainer, "train", with_plug)
        yield


@pytest.mark.parametrize(("stage", "after"), [("align", 11), ("distill", 0), ("distill", 11)])
def test_a_killed_distillation_goes_on_as_if_nothing_had_happened(
    home: Path, unbroken: Distillation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stage: str, after: int
) -> None:
    config = recipe(home / "text", tmp_path / "run")
    with dying(monkeypatch, stage, after):
        distilled(home, config)
    result = distilled(home, config, resume=True)
    assert result.scores == unbroken.scores
    for name in STAGES:
        assert losses(result, name) == losses(unbroken, name)


def test_a_finished_distillation_is_only_reported_again(home: Path, unbroken: Distillation) -> None:
    before = (unbroken.model_path / "model.safetensors").stat().st_mtime_ns
    again = distilled(home, recipe(home / "text", home / "unbroken"), resume=True)
    assert again.scores == unbroken.scores
    assert (unbroken.model_path / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("lost", [("align/result.json",), ("align/model", "model")])
def test_what_is_lost_of_a_finished_stage_is_made_again_from_its_checkpoint(
    home: Path, unbroken: Distillation, tmp_path: Path, lost: tuple[str, ...]
) -> None:
    shutil.copytree(unbroken.model_path.parent, tmp_path / "run")
    for name in lost:
        path = tmp_path / "run" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    again = distilled(home, recipe(home / "text", tmp_path / "run"), resume=True)
    assert losses(again, "align") == losses(unbroken, "align")
    assert again.model_path == tmp_path / "run" / "model"
    for model in ("model", "align/model"):
        folders = (tmp_path / "run", unbroken.model_path.parent)
        found, expected = (AutoModelForCausalLM.from_pretrained(folder / model).state_dict() for folder in folders)
        assert all(torch.equal(x, found[name]) for name, x in expected.items())


def test_a_run_goes_on_only_as_it_began(home: Path, unbroken: Distillation) -> None:
    config = recipe(home / "text", home / "unbroken")
    with pytest.raises(ValueError, match="already holds a run"):
        distilled(home, config)
    with pytest.raises(ValueError, match="began with another swap"):
        distilled(home, config, swapped(home, "kda"), resume=True)
    with pytest.raises(ValueError, match=r"distill.steps was 16 and is 15"):
        distilled(home, replace(config, distill=replace(config.distill, steps=15)), resume=True)


def test_models_that_do_not_belong_together_are_refused(home: Path, tmp_path: Path) -> None:
    config, tokenizer = recipe(home / "text", tmp_path / "run"), AutoTokenizer.from_pretrained(home / "original")
    with pytest.raises(ValueError, match="LlamaForCausalLM has no swapped layer"):
        distilled(home, config, original_of(home))
    other = LlamaForCausalLM(LlamaConfig(vocab_size=320, hidden_size=16, num_hidden_layers=2, num_attention_heads=2))
    for original in (other, swapped(home)):
        with pytest.raises(ValueError, match=r"swapped from one of .*'hidden_size': 32.*, and the original given is"):
            distill(swapped(home), original, tokenizer, config)
    assert not (tmp_path / "run").exists()


def test_several_processes_are_refused(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class State:
        num_processes = 2

    monkeypatch.setattr(module, "PartialState", State)
    with pytest.raises(ValueError, match="this is one of 2"):
        distilled(home, recipe(home / "text", tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_rows_beyond_the_learned_positions_are_refused(home: Path, tmp_path: Path) -> None:
    models = [GPT2LMHeadModel(GPT2Config(vocab_size=320, n_positions=47, n_embd=32, n_layer=1, n_head=2)) for _ in "ab"]
    swap_attention(models[0], "gated_deltanet")
    with pytest.raises(ValueError, match="rows of align.row_length=48 exceed the 47 learned positions"):
        distill(*models, AutoTokenizer.from_pretrained(home / "original"), recipe(home / "text", tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_rows_longer_than_the_text_are_refused(home: Path, tmp_path: Path) -> None:
    text = write_text_folder(tmp_path / "text", bytes_per_file=100)
    config = recipe(text, tmp_path / "run")
    config = replace(config, finetune=replace(config.finetune, row_length=20_000))
    with pytest.raises(ValueError, match=r"row_length is 20,000, and .*/text, has [\d,]+ tokens, of which no row"):
        distilled(home, config)
    assert not (tmp_path / "run").exists(), "before anything is measured"


def test_16_bit_parameters_are_refused(home: Path, tmp_path: Path) -> None:
    config, tokenizer = recipe(home / "text", tmp_path / "run"), AutoTokenizer.from_pretrained(home / "original")
    with pytest.raises(ValueError, match="the model's parameters are torch.bfloat16"):
        distill(swapped(home).bfloat16(), original_of(home), tokenizer, config)
    with pytest.raises(ValueError, match="the original's parameters are torch.bfloat16"):
        distill(swapped(home), original_of(home).bfloat16(), tokenizer, config)


def test_under_teacher_forcing_the_model_is_the_original(home: Path) -> None:
    model, original, inputs = swapped(home), original_of(home), batch(home)
    with teacher_forced(model, original) as errors:
        forced = model(**inputs, use_cache=False).logits
    assert torch.equal(forced, original(**inputs, use_cache=False).logits)
    assert len(errors) == 2
    assert not torch.equal(forced, model(**inputs, use_cache=False).logits), "the hooks are gone afterwards"
    assert len(errors) == 2


def test_alignment_runs_without_dropout(home: Path, tmp_path: Path) -> None:
    """Dropout in the frozen embedding and softmax layers would add noise to the targets."""
    model = swapped(home, layers=[1], attention_dropout=0.5)
    config, original = recipe(home / "text", tmp_path), original_of(home)
    trainer = trainer_of(config, "align", home, model)
    with teacher_forced(model, original) as errors, torch.no_grad():
        model.eval()(**batch(home), use_cache=False)
    assert trainer.compute_loss(model.train(), batch(home)).item() == errors[0].item()
    with teacher_forced(model, original) as noisy, torch.no_grad():
        model.train()(**batch(home), use_cache=False)
    assert noisy[0] != errors[0], "the model has dropout"


def test_each_layer_learns_from_its_own_error_alone(home: Path) -> None:
    model = swapped(home)
    choose_trained_parameters(model, recipe(home / "text", home).stages["align"])
    with teacher_forced(model, original_of(home)) as errors:
        model(**batch(home), use_cache=False)
    errors[1].backward()
    touched = {name for name, p in model.named_parameters() if p.grad is not None}
    assert touched
    assert all("layers.1.self_attn.delta." in name for name in touched)


def test_what_is_trained_is_what_the_stage_says(home: Path) -> None:
    model = swapped(home)
    align, distill, _ = recipe(home / "text", home).stages.values()
    choose_trained_parameters(model, align)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if ".delta." in name}
    choose_trained_parameters(model, distill)
    assert all(p.requires_grad for p in model.parameters())


def test_the_original_is_not_trained(home: Path, tmp_path: Path) -> None:
    config = recipe(home / "text", tmp_path / "run")
    original = original_of(home).train()
    tokenizer = AutoTokenizer.from_pretrained(home / "original")
    distill(swapped(home), original, tokenizer, replace(config, align=None, finetune=None))
    assert not any(p.requires_grad for p in original.parameters()) and not original.training
    assert all(torch.equal(x, original_of(home).state_dict()[name]) for name, x in original.state_dict().items())


def test_the_divergence_is_that_of_the_definition() -> None:
    found, wanted = torch.randn(2, 2, 5, 7, dtype=torch.float64)
    p, q = wanted.softmax(-1), found.softmax(-1)
    expected = (p * (p / q).log()).sum(-1).mean()
    # The function works in float32: 7 terms of order 1, each rounded to 2^-24.
    assert abs(divergence(found, wanted).double() - expected) < 7 * 2**-22
    assert divergence(wanted, wanted) == 0


def test_the_text_adds_its_weight_to_the_divergence(home: Path, tmp_path: Path) -> None:
    """The added cross-entropy equals the loss that transformers reports for the same labels."""
    model, config = swapped(home), recipe(home / "text", tmp_path)
    inputs = collate_side_by_side(held_out_rows(home)[:4])
    assert inputs["labels"].eq(-100).sum() > 0
    found = []
    for weight in (0.0, 0.25):
        weighted = replace(config, distill=replace(config.distill, text_weight=weight))
        trainer = trainer_of(weighted, "distill", home, model)
        found.append(trainer.compute_loss(model, dict(inputs)).item())
    wanted = model(**inputs, use_cache=False).loss.item()
    # Means over some hundred tokens in float32, summed in another order.
    assert found[1] - found[0] == pytest.approx(0.25 * wanted, rel=1e-5)


def test_packed_documents_do_not_reach_each_other(home: Path) -> None:
    """In batches of rows, neither softmax attention, nor the recurrence, nor padding at the end."""
    model = swapped(home, layers=[1])
    rows = [[np.arange(5, 13), np.arange(13, 25)], [np.arange(40, 50)]]
    inputs = collate_side_by_side(rows)
    assert inputs["labels"].eq(-100).sum() == 3 + 10  # three beginnings, ten of padding
    logits = model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"], use_cache=False).logits
    for row, span in ((0, slice(0, 8)), (0, slice(8, 20)), (1, slice(0, 10))):
        alone = model(input_ids=inputs["input_ids"][row : row + 1, span], use_cache=False).logits
        torch.testing.assert_close(logits[row : row + 1, span], alone)


def test_scores_survive_on_disk(unbroken: Distillation) -> None:
    written = unbroken.model_path.parent / "scores.json"
    assert json.loads(written.read_text()) == unbroken.scores
