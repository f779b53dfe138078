"""The configuration of a training run: keys and ranges of its YAML file, and overrides."""

import copy
import dataclasses
import json
import re
from collections.abc import Iterable
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from deltazoo.names import unknown
from deltazoo.runtime import RUNTIME_OPTIONS, RuntimeOptions

STDLIB = "python_stdlib"
RUN_CONFIG = "config.yaml"  # in the folder of a run: the configuration that it began with
MODEL_CONFIG = "training.yaml"  # in the folder of a model: the configuration of its training
BY_TOKENIZER = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")  # keys of a model's own configuration
NATIVE_RUNTIME_OPTIONS = ("backend", "fused_kernels", "captured_training")  # options that act on models of transformers

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
"""Rules of a section: unknown keys, infinite numbers and values of another type (true or "3" for a number) raise."""

STAGES = ("align", "distill", "finetune")
"""Names of the stages of a distillation, in order."""

Count = Annotated[int, Field(ge=1)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Ratio = Annotated[float, Field(ge=0, lt=1)]
T = TypeVar("T")


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """The text and its split into training and held-out documents.

    Attributes:
        text: ``python_stdlib``, a text file, a ``.jsonl``/``.json`` or ``.parquet`` file, a folder of such files, or a
            name for ``datasets.load_dataset``.
        pattern: files of a folder that are read as text, a glob relative to it.
        subset: configuration name of a Hub dataset; only for Hub datasets.
        split: split of a Hub dataset; only for Hub datasets.
        text_field: the column that holds the text of JSONL, Parquet and Hub records.
        streaming: whether to read records while training instead of holding the text in memory; JSONL, Parquet and Hub
            only.
        validation_fraction: share of the documents held out, chosen by a hash of their name (files) or text (records);
            if the hash leaves one part empty, as with a single file, the share at the end of the text.
        max_validation_bytes: bytes of held-out text after which to stop; needed with ``streaming``.
    """

    text: str = STDLIB
    pattern: str = "**/*"
    subset: str | None = None
    split: str = "train"
    text_field: str = "text"
    streaming: bool = False
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    max_validation_bytes: Count | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a stream without a limit of the held-out text."""
        if self.streaming and self.max_validation_bytes is None:
            raise ValueError("streaming needs data.max_validation_bytes: the held-out text is kept in memory")


@dataclass(frozen=True, config=STRICT)
class TokenizerConfig:
    """The tokenizer of a run.

    Attributes:
        kind: ``bpe`` trains a byte-level BPE on the training text, ``byte`` has one token per byte, ``pretrained``
            loads an existing tokenizer.
        vocab_size: most entries of the trained BPE, the two special tokens included; a small text yields fewer.
            Only for ``bpe``.
        path: folder or Hub name of the tokenizer; only for ``pretrained``.
    """

    kind: Literal["bpe", "byte", "pretrained"] = "bpe"
    vocab_size: Annotated[int, Field(ge=259)] | None = None  # 256 bytes, two special tokens, one merge
    path: str | None = None

    def __post_init__(self) -> None:
        """Raise ValueError unless the keys fit the kind."""
        if self.kind == "bpe" and self.vocab_size is None:
            raise ValueError("vocab_size is missing, which kind bpe needs: 259 or more")
        if self.kind != "bpe" and self.vocab_size is not None:
            raise ValueError(f"vocab_size acts only for kind bpe, not {self.kind}")
        if self.kind == "pretrained" and self.path is None:
            raise ValueError("path is missing, which kind pretrained needs: a tokenizer's folder or Hub name")
        if self.kind != "pretrained" and self.path is not None:
            raise ValueError(f"path acts only for kind pretrained, not {self.kind}")


@dataclass(frozen=True, config=STRICT)
class OptimizationConfig:
    """Steps, batches, optimizer, learning rate schedule, logging and checkpoints.

    Attributes:
        steps: optimizer steps.
        row_length: tokens per packed row; gradients reach back no further.
        rows_per_batch: most rows of a forward pass; `context_parallel` devices share them.
        rows_per_step: rows of an optimizer step, over all devices; default: ``rows_per_batch``. The number of forward
            passes follows from it and from the number of devices.
        learning_rate: peak learning rate of AdamW.
        schedule: the learning rate after the warm-up: a cosine or a line down to ``min_learning_rate_ratio``, or
            constant.
        warmup: share of the steps over which the learning rate rises linearly from 0.
        min_learning_rate_ratio: final over peak learning rate; 1.0 is refused (that is ``schedule: constant``).
        weight_decay: AdamW's decay, which leaves A_log, dt_bias, norms and biases alone.
        betas: decay rates of AdamW's two moments.
        max_grad_norm: global norm to which larger gradients are scaled down.
        precision: ``auto`` is bf16 on a GPU that has it and fp32 elsewhere; parameters stay fp32 in any case.
        gradient_checkpointing: whether to recompute each block in the backward pass, slower with less memory.
        compile: whether to run the model through ``torch.compile``.
        context_parallel: number of devices that share the tokens of a forward pass; with more devices, groups of so
            many have rows of their own.
        fully_shard: whether to divide parameters, gradients and optimizer state among all devices (FSDP2).
        log_every: steps between two log entries of the training loss, each the mean since the previous one.
        evaluate_every: steps between two validation losses.
        evaluation_rows: held-out rows of a validation loss, evenly spread; ``deltazoo eval`` reads all of the text.
        save_every: steps between checkpoints; a multiple of ``log_every``, so that resumed runs log the same means.
            The model with the lowest validation loss so far is saved as well.
        keep_checkpoints: number of checkpoints to keep beside the one with the lowest validation loss; older ones are
            removed.
        diagnose_every: steps between two diagnoses (`deltazoo.diagnose`) of the model on held-out rows, as many as a
            batch has, beginning before the first step; default: none.
    """

    steps: Count
    row_length: Annotated[int, Field(ge=2)]  # each token is predicted from those before it in its row
    rows_per_batch: Count
    learning_rate: Positive
    rows_per_step: Count = Field(default_factory=lambda given: given["rows_per_batch"])
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: Annotated[float, Field(ge=0, le=1)] = 0.0
    min_learning_rate_ratio: Ratio = 0.0
    weight_decay: NotNegative = 0.1
    betas: tuple[Ratio, Ratio] = (0.9, 0.95)
    max_grad_norm: Positive = 1.0
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    gradient_checkpointing: bool = False
    compile: bool = False
    context_parallel: Count = 1
    fully_shard: bool = False
    log_every: Count = 10
    evaluate_every: Count = 100
    evaluation_rows: Count = 32
    save_every: Count = 100
    keep_checkpoints: Count = 2
    diagnose_every: Count | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for values that do not fit together."""
        if self.schedule == "constant" and self.min_learning_rate_ratio:
            raise ValueError("min_learning_rate_ratio has no meaning with schedule constant")
        if self.compile and self.fully_shard:
            raise ValueError("compile has no effect with fully_shard")
        if self.diagnose_every is not None and self.context_parallel > 1:
            raise ValueError(
                f"diagnose_every needs whole rows on a device, and context_parallel is {self.context_parallel}"
            )
        if self.save_every % self.log_every:
            raise ValueError(f"save_every ({self.save_every}) must be a multiple of log_every ({self.log_every})")

    @property
    def warmup_steps(self) -> int:
        """Steps of the warm-up, at most all but the last."""
        return min(round(self.warmup * self.steps), self.steps - 1)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step, over all devices."""
        return self.rows_per_step * self.row_length

    def divided(self, processes: int) -> tuple[int, int]:
        """Rows of one forward pass, and forward passes per optimizer step, with the same rows in every step.

        ``context_parallel`` processes form a group, which shares the tokens of a forward pass.

        Raises:
            ValueError: the processes form no whole groups, or the rows of a step do not divide.
        """
        size, total = self.context_parallel, self.rows_per_step
        if processes % size:
            raise ValueError(
                f"context_parallel={size} divides each forward pass among {size} processes, and {processes} "
                f"{'is' if processes == 1 else 'are'} no multiple of that: torchrun --nproc-per-node {size} -m deltazoo"
            )
        groups = processes // size
        share, left = divmod(total, groups)
        whose = "processes" if size == 1 else f"groups of {size} processes"
        if left:
            raise ValueError(f"the {total} rows of a step (rows_per_step) do not divide among {groups} {whose}")
        rows = min(self.rows_per_batch, share)
        if share % rows:
            raise ValueError(
                f"{share} rows per step, for each of {groups} {whose}, are no whole number of forward passes of "
                f"rows_per_batch={rows} rows"
            )
        return rows, share // rows


@dataclass(frozen=True, config=STRICT)
class RunConfig:
    """The configuration of a training run.

    Attributes:
        output: folder of the run: checkpoints, the finished model, the loss curve, the resolved configuration.
        model: ``mixer`` (a rule) and keys of its model configuration, or ``architecture`` (a model type of
            transformers) and fields of that type's own configuration; without the vocabulary size.
        training: see `OptimizationConfig`.
        data: see `DataConfig`.
        runtime: options that say how the model runs, see `RuntimeOptions`; not saved with the model. With
            ``architecture``, ``backend``, ``fused_kernels`` and ``captured_training`` alone.
        tokenizer: see `TokenizerConfig`.
        seed: seed of the initial weights and of the order of the documents.
    """

    output: str
    model: dict[str, Any]
    training: OptimizationConfig
    tokenizer: TokenizerConfig
    data: DataConfig = field(default_factory=DataConfig)
    runtime: RuntimeOptions = field(default_factory=RuntimeOptions)
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for a wrong model section."""
        for key in RUNTIME_OPTIONS:
            if key in self.model:
                raise ValueError(f"model.{key} says how the model runs, not what it is: give runtime.{key} instead")
        for key in BY_TOKENIZER:
            if key in self.model:
                instead = "give tokenizer.vocab_size instead" if key == "vocab_size" else "leave it out"
                raise ValueError(f"model.{key} is set by the tokenizer: {instead}")
        if self.architecture is None and "mixer" not in self.model:
            raise ValueError(
                "model.mixer is missing: name one of the rules, for example gated_deltanet, or a model type of "
                "transformers as model.architecture, for example qwen3_next"
            )
        if self.architecture is not None and "mixer" in self.model:
            raise ValueError(
                f"model.mixer={self.model['mixer']} and model.architecture={self.architecture} name two models: a "
                "mixer is one of our models, an architecture a model of transformers; give one of them"
            )
        idle = [name for name in self.runtime.given() if name not in NATIVE_RUNTIME_OPTIONS]
        if self.architecture is not None and idle:
            other = "; training.gradient_checkpointing recomputes its blocks" if idle[0] == "recompute" else ""
            raise ValueError(
                f"runtime.{idle[0]} acts on our own models, not on transformers' {self.architecture}, of which "
                f"runtime.{' and runtime.'.join(NATIVE_RUNTIME_OPTIONS)} are known{other}"
            )

    @property
    def architecture(self) -> str | None:
        """The model type of transformers whose own class is trained; None for our models."""
        return self.model.get("architecture")

    @property
    def model_name(self) -> str:
        """The rule or the model type of transformers."""
        return self.architecture or self.model["mixer"]


@dataclass(frozen=True, config=STRICT)
class StageConfig(OptimizationConfig):
    """A stage of a distillation: an `OptimizationConfig`, in one process, and the parameters that it trains.

    Attributes:
        trains: ``swapped``, the new layers only, or ``all``.
    """

    trains: Literal["swapped", "all"] = "all"
    context_parallel: Literal[1] = 1
    fully_shard: Literal[False] = False


@dataclass(frozen=True, config=STRICT)
class AlignConfig(StageConfig):
    """The stage in which each new layer learns the output of the attention it replaces, on that attention's inputs.

    The loss of a layer depends on no parameter of other layers, and is computed inside the forward pass, which is
    therefore neither compiled nor recomputed.
    """

    trains: Literal["swapped"] = "swapped"
    compile: Literal[False] = False
    gradient_checkpointing: Literal[False] = False


@dataclass(frozen=True, config=STRICT)
class DistillConfig(StageConfig):
    """The stage in which the model learns the original's predictions: KL divergence at temperature 1, token by token.

    Attributes:
        text_weight: weight of the cross-entropy on the text, which is added to the divergence.
    """

    text_weight: NotNegative = 0.0


@dataclass(frozen=True, config=STRICT)
class Recipe:
    """The distillation of a model whose attention was swapped, in up to three stages.

    Attributes:
        output: folder of the run: a subfolder per stage, the model, the scores, the loss curves.
        align: see `AlignConfig`; None leaves the stage out, also for the next two.
        distill: see `DistillConfig`.
        finetune: see `StageConfig`; the model learns the text itself.
        data: the text of all stages; see `DataConfig`.
        seed: seed of the order of the documents, which differs between stages.
    """

    output: str
    align: AlignConfig | None = None
    distill: DistillConfig | None = None
    finetune: StageConfig | None = None
    data: DataConfig = field(default_factory=DataConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError unless there is a stage."""
        if not self.stages:
            raise ValueError("none of the stages align, distill and finetune is configured: name at least one")

    @property
    def stages(self) -> dict[str, StageConfig]:
        """The configured stages by name, in order."""
        stages = {name: getattr(self, name) for name in STAGES}
        return {name: stage for name, stage in stages.items() if stage is not None}


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> RunConfig:
    """A `RunConfig` read from a YAML file; see `load_as` for arguments and errors."""
    return load_as(RunConfig, path, overrides)


def load_as(cls: type[T], path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> T:
    """A configuration read from a YAML file.

    Args:
        cls: class of the configuration, a dataclass of pydantic.
        overrides: ``section.key=value`` strings that replace values of the file; a value is read as YAML, or as a
            string if it is not YAML. Another ``tokenizer.kind`` replaces the whole section: its keys belong to a kind.

    Raises:
        ValueError: no such file, not YAML, an unknown, missing or repeated key, or a value out of range; the message
            begins with the file, or with the override as ``--set section.key=value``.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no configuration file {str(path)!r}")
    try:
        written = yaml.load(path.read_text(encoding="utf-8"), _Loader)
        if not isinstance(written, dict):
            found = type(written).__name__
            raise ValueError(f"must hold a mapping of keys to values, got {found} (a text to train on: --text {path})")
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"{path} is not a YAML file (a text to train on: --text {path}): {said}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    try:
        return _overridden(cls, written, overrides)
    except ValueError as error:
        raise ValueError(f"{_set_by(cls, written, overrides, str(error)) or path}: {error}") from error


def _overridden(cls: type[T], written: dict[str, Any], overrides: Iterable[str]) -> T:
    values = copy.deepcopy(written)
    for override in sorted(overrides, key=lambda override: not override.startswith("tokenizer.kind=")):
        _apply(values, override)
    return from_mapping(cls, values)


def _set_by(cls: type, written: dict[str, Any], overrides: Iterable[str], said: str) -> str:
    """The overrides without each of which an error would not be said, as options of the command line."""
    found = []
    for override in dict.fromkeys(overrides):
        try:
            _overridden(cls, written, [other for other in overrides if other != override])
        except ValueError as error:
            if str(error) == said:
                continue
        found.append(f"--set {override}")
    return " ".join(found)


def from_mapping(cls: type[T], values: Any) -> T:
    """A configuration of a class from nested mappings; an empty section (None) is left out.

    Raises:
        ValueError: the first unknown key, with the nearest known one; else all missing keys; else the first value of
            another type or out of range.
    """
    given = {key: value for key, value in values.items() if value is not None}
    try:  # read as JSON, in which a list may be a tuple and a mapping a section, and true is no number
        return TypeAdapter(cls).validate_json(json.dumps(given, default=str))
    except ValidationError as error:
        raise ValueError(_sentence(cls, error)) from error


def as_mapping(config: Any) -> dict[str, Any]:
    """A configuration as plain lists and dictionaries, defaults included."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def save_config(config: Any, path: str | Path) -> None:
    """Write the configuration with all defaults, whole or not at all, so that the file alone reproduces the run."""
    write_whole(Path(path), yaml.safe_dump(as_mapping(config), sort_keys=False, allow_unicode=True))


def write_whole(path: Path, text: str) -> None:
    """Write a small file whole or not at all: a killed process leaves no partial file that a resumed run would read.

    A link stays one: the file that it names is written.
    """
    path = path.resolve()
    draft = path.with_name(path.name + ".part")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _sentence(cls: Any, error: ValidationError) -> str:
    found = error.errors()
    for problem in found:
        if problem["type"] == "unexpected_keyword_argument":
            *sections, key = problem["loc"]
            for name in sections:
                hint = next(each.type for each in dataclasses.fields(cls) if each.name == name)
                cls = next(filter(dataclasses.is_dataclass, (hint, *getattr(hint, "__args__", ()))))
            known = sorted(each.name for each in dataclasses.fields(cls))
            return unknown("key", str(key), known, within="".join(f"{name}." for name in sections))
    missing = [".".join(map(str, problem["loc"])) for problem in found if problem["type"] == "missing"]
    if missing:
        verb, pronoun = ("is", "it has") if len(missing) == 1 else ("are", "they have")
        return f"{', '.join(missing)} {verb} missing; {pronoun} no default"
    problem, where = found[0], ".".join(map(str, found[0]["loc"]))
    if problem["type"] == "value_error":
        return f"{where}.{problem['ctx']['error']}" if where else str(problem["ctx"]["error"])
    wanted = problem["msg"].removeprefix("Input should ").replace("a valid array", "a list")
    wanted = wanted.replace("an object", "a mapping of keys to values")
    return f"{where} must {wanted}, got {problem['input']!r}"


def _apply(values: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise ValueError("an override has the form section.key=value")
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError:  # for example **/*.py: in YAML * begins an alias
        value = text
    *sections, key = name.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ValueError(f"{section!r} is no section: it holds a value")
    if name == "tokenizer.kind" and values.get(key) != value:
        values.clear()
    values[key] = value


class _Loader(yaml.SafeLoader):
    """A loader of YAML that reads 1e-3 as a number, and raises for a key that is given twice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """The node of a mapping; ValueError for a repeated key."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for number, key in enumerate(keys):
            if key.value in (before.value for before in keys[:number]):
                raise ValueError(f"the key {key.value!r} is given twice, again in line {key.start_mark.line + 1}")
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), [*"-+0123456789"]
)
