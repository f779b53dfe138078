"""A training run, from a configuration to a model on disk: text, tokenizer, rows, model, training, result."""

import json
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
    set_seed,
)

from deltazoo.models import DeltaRuleConfig  # registers our model types with the Auto classes, too
from deltazoo.runtime import RuntimeOptions
from deltazoo.spec import get_rule
from deltazoo.training.config import MODEL_CONFIG, RunConfig, save_config
from deltazoo.training.console import no_transformers_bars, say
from deltazoo.training.data import Corpus, Records, TextFiles, open_text, read_corpus
from deltazoo.training.folder import (
    RESULT,
    as_json,
    begin_run,
    check_run,
    held,
    latest_checkpoint,
    refuse_other_text,
    whole_or_not_at_all,
    write_whole,
)
from deltazoo.training.native_model import build_native_model, refuse_replaced_tokenizer, refuse_unrunnable
from deltazoo.training.tokens import (
    PackedRows,
    StreamedRows,
    begin_id,
    build_tokenizer,
    byte_tokenizer,
    collate,
    collate_side_by_side,
    encode_documents,
    num_tokens,
    pack_in_order,
    spread,
)
from deltazoo.training.trainer import PackedTrainer, training_arguments

_STORED = ("log_history", "num_parameters", "tokens_per_step", "seconds", "tokens_per_second", "device", "precision")


@dataclass(frozen=True)
class TrainingResult:
    """The result of a finished run.

    Attributes:
        model_path: folder for ``AutoModelForCausalLM.from_pretrained``, with the tokenizer.
        log_history: the Trainer's log entries of the whole run, including those before a resume.
        num_parameters: parameters of the model, tied ones counted once.
        tokens_per_step: training tokens per optimizer step, over all devices.
        seconds: wall-clock time of training in this process, without validation and saving.
        tokens_per_second: training tokens over ``seconds``.
        device: name of the device.
        precision: ``bf16`` or ``fp32``.
        corpus: the text.
        passes: how often the training text was read; None for a stream.
        finished_before: whether the run was finished already, and nothing was trained.
    """

    model_path: Path
    log_history: list[dict[str, Any]]
    num_parameters: int
    tokens_per_step: int
    seconds: float
    tokens_per_second: float
    device: str
    precision: str
    corpus: Corpus
    passes: float | None = None
    finished_before: bool = field(default=False, compare=False)


def train(config: RunConfig, *, resume: bool = False) -> TrainingResult:
    """Train a model from scratch, or resume from the latest checkpoint in the run's folder.

    A resumed run has the losses that the uninterrupted run would have had. With more ``training.steps`` than before it
    continues past its former end, with the learning rates of a run of that many steps. A finished run is not trained
    again; its result is returned. Nothing is written before the configuration, the text and the model are checked.

    Args:
        config: what to train.
        resume: continue the run in ``config.output``.

    Raises:
        ValueError: another process trains there; the folder holds a run and ``resume`` is false, or no checkpoint and
            it is true; configuration or text differ from those that the run began with; the text cannot be read or the
            model cannot be built; a checkpoint or the stored result is damaged.
        TrainingDiverged: the loss became NaN or infinite.
        TrainingInterrupted: SIGINT or SIGTERM stopped the run; a checkpoint was saved.
        SaveError: the disk is full; earlier saves are intact.
    """
    folder = Path(config.output)
    check_run(config, folder, resume)
    with held(folder):
        return _train(config, folder, resume)


def _train(config: RunConfig, folder: Path, resume: bool) -> TrainingResult:
    with torch.device("meta"):
        model = build_model(config.model, byte_tokenizer(), config.runtime)
        if config.architecture is not None:
            refuse_unrunnable(model)
    arguments = training_arguments(config)  # joins the other processes of a distributed run
    processes, steps = PartialState(), config.training.steps
    source = open_text(config.data)
    corpus = read_corpus(source, config.data)
    if resume:
        refuse_other_text(corpus, folder, config.data)
    stored = _stored_result(folder, corpus) if resume else None
    finished = stored is not None and stored.log_history[-1]["step"] == steps
    if stored is not None and finished and stored.model_path.is_dir():
        return stored
    latest = latest_checkpoint(folder, steps) if resume else None
    processes.wait_for_everyone()  # all have checked the folder before one writes into it
    with processes.main_process_first():
        tokenizer = _tokenizer(config, corpus, folder, resume or not processes.is_main_process)
    as_begun = config if latest is None else _with_saved_revision(config, latest)
    trainer = _trainer(as_begun, arguments, source, corpus, tokenizer)
    if latest is not None:
        say(f"the finished model is gone: made again from {latest}" if finished else f"going on from {latest}")
    with no_transformers_bars():
        trainer.train(resume_from_checkpoint=None if latest is None else str(latest))
    monitor, rows, trained = trainer.monitor, trainer.train_dataset, trainer.model
    assert trained is not None
    tokens = steps * monitor.tokens_per_step
    result = TrainingResult(
        model_path=folder / "model",
        log_history=trainer.state.log_history,
        num_parameters=sum(parameter.numel() for parameter in trained.parameters()),
        tokens_per_step=monitor.tokens_per_step,
        seconds=monitor.seconds,
        tokens_per_second=monitor.tokens_per_second,
        device=device_name(trainer.args.device),
        precision="bf16" if trainer.args.bf16 else "fp32",
        corpus=corpus,
        passes=tokens / rows.tokens_per_epoch if isinstance(rows, PackedRows) else None,
    )
    if stored is not None and finished:
        result = stored
    first, model_path = processes.is_main_process, result.model_path
    with no_transformers_bars(), whole_or_not_at_all(model_path) if first else nullcontext(model_path) as staging:
        trainer.save_model(str(staging))
        if first:
            save_config(config, staging / MODEL_CONFIG)
    if first:
        values = {name: getattr(result, name) for name in (*_STORED, "passes")}
        write_whole(folder / RESULT, as_json(values, indent=1))
    processes.wait_for_everyone()
    return result


def _stored_result(folder: Path, corpus: Corpus) -> TrainingResult | None:
    """The stored result of a finished run; None if the run is not finished."""
    path = folder / RESULT
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return TrainingResult(model_path=folder / "model", corpus=corpus, finished_before=True, **values)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged: {error}. Remove it, and the run goes on from its latest checkpoint"
        ) from error


def _with_saved_revision(config: RunConfig, checkpoint: Path) -> RunConfig:
    """The configuration with the revision of the rule that a checkpoint was trained with.

    Files from before there were several name none, and have the first.
    """
    if config.architecture is not None:
        return config
    saved = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    return replace(config, model={**config.model, "mixer_revision": saved.get("mixer_revision") or 1})


def device_name(device: torch.device) -> str:
    """The name of a device, such as ``NVIDIA H200`` or ``CPU, 2 threads``."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads" if device.type == "cpu" else device.type


def _tokenizer(config: RunConfig, corpus: Corpus, folder: Path, exists: bool) -> PreTrainedTokenizerBase:
    """The tokenizer in the folder if it ``exists``; else a new one. Begins the run."""
    if exists:
        if PartialState().is_main_process:
            begin_run(config, folder, corpus)
        return AutoTokenizer.from_pretrained(folder / "tokenizer")
    tokenizer = build_tokenizer(config.tokenizer, corpus.train)
    begin_run(config, folder, corpus)
    with whole_or_not_at_all(folder / "tokenizer") as staging:
        tokenizer.save_pretrained(staging)
    return tokenizer


def _trainer(
    config: RunConfig,
    arguments: TrainingArguments,
    source: TextFiles | Records,
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
) -> PackedTrainer:
    settings = config.training
    validation = encode_documents(tokenizer, corpus.validation, "tokenizing the held-out text")
    train_rows = training_rows(config, source, corpus, tokenizer)
    set_seed(config.seed)
    model = build_model(config.model, tokenizer, config.runtime)
    tokens_per_step = settings.row_length * settings.rows_of_a_step
    native = config.architecture is not None
    if native:
        refuse_replaced_tokenizer(model, tokenizer)
    else:
        model.config.training_data = f"{corpus.description}; {settings.steps:,} steps of {tokens_per_step:,} tokens."
    if settings.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    validation_rows = pack_in_order(validation, settings.row_length)
    if num_tokens(validation_rows[-1]) < settings.context_parallel:  # every process needs a token
        del validation_rows[-1]
    return PackedTrainer(
        model=model,
        tokenizer=tokenizer,
        config=config,
        arguments=arguments,
        train_rows=train_rows,
        validation_rows=spread(validation_rows, settings.evaluation_rows),
        bytes_per_token=corpus.validation_bytes / sum(len(ids) - 1 for ids in validation),
        # transformers' softmax layers would compare each token with those of all rows in one packed sequence.
        collate_rows=collate_side_by_side if native and settings.context_parallel == 1 else collate,
    )


def training_rows(
    config: RunConfig,
    source: TextFiles | Records,
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    encoded: Sequence[np.ndarray] | None = None,
) -> PackedRows | StreamedRows:
    """The rows that a run reads, the same for any number of processes; a stream is tokenized while it is read.

    ``encoded`` is the result of `encode_training`, if it was called before.
    """
    settings, size = config.training, config.training.row_length
    count = settings.steps * settings.rows_of_a_step
    if isinstance(source, Records) and config.data.streaming:
        remembered = 4 * settings.rows_of_a_step
        return StreamedRows(source, config.data, tokenizer, size, num_rows=count, remembered=remembered)
    encoded = encode_training(tokenizer, corpus) if encoded is None else encoded
    return PackedRows(encoded, size, num_rows=count, seed=config.seed)


def encode_training(tokenizer: PreTrainedTokenizerBase, corpus: Corpus) -> list[np.ndarray]:
    """Token ids of the training documents, each with its EOS token."""
    return encode_documents(tokenizer, corpus.train, "tokenizing the training text", with_end=True)


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Recompute activations in the backward pass. transformers renames the method; 5.14 has only the old name."""
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


def build_model(
    section: dict[str, Any], tokenizer: PreTrainedTokenizerBase, runtime: RuntimeOptions | None = None
) -> PreTrainedModel:
    """A new model, its weights drawn from torch's global generator.

    Args:
        section: ``mixer`` and keys of ``DeltaRuleConfig``. A rule with a Hub type of its own gets it, any other
            the model type ``delta_rule``. With ``architecture`` instead, see `build_native_model`.
        tokenizer: gives the vocabulary size and the ids of the special tokens.
        runtime: how the model runs; by default the model decides.

    Raises:
        ValueError: an unknown rule or key, a value of the wrong type, or sizes that do not fit together.
    """
    runtime = runtime or RuntimeOptions()
    if "architecture" in section:
        return build_native_model(section, tokenizer, runtime)
    keys = dict(section)
    # A preset's default ratio may stand beside a width that is set for one run.
    usual = (None, DeltaRuleConfig.hidden_ratio)
    if keys.get("intermediate_size") is not None and keys.get("hidden_ratio") not in usual:
        raise ValueError("model.hidden_ratio has no effect beside model.intermediate_size: leave one of them out")
    spec = get_rule(keys.pop("mixer"))
    if spec.hub_model_type is None:
        keys["mixer"] = spec.name
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*keys that do not act on this model")
            config = AutoConfig.for_model(
                spec.hub_model_type or "delta_rule",
                vocab_size=len(tokenizer),
                bos_token_id=begin_id(tokenizer),
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
                **keys,
            )
    except UserWarning as idle:
        raise ValueError(f"model: {idle}") from idle
    except StrictDataclassError as error:  # a value of the wrong type
        raise ValueError(f"model: {str(error).splitlines()[-1].strip()}") from error
    return AutoModelForCausalLM.from_config(config, **runtime.given())
