"""Distillation: a swapped model trained through the stages of a recipe, each resumable, with held-out scores."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.loss.loss_utils import ForCausalLMLoss

from deltazoo.compat.fla.checkpoints import whole_model
from deltazoo.generation.conditions import check_positions
from deltazoo.swap.families import decoder_layers_of, family_of
from deltazoo.swap.layer import swapped_layers
from deltazoo.training.config import (
    STAGES,
    AlignConfig,
    DistillConfig,
    OptimizationConfig,
    Recipe,
    RunConfig,
    StageConfig,
    TokenizerConfig,
)
from deltazoo.training.console import console, no_transformers_bars
from deltazoo.training.data import read_corpus
from deltazoo.training.evaluate import score_rows
from deltazoo.training.folder import (
    RESULT,
    SCORES,
    SWAP,
    begin_run,
    check_run,
    checkpoints,
    held,
    refuse_other_text,
    write_json,
)
from deltazoo.training.tokens import TokenizedText, collate_side_by_side, pack_in_order
from deltazoo.training.trainer import PackedTrainer, training_arguments


@dataclass(frozen=True)
class Distillation:
    """The result of a finished distillation.

    Attributes:
        model_path: folder for ``AutoModelForCausalLM.from_pretrained``, with the tokenizer.
        scores: held-out bits per byte of ``original``, ``transfer`` (before the first stage) and every stage, all with
            the longest row length of any stage.
        histories: the Trainer's log entries by stage, including those before a resume.
    """

    model_path: Path
    scores: dict[str, float]
    histories: dict[str, list[dict[str, Any]]]


def distill(
    model: PreTrainedModel,
    original: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    *,
    resume: bool = False,
) -> Distillation:
    """The result of training a swapped model through the stages of a recipe.

    Args:
        model: a swapped model. The first stage trains it in place. The result is the model on disk.
        original: the model whose attention was swapped; it becomes frozen.
        tokenizer: tokenizer of both models.
        recipe: stages, text and folder.
        resume: whether to continue the run in ``recipe.output``.

    Raises:
        ValueError: the model is not swapped, or from another ``original``; rows exceed its learned positions; there is
            more than one process; a row is longer than the text; another process trains in the folder; the folder holds
            a run and ``resume`` is false; swap, recipe or text differ from those that the run began with.
        TrainingDiverged: a loss became NaN or infinite.
        FloatingPointError: the held-out score is NaN or infinite.
        SaveError: the disk is full; earlier saves are intact.
    """
    folder = Path(recipe.output)
    _check_models(model, original, recipe)
    device: Any = PartialState().device
    check_run(recipe, resume)
    with held(folder):
        run = _Run(recipe, tokenizer, model, resume)
        original = original.requires_grad_(False).eval().to(device)
        run.score("original", original)
        run.score("transfer", model.to(device))
        histories = {}
        for name in recipe.stages:
            path = _model_path(name, recipe)
            result = folder / name / RESULT
            if not (result.is_file() and path.is_dir()):
                run.train(name, model, original, path)
            histories[name] = json.loads(result.read_text(encoding="utf-8"))["log_history"]
            # Reloaded after every stage, so that a resumed run continues from exactly the same weights.
            with no_transformers_bars():
                runtime = model.runtime.given()  # type: ignore[union-attr, operator]
                model = whole_model(path, **runtime).to(device)
            run.score(name, model)
    return Distillation(folder / "model", run.scores, histories)


class _Run:
    """The text of a distillation, and its files: swap and recipe, scores, results of stages."""

    def __init__(
        self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, resume: bool
    ) -> None:
        self.recipe, self.folder = recipe, Path(recipe.output)
        self.rule = next(iter(swapped_layers(model).values())).delta.spec.name
        corpus = read_corpus(recipe.data)
        self.text = TokenizedText(corpus, tokenizer)
        self.longest = max(recipe.stages.values(), key=lambda stage: stage.row_length)
        self.text.training_rows(self.longest, recipe.seed)  # raises before any work if the text is too short
        swap = {"model_type": model.config.model_type, "layers": model.config.delta_layers}
        if resume:
            refuse_other_text(corpus, self.folder, recipe.data)
            if _read(self.folder / SWAP) != json.loads(json.dumps(swap)):
                raise ValueError(f"the run in {self.folder} began with another swap: see {self.folder / SWAP}")
        else:
            (self.folder / SCORES).unlink(missing_ok=True)  # a run that saved nothing else left it
        begin_run(recipe, self.folder, corpus)
        write_json(self.folder / SWAP, swap)
        self.scores: dict[str, float] = _read(self.folder / SCORES) if (self.folder / SCORES).is_file() else {}

    def score(self, name: str, model: PreTrainedModel) -> None:
        """Keep and print bits per byte of the held-out text, unless a run before a resume has them.

        No row has context from before its beginning, so only scores of one row length compare: the longest.
        """
        if name in self.scores:
            return
        rows = pack_in_order(self.text.validation, self.longest.row_length)
        nats, tokens = score_rows(model, rows, self.longest.rows_per_batch, collate_side_by_side)
        if not math.isfinite(nats):
            raise FloatingPointError(f"the model's negative log-likelihood of the held-out text is {nats}")
        self.scores[name] = nats / tokens / math.log(2) / self.text.bytes_per_token
        write_json(self.folder / SCORES, self.scores)
        console.print(f"[bold]{name}[/]: {self.scores[name]:.3f} held-out bits per byte", highlight=False)

    def train(self, name: str, model: PreTrainedModel, original: PreTrainedModel, model_path: Path) -> None:
        """Train a stage from its beginning or its latest checkpoint, and write its model and its result."""
        stage, run, folder = self.recipe.stages[name], _as_run(name, self.recipe, self.rule), self.folder / name
        set_seed(run.seed)
        choose_trained_parameters(model, stage)
        trainer = DistillationTrainer(stage, original, model, run, training_arguments(run), self.text)
        folder.mkdir(exist_ok=True)
        latest = checkpoints(folder)[-1:]
        begun = f"going on from {latest[0]}" if latest else f"{stage.steps} steps"
        console.print(f"[bold]{name}[/]: {begun}", highlight=False)
        write_json(folder / RESULT, trainer.run(latest[0] if latest else None, model_path))


class DistillationTrainer(PackedTrainer):
    """The Trainer of a stage, whose loss is about the original's attention, its predictions, or the text alone.

    Args:
        stage: settings of the stage, whose class decides the loss.
        original: the model before the swap, frozen.
        given: arguments of `PackedTrainer`, beginning with the swapped model.
    """

    def __init__(self, stage: StageConfig, original: PreTrainedModel, *given: Any) -> None:
        super().__init__(*given, side_by_side=True)
        self._stage, self._original = stage, original
        if isinstance(stage, AlignConfig | DistillConfig):
            self.model_accepts_loss_kwargs = False  # the losses are means, so accumulation must divide them

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The stage's loss on a batch.

        ``align``: relative squared error of a layer's output, averaged over the layers, all in one forward pass.
        ``distill``: KL(original || model) in nats, mean over tokens, temperature 1, plus ``text_weight`` times the
        cross-entropy on the text. The text corrects errors of the original model; the original's predictions are less
        noisy than a small amount of text. ``finetune``: cross-entropy on the text.
        """
        if not isinstance(self._stage, AlignConfig | DistillConfig):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        labels: Any = inputs.get("labels")
        inputs = {name: tensor for name, tensor in inputs.items() if name != "labels"}
        if isinstance(self._stage, AlignConfig):
            model.eval()  # dropout in the frozen layers would only add noise to the targets
            with teacher_forced(self._model, self._original) as errors:
                model(**inputs, use_cache=False, logits_to_keep=1)
            return torch.stack(errors).mean()
        # The Trainer applies autocast only to the model it trains.
        with torch.no_grad(), torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.args.bf16):
            wanted = self._original(**inputs, use_cache=False).logits
        found = model(**inputs, use_cache=False).logits
        loss, weight = divergence(found, wanted), self._stage.text_weight
        return loss + weight * ForCausalLMLoss(found, labels, found.shape[-1]) if weight else loss


@contextmanager
def teacher_forced(model: nn.Module, original: PreTrainedModel) -> Iterator[list[Tensor]]:
    """A context in which each swapped layer returns the output of the original's attention and records its own error.

    Errors do not add up from layer to layer, because the next layer gets the original attention's output.

    Yields:
        The errors ``|y - t|^2 / |t|^2`` of the forward passes so far, over all tokens, with ``t`` the original's
        output: one scalar per layer and pass, differentiable in the new layers' parameters.
    """
    family = family_of(original.config)
    originals = [getattr(layer, family.attention) for layer in decoder_layers_of(original, family)]
    errors: list[Tensor] = []

    def use_original_output(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        with torch.no_grad():
            wanted = originals[layer.layer_idx](*args, **kwargs)
        errors.append(relative_error(output[0], wanted[0]))
        return wanted

    layers = swapped_layers(model).values()
    handles = [layer.register_forward_hook(use_original_output, with_kwargs=True) for layer in layers]
    try:
        yield errors
    finally:
        for handle in handles:
            handle.remove()


def relative_error(found: Tensor, wanted: Tensor) -> Tensor:
    """``|found - wanted|^2 / |wanted|^2`` over all elements, in float32."""
    found, wanted = found.float(), wanted.float()
    return (found - wanted).square().sum() / wanted.square().sum()


def divergence(found: Tensor, wanted: Tensor) -> Tensor:
    """KL(wanted || found) of two sets of logits ``[B, T, vocabulary]``: nats, mean over B and T, in float32."""
    found, wanted = (F.log_softmax(logits.float().flatten(0, 1), dim=-1) for logits in (found, wanted))
    return F.kl_div(found, wanted, log_target=True, reduction="batchmean")


def choose_trained_parameters(model: PreTrainedModel, stage: StageConfig) -> None:
    """Set ``requires_grad`` for the parameters that the stage trains."""
    model.requires_grad_(stage.trains == "all")
    for layer in swapped_layers(model).values():
        layer.delta.requires_grad_(True)


def _check_models(model: PreTrainedModel, original: PreTrainedModel, recipe: Recipe) -> None:
    """Raise ValueError unless a model is swapped, may come from ``original``, and can be trained."""
    if not swapped_layers(model):
        raise ValueError(f"{type(model).__name__} has no swapped layer to train: `deltazoo swap` writes such models")
    sizes = ("hidden_size", "num_hidden_layers", "vocab_size")
    # The class has the model type: of a configuration read from a file, the attribute stays that of the file.
    kinds = (model.config.original_model_type, type(original.config).model_type)
    ours, theirs = (
        {"model_type": kind, **{name: getattr(config, name, None) for name in sizes}}
        for kind, config in zip(kinds, (model.config, original.config), strict=True)
    )
    if ours != theirs:
        raise ValueError(f"the model was swapped from one of {ours}, and the original given is one of {theirs}")
    for name, given in (("model", model), ("original", original)):
        if given.dtype != torch.float32:
            raise ValueError(
                f"the {name}'s parameters are {given.dtype}, in which small updates are lost: load it with "
                "dtype=torch.float32 (bf16 products are a matter of the stage's precision)"
            )
    for name, stage in recipe.stages.items():
        check_positions(model, stage.row_length, f"rows of {name}.row_length={stage.row_length}")
    if PartialState().num_processes > 1:
        raise ValueError(f"a distillation runs in one process, and this is one of {PartialState().num_processes}")


def _as_run(name: str, recipe: Recipe, rule: str) -> RunConfig:
    """A stage as a run in a subfolder; each stage has its own seed and so its own order of the documents."""
    stage = recipe.stages[name]
    return RunConfig(
        output=str(Path(recipe.output) / name),
        model={"mixer": rule},
        training=OptimizationConfig(**{key.name: getattr(stage, key.name) for key in fields(OptimizationConfig)}),
        tokenizer=TokenizerConfig(kind="pretrained", path=str(_model_path(name, recipe))),
        data=recipe.data,
        seed=recipe.seed + STAGES.index(name),
    )


def _model_path(name: str, recipe: Recipe) -> Path:
    """Folder of a stage's model: for the last stage in the run's folder, where ``deltazoo eval`` looks."""
    last = name == list(recipe.stages)[-1]
    return Path(recipe.output) / ("model" if last else f"{name}/model")


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
