"""A training run, from a configuration to a model on disk: text, tokenizer, rows, model, training, result."""

import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from deltazoo.compat.transformers.new_model import build_native_model, refuse_replaced_tokenizer, refuse_unrunnable
from deltazoo.distributed import context_parallel
from deltazoo.models import DeltaRuleConfig  # the import also registers our model types with the Auto classes
from deltazoo.ops import ContextParallel
from deltazoo.runtime import RuntimeOptions
from deltazoo.spec import get_rule
from deltazoo.training.config import RunConfig
from deltazoo.training.console import say
from deltazoo.training.data import Corpus, read_corpus
from deltazoo.training.folder import (
    RESULT,
    begin_run,
    check_run,
    held,
    latest_checkpoint,
    refuse_other_text,
    whole_or_not_at_all,
    write_json,
)
from deltazoo.training.loading import load_tokenizer
from deltazoo.training.tokens import TokenizedText, begin_id, build_tokenizer, byte_tokenizer
from deltazoo.training.trainer import PackedTrainer, training_arguments


@dataclass(frozen=True)
class TrainingResult:
    """The result of a finished run.

    Attributes:
        model_path: folder for ``AutoModelForCausalLM.from_pretrained``, with the tokenizer.
        corpus: the text.
        log_history: the Trainer's log entries of the whole run, including those before a resume.
        num_parameters: parameters of the model, tied ones counted once.
        tokens_per_step: training tokens per optimizer step, over all devices.
        seconds: wall-clock time of training in this process, without validation and saving.
        tokens_per_second: training tokens over ``seconds``.
        device: name of the device.
        precision: ``bf16`` or ``fp32``.
        passes: number of times that the training text was read; None for a stream.
        finished_before: whether the run was finished before, so that nothing was trained.
    """

    model_path: Path
    corpus: Corpus
    log_history: list[dict[str, Any]]
    num_parameters: int
    tokens_per_step: int
    seconds: float
    tokens_per_second: float
    device: str
    precision: str
    passes: float | None = None
    finished_before: bool = field(default=False, compare=False)


def train(config: RunConfig, *, resume: bool = False) -> TrainingResult:
    """The result of training a model from scratch, or from the latest checkpoint in the run's folder.

    A resumed run has the losses of an uninterrupted run. With more ``training.steps`` than before it continues past its
    former end, with the learning rates of a run of so many steps. A finished run is not trained again; its result is
    returned. Nothing is written before the configuration, the text and the model are checked, and nothing but the
    tokenizer before its tokens are counted.

    Args:
        config: configuration of the run.
        resume: whether to continue the run in ``config.output``.

    Raises:
        ValueError: another process trains there; the folder holds a run and ``resume`` is false, or no checkpoint and
            it is true; configuration or text differ from those that the run began with; the text cannot be read
            or is shorter than a row; the model cannot be built; a checkpoint or the stored result is damaged.
        NotImplementedError: context parallelism of a rule that refuses it.
        TrainingDiverged: the loss became NaN or infinite.
        TrainingInterrupted: SIGINT or SIGTERM stopped the run; a checkpoint was saved.
        SaveError: the disk is full; earlier saves are intact.
    """
    folder = Path(config.output)
    check_run(config, resume)
    with held(folder):
        return _train(config, folder, resume)


def _train(config: RunConfig, folder: Path, resume: bool) -> TrainingResult:
    with torch.device("meta"):
        model = build_model(config.model, byte_tokenizer(), config.runtime)
        if config.architecture is not None:
            refuse_unrunnable(model)
        if config.training.context_parallel > 1:  # of this model, which is thrown away: a rule may refuse it
            context_parallel(model, ContextParallel())
    arguments = training_arguments(config)  # joins the other processes of a distributed run
    processes, steps = PartialState(), config.training.steps
    corpus = read_corpus(config.data)
    if resume:
        refuse_other_text(corpus, folder, config.data)
    stored = _stored_result(folder, corpus) if resume else None
    finished = stored is not None and stored.log_history[-1]["step"] == steps
    if stored is not None and finished and stored.model_path.is_dir():
        return stored
    latest = latest_checkpoint(folder, steps) if resume else None
    processes.wait_for_everyone()  # all processes check the folder before one writes into it
    with processes.main_process_first():
        tokenizer = _tokenizer(config, corpus, folder, resume or not processes.is_main_process)
    text = TokenizedText(corpus, tokenizer)
    set_seed(config.seed)
    model = build_model(_as_begun(config, latest), tokenizer, config.runtime)
    native = config.architecture is not None
    if native:
        refuse_replaced_tokenizer(model, tokenizer)
    else:
        tokens = f"{config.training.tokens_per_step:,} tokens"
        model.config.training_data = f"{corpus.description}; {steps:,} steps of {tokens}."
    # In one packed sequence transformers' softmax layers would compare each token with those of all rows.
    side_by_side = native and config.training.context_parallel == 1
    trainer = PackedTrainer(model, config, arguments, text, side_by_side=side_by_side)
    if latest is not None:
        say(f"the finished model is gone: made again from {latest}" if finished else f"going on from {latest}")
    figures = trainer.run(latest, folder / "model")
    result = stored if stored is not None and finished else TrainingResult(folder / "model", corpus, **figures)
    if processes.is_main_process:
        write_json(folder / RESULT, {name: getattr(result, name) for name in figures})
    processes.wait_for_everyone()
    return result


def _stored_result(folder: Path, corpus: Corpus) -> TrainingResult | None:
    """The stored result of a finished run; None if the run is not finished."""
    path = folder / RESULT
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return TrainingResult(folder / "model", corpus, finished_before=True, **values)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged: {error}. Remove it, and the run goes on from its latest checkpoint"
        ) from error


def _as_begun(config: RunConfig, checkpoint: Path | None) -> dict[str, Any]:
    """The model section, with the revision of the rule at the time of the checkpoint.

    Files of versions without revisions name none, which means the first.
    """
    if config.architecture is not None or checkpoint is None:
        return config.model
    saved = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    return {**config.model, "mixer_revision": saved.get("mixer_revision") or 1}


def _tokenizer(config: RunConfig, corpus: Corpus, folder: Path, exists: bool) -> PreTrainedTokenizerBase:
    """The tokenizer in the folder if it ``exists``; otherwise a new one, which begins the run."""
    if exists:
        if PartialState().is_main_process:
            begin_run(config, folder, corpus)
        return load_tokenizer(folder / "tokenizer")
    tokenizer = build_tokenizer(config.tokenizer, corpus.train)
    begin_run(config, folder, corpus)
    with whole_or_not_at_all(folder / "tokenizer") as staging:
        tokenizer.save_pretrained(staging)
    return tokenizer


def build_model(
    section: dict[str, Any], tokenizer: PreTrainedTokenizerBase, runtime: RuntimeOptions | None = None
) -> PreTrainedModel:
    """A new model, with weights drawn from torch's global generator.

    Args:
        section: ``mixer`` and keys of ``DeltaRuleConfig``. A rule with a Hub type of its own gets it, any other
            the model type ``delta_rule``. With ``architecture`` instead, see `build_native_model`.
        tokenizer: gives the vocabulary size and the ids of the special tokens.
        runtime: options that say how the model runs; by default the model decides.

    Raises:
        ValueError: an unknown rule or key, a value of the wrong type, or sizes that do not fit together.
    """
    runtime = runtime or RuntimeOptions()
    tokens = {"vocab_size": len(tokenizer), "bos_token_id": begin_id(tokenizer)}
    tokens |= {name: getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id")}
    try:
        if "architecture" in section:
            return build_native_model(section, tokens, runtime)
        return AutoModelForCausalLM.from_config(_own_configuration(section, tokens), **runtime.given())
    except StrictDataclassError as error:  # a value of the wrong type
        raise ValueError(f"model: {str(error).splitlines()[-1].strip()}") from error


def _own_configuration(section: dict[str, Any], tokens: dict[str, Any]) -> PreTrainedConfig:
    keys = dict(section)
    # A preset's default ratio may stay beside a width that is set for one run.
    usual = (None, DeltaRuleConfig.hidden_ratio)
    if keys.get("intermediate_size") is not None and keys.get("hidden_ratio") not in usual:
        raise ValueError("model.hidden_ratio has no effect beside model.intermediate_size: leave one of them out")
    spec = get_rule(keys.pop("mixer"))
    if spec.hub_model_type is None:
        keys["mixer"] = spec.name
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*keys that do not act on this model")
            return AutoConfig.for_model(spec.hub_model_type or "delta_rule", **tokens, **keys)
    except UserWarning as idle:
        raise ValueError(f"model: {idle}") from idle
