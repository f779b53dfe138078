"""The suite: what a result file lacks of conversions and their decoding, the most important first, within a time limit.

How a model decodes does not depend on its weights, so it is measured by jobs of their own, all on one card.
"""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deltazoo.names import unknown
from deltazoo.swap import swap_attention
from experiments.configurations import SOFTMAX
from experiments.lab_records import Environment
from experiments.runner import device_is_lost
from experiments.text.decoding import decoding, state_bytes
from experiments.text.results import now
from experiments.text.scoring import LengthScore, file_bytes, score
from experiments.text.suite import OutOfTime
from experiments.text.text_configurations import build_model
from experiments.text.text_corpus import TextCorpus
from experiments.text_conversions.conversion_recipe import CONTROL, Conversion, ConversionRecipe
from experiments.text_conversions.conversion_results import (
    ConversionResult,
    ConversionResults,
    DecodingResult,
    TeacherResult,
)
from experiments.text_conversions.stages import convert_copy
from experiments.text_conversions.teacher import Teacher, as_llama, load_teacher, train_teacher

__all__ = ["DECODING", "TEACHER", "ConversionJob", "missing_conversion_jobs", "open_conversions", "run_conversions"]

TEACHER = "teacher"
"""As `only`: train the softmax model and stop."""
DECODING = "decoding"
"""As `only`: measure how the models decode, and convert nothing."""
_PROMPT_AT_ONCE = 4096
_SCORING_SECONDS = 30.0
"""Guess of the time for the scores of a conversion, before there is one to go by."""
_DECODING_SECONDS = 30.0
"""Guess of the time that measuring the decoding of a model takes."""


@dataclass(frozen=True)
class ConversionJob:
    """A conversion to be done, or a model whose decoding is to be measured."""

    conversion: Conversion
    decoding: bool = False

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.conversion.name}, {'decoding' if self.decoding else f'seed {self.conversion.seed}'}"


def open_conversions(path: Path, recipe: ConversionRecipe, corpus: TextCorpus | None) -> ConversionResults:
    """The result file of a recipe on a corpus, or, to see what it lacks, on any; see `ConversionResults`."""
    if corpus is None:
        return ConversionResults(path, recipe)
    return ConversionResults(path, recipe, corpus.digest, file_bytes(corpus, recipe.text).tolist())


def missing_conversion_jobs(
    results: ConversionResults, recipe: ConversionRecipe, only: Sequence[str] = ()
) -> list[ConversionJob]:
    """What is still to be done, in order: conversions, then the decoding of all models.

    Args:
        results: what is done.
        recipe: says what there is.
        only: names of conversions, such as "kda@3:1", or `DECODING`; these alone.

    Raises:
        ValueError: an unknown conversion.
    """
    conversions = recipe.conversions()
    names = list(dict.fromkeys(conversion.name for conversion in conversions))
    for name in only:
        if name not in (*names, DECODING, TEACHER):
            raise ValueError(unknown("conversion", name, [*names, DECODING, TEACHER]))
    wanted = [conversion for conversion in conversions if not only or conversion.name in only]
    decodings = recipe.decodings() if not only or DECODING in only else []
    return [ConversionJob(conversion) for conversion in wanted if conversion not in results.conversions] + [
        ConversionJob(model, decoding=True) for model in decodings if model not in results.decodings
    ]


def run_conversions(
    results: ConversionResults,
    recipe: ConversionRecipe,
    corpus: TextCorpus,
    *,
    device: str,
    environment: Environment,
    teacher_path: Path,
    limit: float | None = None,
    only: Sequence[str] = (),
    report: Callable[[str], None] = print,
) -> list[ConversionJob]:
    """Do what is missing, each result kept as soon as it is there; first train the softmax model, or load it.

    What the limit does not leave time for is not begun, or abandoned once its pace is known, and leaves nothing.

    Args:
        results: extended in place. Other processes may add to the file; what they have done is not done again.
        recipe, corpus: what they are of.
        device: "cpu" or one GPU.
        environment: of this process.
        teacher_path: where the softmax model of this recipe and corpus is kept for later calls.
        limit: seconds.
        only: as of `missing_conversion_jobs`.
        report: called with a line of progress.

    Returns:
        What is missing still.

    Raises:
        ValueError: decoding was measured on another device.
        RuntimeError: jobs failed; all others were tried.
    """
    missing = missing_conversion_jobs(results, recipe, only)
    cards = {found.environment.device for found in results.decodings.values()} - {environment.device}
    if cards and any(job.decoding for job in missing):
        raise ValueError(
            f"{results.path} holds speeds of {cards.pop()}, this is {environment.device}, and they would not compare: "
            "name conversions, which are then done without measuring speeds"
        )
    deadline = None if limit is None else time.monotonic() + limit

    def watch(seconds_left: float) -> None:
        if deadline is not None and time.monotonic() + seconds_left > deadline:
            raise OutOfTime

    teacher = None
    if TEACHER in only or not all(job.decoding for job in missing):
        try:
            teacher = _teacher(results, recipe, corpus, device, environment, teacher_path, watch, report)
        except OutOfTime:
            report("softmax model: no time left for it")
            missing = [job for job in missing if job.decoding]
    failures = []
    for job in missing:
        results.reload()
        if job not in missing_conversion_jobs(results, recipe, only):
            continue
        try:
            if job.decoding:
                watch(_DECODING_SECONDS)
                result: Any = _decode(job.conversion, corpus, recipe, device, environment)
                line = _speeds(result)
            else:
                assert teacher is not None
                result = _convert(job.conversion, results, recipe, corpus, teacher, environment, watch)
                bits = " ".join(f"{stage} {found:.4f}" for stage, _, found in result.points)
                line = f"bits per byte {bits}; {result.seconds:.0f} s"
            results.add(result)
            report(f"{job.name}: {line}")
        except OutOfTime:
            report(f"{job.name}: no time left for it")
        except Exception as error:  # raised at the end, so that it does not end the other jobs
            failures.append(f"{job.name}: {type(error).__name__}: {error}")
            report(f"{job.name}: FAILED, {type(error).__name__}: {error}")
            if device_is_lost(device):
                break
        if torch.device(device).type == "cuda" and not device_is_lost(device):
            gc.collect()
            torch.cuda.empty_cache()
    if failures:
        raise RuntimeError("; ".join(failures))
    return missing_conversion_jobs(results, recipe, only)


def _teacher(
    results: ConversionResults,
    recipe: ConversionRecipe,
    corpus: TextCorpus,
    device: str,
    environment: Environment,
    path: Path,
    watch: Callable[[float], None],
    report: Callable[[str], None],
) -> Teacher:
    """The softmax model, with a line in the file."""
    began = time.monotonic()
    teacher = load_teacher(path, corpus, recipe.text, recipe.rate, device)
    found = "loaded"
    if teacher is None:
        teacher, found = train_teacher(corpus, recipe.text, recipe.rate, device, watch), "trained"
        teacher.save(path, corpus, recipe.text)
    if teacher.digest not in results.teachers:
        results.add(
            TeacherResult(
                teacher=teacher.digest,
                training=teacher.training,
                **_measured(teacher.model, corpus, recipe),
                seconds=round(time.monotonic() - began, 2),
                environment=environment,
                date=now(),
            )
        )
    row_length = str(recipe.text.row_length)
    bits = _bits(results.teachers[teacher.digest].scores[row_length]["file_nats"], results)
    report(f"softmax model {found}: {bits:.4f} bits per byte, {time.monotonic() - began:.0f} s")
    return teacher


def _convert(
    conversion: Conversion,
    results: ConversionResults,
    recipe: ConversionRecipe,
    corpus: TextCorpus,
    teacher: Teacher,
    environment: Environment,
    watch: Callable[[float], None],
) -> ConversionResult:
    began = time.monotonic()
    row_length = recipe.text.row_length
    scored: list[LengthScore] = []

    def bits(model: Any) -> float:
        scored.append(score(model, corpus, recipe.text, [row_length])[row_length])
        return round(_bits(scored[-1].file_nats, results), 5)

    alike = [done for done in results.conversions.values() if done.layers == conversion.layers]
    watch(max((done.seconds for done in alike), default=0.0))  # the first of its kind shows its pace soon
    later = max((done.seconds - sum(done.stage_seconds.values()) for done in alike), default=_SCORING_SECONDS)
    converted = convert_copy(
        as_llama(teacher.model),
        conversion,
        recipe,
        corpus,
        score=bits,
        watch=lambda seconds_left: watch(seconds_left + later),
    )
    return ConversionResult(
        teacher=teacher.digest,
        rule=conversion.rule,
        layers=conversion.layers,
        seed=conversion.seed,
        swapped=converted.swapped,
        transfer_nats=scored[0].as_json()["file_nats"],
        points=converted.points,
        stage_seconds={stage: round(seconds, 2) for stage, seconds in converted.stage_seconds.items()},
        peak_bytes=converted.peak_bytes,
        **_measured(converted.model, corpus, recipe),
        seconds=round(time.monotonic() - began, 2),
        environment=environment,
        date=now(),
    )


def _measured(model: Any, corpus: TextCorpus, recipe: ConversionRecipe) -> dict[str, Any]:
    """Scores and size of a model."""
    scores = {str(length): found.as_json() for length, found in score(model, corpus, recipe.text).items()}
    return {"parameters": sum(parameter.numel() for parameter in model.parameters()), "scores": scores}


def _decode(
    conversion: Conversion, corpus: TextCorpus, recipe: ConversionRecipe, device: str, environment: Environment
) -> DecodingResult:
    """State and decoding of a model with new weights, on a GPU in bfloat16."""
    with torch.device(device):
        model: Any = build_model(SOFTMAX, recipe.text, corpus.vocab_size, seed=0).eval()
    if model.device.type == "cuda":
        model.bfloat16()
    if conversion != CONTROL:
        model = as_llama(model)
        swap_attention(model, conversion.rule, layers=conversion.layers)
    return DecodingResult(
        rule=conversion.rule,
        layers=conversion.layers,
        state_bytes={str(tokens): state_bytes(model, tokens) for tokens in recipe.decode_contexts},
        decoding={str(tokens): _decoding(model, corpus, recipe, tokens) for tokens in recipe.decode_contexts},
        environment=environment,
        date=now(),
    )


def _decoding(model: Any, corpus: TextCorpus, recipe: ConversionRecipe, context: int) -> dict[str, Any]:
    prompt = torch.from_numpy(corpus.held_out[:context].astype(np.int64)).to(model.device)
    one_row = replace(recipe.text, decode_context=context, decode_batches=(1,))
    if model.device.type != "cuda":
        return decoding(model, one_row, prompt, _PROMPT_AT_ONCE)["1"]
    gc.collect()
    before = torch.cuda.memory_allocated(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    found = decoding(model, one_row, prompt, _PROMPT_AT_ONCE)["1"]
    return {**found, "peak_bytes": torch.cuda.max_memory_allocated(model.device) - before}


def _speeds(result: DecodingResult) -> str:
    speeds = (f"{found.get('tokens_per_second', found.get('error'))} tokens/s" for found in result.decoding.values())
    return "; ".join(f"after {int(tokens):,}: {speed}" for tokens, speed in zip(result.decoding, speeds, strict=True))


def _bits(file_nats: Sequence[float], results: ConversionResults) -> float:
    return float(np.sum(file_nats) / np.log(2) / np.sum(results.header["file_bytes"]))
