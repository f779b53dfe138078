"""A training run, from a configuration to a model on disk."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments, set_seed

from deltazoo.training.checkpoint_files import as_json, whole_or_not_at_all, write_whole
from deltazoo.training.config import (
    MODEL_CONFIG,
    RunConfig,
    TokenizerConfig,
    save_config,
)
from deltazoo.training.console import no_transformers_bars, say
from deltazoo.training.corpus import DEFAULT_TOKENIZER_SAMPLE, Corpus, read_corpus
from deltazoo.training.model import build_model
from deltazoo.training.native_model import refuse_replaced_tokenizer, refuse_unrunnable
from deltazoo.training.packed_rows import PackedRows, collate, collate_side_by_side, pack_in_order, spread
from deltazoo.training.run_folder import RESULT, begin_run, check_run, latest_checkpoint, refuse_other_text
from deltazoo.training.streamed_rows import StreamedRows
from deltazoo.training.text import Records, TextFiles, open_text
from deltazoo.training.tokenizer import build_tokenizer, encode_documents
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


def train(config: RunConfig, *, resume: bool = False) -> TrainingResult:
    """Train a model from scratch, or resume from the latest checkpoint in the run's folder.

    A resumed run has the losses that the uninterrupted run would have had. With more ``training.steps`` than before it
    continues past its former end, with the learning rates of a run of that many steps. A finished run is not trained
    again; its result is returned. Nothing is written before the configuration, the text and the model are checked.

    Args:
        config: what to train.
        resume: continue the run in ``config.output``.

    Raises:
        ValueError: the folder holds a run and ``resume`` is false, or no checkpoint and it is true; configuration or
            text differ from those that the run began with; the text cannot be read or the model cannot be built; a
            checkpoint or the stored result is damaged.
        TrainingDiverged: the loss became NaN or infinite.
        TrainingInterrupted: SIGINT or SIGTERM stopped the run; a checkpoint was saved.
        SaveError: the disk is full; earlier saves are intact.
    """
    folder = Path(config.output)
    check_run(config, folder, resume)
    with torch.device("meta"):
        model = build_model(config.model, build_tokenizer(TokenizerConfig("byte"), []), config.runtime)
        if config.architecture is not None:
            refuse_unrunnable(model)
    arguments = training_arguments(config)  # joins the other processes of a distributed run
    processes = PartialState()
    source = open_text(config.data)
    sample = config.tokenizer.training_bytes or DEFAULT_TOKENIZER_SAMPLE
    corpus = read_corpus(source, config.data, train_sample_bytes=sample)
    if resume:
        refuse_other_text(corpus, folder, config.data)
    stored = _stored_result(folder, corpus) if resume else None
    finished = stored is not None and stored.log_history[-1]["step"] == config.training.steps
    if stored is not None and finished and stored.model_path.is_dir():
        return stored
    latest = latest_checkpoint(folder, config.training.steps) if resume else None
    processes.wait_for_everyone()  # all have checked the folder before one writes into it
    with processes.main_process_first():
        tokenizer = _tokenizer(config, corpus, folder, resume or not processes.is_main_process)
    as_begun = config if latest is None else _with_saved_revision(config, latest)
    trainer = _trainer(as_begun, arguments, source, corpus, tokenizer)
    if latest is not None:
        say(f"the finished model is gone: made again from {latest}" if finished else f"going on from {latest}")
    with no_transformers_bars():
        trainer.train(resume_from_checkpoint=None if latest is None else str(latest))
    result = TrainingResult(
        model_path=folder / "model",
        log_history=trainer.state.log_history,
        num_parameters=trainer.num_parameters,
        tokens_per_step=trainer.monitor.tokens_per_step,
        seconds=trainer.monitor.seconds,
        tokens_per_second=trainer.monitor.tokens_per_second,
        device=device_name(trainer.args.device),
        precision="bf16" if trainer.args.bf16 else "fp32",
        corpus=corpus,
    )
    if stored is not None and finished:
        result = stored
    first = processes.is_main_process
    model_path = result.model_path
    with no_transformers_bars(), whole_or_not_at_all(model_path) if first else nullcontext(model_path) as staging:
        trainer.save_model(str(staging))
        if first:
            save_config(config, staging / MODEL_CONFIG)
    if first:
        values = {name: getattr(result, name) for name in _STORED}
        write_whole(folder / RESULT, as_json(values, indent=1))
    processes.wait_for_everyone()
    return result


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
    if len(validation_rows[-1]["input_ids"]) < settings.context_parallel:  # every process needs a token
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


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Recompute activations in the backward pass. transformers renames the method; 5.14 has only the old name."""
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


def training_rows(
    config: RunConfig,
    source: TextFiles | Records,
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    encoded: Sequence[np.ndarray] | None = None,
) -> PackedRows | StreamedRows:
    """The rows that a run reads, the same for any number of processes.

    ``encoded`` is the result of ``encode_training``, if it was called before. A stream is tokenized while it is read.
    """
    settings = config.training
    rows = settings.steps * settings.rows_of_a_step
    if config.data.streaming:
        assert isinstance(source, Records)
        remembered = 4 * settings.rows_of_a_step
        return StreamedRows(source, config.data, tokenizer, settings.row_length, remembered=remembered)
    encoded = encode_training(tokenizer, corpus) if encoded is None else encoded
    return PackedRows(encoded, settings.row_length, num_rows=rows, seed=config.seed)


def encode_training(tokenizer: PreTrainedTokenizerBase, corpus: Corpus) -> list[np.ndarray]:
    """Token ids of the training documents, each with its EOS token."""
    return encode_documents(tokenizer, corpus.train, "tokenizing the training text", with_end=True)


def _stored_result(folder: Path, corpus: Corpus) -> TrainingResult | None:
    """The stored result of a finished run; None if the run is not finished."""
    path = folder / RESULT
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return TrainingResult(model_path=folder / "model", corpus=corpus, **values)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged: {error}. Remove it, and the run goes on from its latest checkpoint"
        ) from error
