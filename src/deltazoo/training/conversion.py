"""Train a swapped model through the stages of a recipe, each resumable, with scores on held-out text."""

import json
import math
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from deltazoo.generation.position_limit import check_positions
from deltazoo.swap.layer import swapped_layers
from deltazoo.training.folder import as_json, checkpoints, whole_or_not_at_all, write_whole
from deltazoo.training.config import MODEL_CONFIG, DataConfig, RunConfig, save_config
from deltazoo.training.console import console, no_transformers_bars
from deltazoo.training.conversion_config import (
    STAGES,
    ConversionConfig,
    DistillationConfig,
    StageConfig,
    load_conversion,
)
from deltazoo.training.data import DEFAULT_TOKENIZER_SAMPLE, read_corpus
from deltazoo.training.tokens import collate_side_by_side, pack_in_order, spread
from deltazoo.training.folder import RESULT, SCORES, SWAP, begin_run, check_run, refuse_other_text
from deltazoo.training.stage_trainers import (
    AlignmentTrainer,
    DistillationTrainer,
    choose_trained_parameters,
    original_of,
)
from deltazoo.training.data import open_text
from deltazoo.training.tokens import encode_documents
from deltazoo.training.trainer import PackedTrainer, training_arguments
from deltazoo.training.run import device_name, enable_gradient_checkpointing, training_rows
from deltazoo.training.training_run import encode_training
from deltazoo.training.validation_loss import score_rows

__all__ = [
    "ConversionResult",
    "ConversionText",
    "StageResult",
    "check_row_lengths",
    "convert",
    "read_stage",
    "run_stage",
    "save_swapped",
    "stage_as_run",
]


@dataclass(frozen=True)
class StageResult:
    """The result of a finished stage.

    Attributes:
        history: the Trainer's log entries, including those before a resume.
        tokens: training tokens read.
        seconds: wall-clock time of training in the process that finished it, without validation and saving.
        tokens_per_second: training tokens per second in that process.
        trained_parameters: number of trained parameters.
        device: name of the device.
    """

    history: list[dict[str, Any]]
    tokens: int
    seconds: float
    tokens_per_second: float
    trained_parameters: int
    device: str


@dataclass(frozen=True)
class ConversionResult:
    """The result of a finished conversion.

    Attributes:
        model_path: folder for ``AutoModelForCausalLM.from_pretrained``, with the tokenizer.
        scores: held-out bits per byte of ``original``, ``transfer`` (swapped, before the first stage) and every stage;
            all with the longest row length of any stage.
        stages: results by stage, in order.
    """

    model_path: Path
    scores: dict[str, float]
    stages: dict[str, StageResult]


class ConversionText:
    """The text of a conversion, tokenized for one model."""

    def __init__(self, data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.data, self.tokenizer = data, tokenizer
        self.source = open_text(data)
        self.corpus = read_corpus(self.source, data, train_sample_bytes=DEFAULT_TOKENIZER_SAMPLE)

    @cached_property
    def training(self) -> list[np.ndarray] | None:
        """Token ids of the training documents; None for a stream."""
        return None if self.data.streaming else encode_training(self.tokenizer, self.corpus)

    @cached_property
    def validation(self) -> list[np.ndarray]:
        """Token ids of the held-out documents."""
        return encode_documents(self.tokenizer, self.corpus.validation, "tokenizing the held-out text")

    @property
    def bytes_per_token(self) -> float:
        """Of the held-out text."""
        return self.corpus.validation_bytes / sum(len(ids) - 1 for ids in self.validation)

    def validation_rows(self, row_length: int) -> list[dict[str, np.ndarray]]:
        """The whole held-out text in rows."""
        return pack_in_order(self.validation, row_length)

    def bits_per_byte(self, model: PreTrainedModel, stage: StageConfig) -> float:
        """Bits per byte of the held-out text; no row has context from before its beginning.

        Raises:
            FloatingPointError: they are NaN or infinite.
        """
        rows = self.validation_rows(stage.row_length)
        nats, tokens = score_rows(model, rows, stage.rows_per_batch, collate_side_by_side)
        if not math.isfinite(nats):
            raise FloatingPointError(f"the model's negative log-likelihood of the held-out text is {nats}")
        return nats / tokens / math.log(2) / self.bytes_per_token


def save_swapped(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Path:
    """Save a swapped model and its tokenizer into ``folder/model``, whole or not at all.

    Raises:
        ValueError: the folder exists already.
    """
    target = folder / "model"
    if target.exists():
        raise ValueError(f"{target} exists already: choose another --output")
    with whole_or_not_at_all(target) as staging:
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
    return target


def check_row_lengths(model: PreTrainedModel, config: ConversionConfig) -> None:
    """Raise ValueError if the rows of a stage exceed the model's learned positions."""
    for stage in config.stages:
        check_positions(model, stage.row_length, f"rows of {stage.section}.row_length={stage.row_length}")


def convert(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: ConversionConfig,
    *,
    resume: bool = False,
    text: ConversionText | None = None,
) -> ConversionResult:
    """Train a freshly swapped model through the configured stages.

    Args:
        model: swapped with ``keep_teacher=True`` and not trained since; it holds the original attention. The first
            stage trains it in place. The result is the model on disk.
        tokenizer: the model's own.
        config: stages, text and folder.
        resume: continue the run in ``config.output``.
        text: ``config.data`` read with this tokenizer, if several conversions share it.

    Raises:
        ValueError: the model is not swapped or has no teachers; rows exceed its learned positions; there is more than
            one process; the folder holds a run and ``resume`` is false; swap, configuration or text differ from those
            that the run began with.
        TrainingDiverged: a loss became NaN or infinite.
        FloatingPointError: the held-out score is NaN or infinite.
        SaveError: the disk is full; earlier saves are intact.
    """
    layers = swapped_layers(model)
    if not layers or any(layer.teacher is None for layer in layers.values()):
        raise ValueError(
            "convert needs a model whose attention was swapped with keep_teacher=True: the stages learn from the "
            f"original, and {type(model).__name__} has {'no swapped layer' if not layers else 'not kept it'}"
        )
    if model.dtype != torch.float32:
        raise ValueError(
            f"the model's parameters are {model.dtype}, in which small updates are lost: load it with "
            "dtype=torch.float32 (bf16 products are a matter of the stage's precision)"
        )
    check_row_lengths(model, config)
    if text is not None and text.data != config.data:
        raise ValueError(f"text was read from {text.data}, and the recipe asks for {config.data}")
    folder = Path(config.output)
    first = config.stages[0]
    longest = max(config.stages, key=lambda stage: stage.row_length)  # scores are comparable only with one row length
    rule = next(iter(layers.values())).delta.spec.name
    arguments = training_arguments(stage_as_run(first, rule, config, folder))
    if arguments.world_size > 1:
        raise ValueError(f"a conversion runs in one process, and this is one of {arguments.world_size}")
    device: Any = arguments.device
    check_run(config, folder, resume, load=load_conversion, stages=STAGES)
    text = text or ConversionText(config.data, tokenizer)
    swap = {"model_type": model.config.model_type, "layers": model.config.delta_layers}
    if resume:
        refuse_other_text(text.corpus, folder, config.data)
        _refuse_other_swap(swap, folder / SWAP)
    else:
        (folder / SCORES).unlink(missing_ok=True)  # left by a run that saved nothing else
    begin_run(config, folder, text.corpus)
    _write(folder / SWAP, swap)
    scores = _Scores(folder / SCORES)
    original = original_of(model).to(device)
    if "transfer" not in scores.values:
        scores.record("original", text.bits_per_byte(original, longest))
        scores.record("transfer", text.bits_per_byte(model.to(device), longest))
    results = {}
    for stage in config.stages:
        run = stage_as_run(stage, rule, config, folder)
        path = _model_path(stage, config, folder)
        if not ((Path(run.output) / RESULT).is_file() and path.is_dir()):
            run_stage(model, text, stage, run, original, path)
        results[stage.section] = read_stage(Path(run.output))
        # Reloaded after every stage, so that a resumed run continues from exactly the same weights.
        with no_transformers_bars():
            runtime = model.runtime.given()  # type: ignore[union-attr, operator]
            model = AutoModelForCausalLM.from_pretrained(path, **runtime).to(device)
        if stage.section not in scores.values:
            scores.record(stage.section, text.bits_per_byte(model, longest))
    return ConversionResult(folder / "model", scores.values, results)


def run_stage(
    model: PreTrainedModel,
    text: ConversionText,
    stage: StageConfig,
    run: RunConfig,
    original: PreTrainedModel | None = None,
    model_path: Path | None = None,
) -> None:
    """Train one stage, or resume from its latest checkpoint; writes its result into the run's folder.

    Args:
        model: trained in place.
        text: training and held-out text.
        stage: which loss, and its settings.
        run: the stage as a run, see ``StageConfig.as_run``.
        original: the model to distil from, for that stage only.
        model_path: folder for the trained model; by default ``model`` in the run's folder.
    """
    folder = Path(run.output)
    folder.mkdir(parents=True, exist_ok=True)
    choose_trained_parameters(model, stage)
    if stage.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    trainer = _trainer(model, text, stage, run, original)
    latest = checkpoints(folder)[-1:]
    begun = f"going on from {latest[0]}" if latest else f"{stage.steps} steps"
    console.print(f"[bold]{stage.section}[/]: {begun}", highlight=False)
    with no_transformers_bars():
        trainer.train(resume_from_checkpoint=str(latest[0]) if latest else None)
        with whole_or_not_at_all(model_path or folder / "model") as staging:
            trainer.save_model(str(staging))
            save_config(run, staging / MODEL_CONFIG)
    monitor = trainer.monitor
    result = StageResult(
        history=trainer.state.log_history,
        tokens=stage.steps * monitor.tokens_per_step,
        seconds=monitor.seconds,
        tokens_per_second=monitor.tokens_per_second,
        trained_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        device=device_name(trainer.args.device),
    )
    _write(folder / RESULT, asdict(result))


def read_stage(folder: Path) -> StageResult:
    """The result of a finished stage."""
    return StageResult(**json.loads((folder / RESULT).read_text(encoding="utf-8")))


def _trainer(
    model: PreTrainedModel, text: ConversionText, stage: StageConfig, run: RunConfig, original: PreTrainedModel | None
) -> PackedTrainer:
    arguments = training_arguments(run)
    set_seed(run.seed)
    given: dict[str, Any] = {
        "model": model,
        "tokenizer": text.tokenizer,
        "config": run,
        "arguments": arguments,
        "train_rows": training_rows(run, text.source, text.corpus, text.tokenizer, text.training),
        "validation_rows": spread(text.validation_rows(stage.row_length), stage.evaluation_rows),
        "bytes_per_token": text.bytes_per_token,
        "collate_rows": collate_side_by_side,
    }
    if stage.section == "align":
        return AlignmentTrainer(**given)
    if isinstance(stage, DistillationConfig):
        assert original is not None
        return DistillationTrainer(**given, original=original, text_weight=stage.text_weight)
    return PackedTrainer(**given)


def stage_as_run(stage: StageConfig, rule: str, config: ConversionConfig, folder: Path) -> RunConfig:
    """A stage as a run in a subfolder; each stage has its own seed and so its own order of the documents."""
    number = STAGES.index(stage.section)
    tokenizer = _model_path(stage, config, folder)
    return stage.as_run(folder / stage.section, rule, tokenizer, config.data, seed=config.seed + number)


def _model_path(stage: StageConfig, config: ConversionConfig, folder: Path) -> Path:
    """The last stage's model is in the conversion's folder, where ``deltazoo eval`` looks; others in their stage's."""
    return (folder if stage is config.stages[-1] else folder / stage.section) / "model"


class _Scores:
    """Held-out scores on disk; a resumed run does not measure them again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.values: dict[str, float] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def record(self, name: str, bits: float) -> None:
        self.values[name] = bits
        _write(self._path, self.values)
        console.print(f"[bold]{name}[/]: {bits:.3f} held-out bits per byte", highlight=False)


def _refuse_other_swap(swap: dict[str, Any], written: Path) -> None:
    """Raise ValueError unless the run began with the same swap."""
    if json.loads(written.read_text(encoding="utf-8")) != json.loads(json.dumps(swap)):
        raise ValueError(f"the run in {written.parent} began with another swap: see {written}")


def _write(path: Path, values: Any) -> None:
    write_whole(path, as_json(values, indent=1))
