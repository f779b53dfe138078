"""The suite: conversions that a result file lacks, the most important first, within a time limit."""

import copy
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deltazoo.names import unknown
from deltazoo.workbench.lab.lab_records import Environment
from deltazoo.workbench.lab.runner import device_is_lost
from deltazoo.workbench.lab.text.decoding import decoding, state_bytes
from deltazoo.workbench.lab.text.results import now
from deltazoo.workbench.lab.text.scoring import LengthScore, file_bytes, score
from deltazoo.workbench.lab.text.suite import OutOfTime
from deltazoo.workbench.lab.text.text_corpus import TextCorpus
from deltazoo.workbench.lab.text_conversions.conversion_recipe import Conversion, ConversionRecipe
from deltazoo.workbench.lab.text_conversions.conversion_results import (
    ConversionResult,
    ConversionResults,
    TeacherResult,
)
from deltazoo.workbench.lab.text_conversions.stages import convert_copy
from deltazoo.workbench.lab.text_conversions.teacher import Teacher, as_llama, load_teacher, train_teacher

__all__ = ["TEACHER", "missing_conversions", "open_conversions", "run_conversions"]

TEACHER = "teacher"
"""As `only`: train the softmax model and stop."""
_PROMPT_AT_ONCE = 4096
_MEASURING_SECONDS = 60.0
"""Guess of the time for scores and decoding of a conversion, before there is one to go by."""


def open_conversions(path: Path, recipe: ConversionRecipe, corpus: TextCorpus) -> ConversionResults:
    """The result file of a recipe on a corpus; see `ConversionResults`."""
    return ConversionResults(path, recipe, corpus.digest, file_bytes(corpus, recipe.text).tolist())


def missing_conversions(
    results: ConversionResults, recipe: ConversionRecipe, only: Sequence[str] = ()
) -> list[Conversion]:
    """What is still to be converted, in order.

    Args:
        results: what is done.
        recipe: says what there is.
        only: names of conversions, such as "kda@3:1"; these alone.

    Raises:
        ValueError: an unknown conversion.
    """
    conversions = recipe.conversions()
    names = list(dict.fromkeys(conversion.name for conversion in conversions))
    for name in only:
        if name not in (*names, TEACHER):
            raise ValueError(unknown("conversion", name, [*names, TEACHER]))
    return [
        conversion
        for conversion in conversions
        if conversion not in results.conversions and (not only or conversion.name in only)
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
) -> list[Conversion]:
    """Convert what is missing, each result kept as soon as it is there; first train the softmax model, or load it.

    A training or conversion that the limit does not leave time for is not begun, or abandoned once its pace is known,
    and leaves nothing.

    Args:
        results: extended in place.
        recipe, corpus: what they are of.
        device: "cpu" or one GPU.
        environment: of this process.
        teacher_path: where the softmax model of this recipe and corpus is kept for later calls.
        limit: seconds.
        only: as of `missing_conversions`.
        report: called with a line of progress.

    Returns:
        What is missing still.

    Raises:
        ValueError: the file has results of another device.
        RuntimeError: conversions failed; all others were tried.
    """
    devices = {teacher.environment.device for teacher in results.teachers.values()}
    if others := devices - {environment.device}:
        raise ValueError(
            f"{results.path} holds results of {others.pop()}, this is {environment.device}: speeds would not compare"
        )
    missing = missing_conversions(results, recipe, only)
    if not missing and TEACHER not in only:
        return []
    deadline = None if limit is None else time.monotonic() + limit

    def watch(seconds_left: float) -> None:
        if deadline is not None and time.monotonic() + seconds_left > deadline:
            raise OutOfTime

    try:
        teacher = _teacher(results, recipe, corpus, device, environment, teacher_path, watch, report)
    except OutOfTime:
        report("softmax model: no time left for it")
        return missing
    failures = []
    for conversion in missing:
        began = time.monotonic()
        name = f"{conversion.name}, seed {conversion.seed}"
        try:
            alike = [done.seconds for done in results.conversions.values() if done.layers == conversion.layers]
            watch(max(alike, default=0.0))  # the first of its kind is abandoned once its pace is known
            result = _convert(conversion, results, recipe, corpus, teacher, environment, watch)
        except OutOfTime:
            report(f"{name}: no time left for it")
        except Exception as error:  # raised at the end, so that it does not end the other conversions
            failures.append(f"{name}: {type(error).__name__}: {error}")
            report(f"{name}: FAILED, {type(error).__name__}: {error}")
            if device_is_lost(device):
                break
        else:
            results.add(result)
            bits = " ".join(f"{stage} {found:.4f}" for stage, _, found in result.points)
            report(f"{name}: bits per byte {bits}; {time.monotonic() - began:.0f} s")
        if torch.device(device).type == "cuda" and not device_is_lost(device):
            gc.collect()
            torch.cuda.empty_cache()
    if failures:
        raise RuntimeError("; ".join(failures))
    return missing_conversions(results, recipe, only)


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
                **_measured(teacher.model, corpus, recipe, recipe.decode_contexts),
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

    later = max(
        (done.seconds - sum(done.stage_seconds.values()) for done in results.conversions.values()),
        default=_MEASURING_SECONDS,
    )
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
        # Nothing new decodes in the control.
        **_measured(converted.model, corpus, recipe, recipe.decode_contexts if converted.swapped else ()),
        seconds=round(time.monotonic() - began, 2),
        environment=environment,
        date=now(),
    )


def _measured(model: Any, corpus: TextCorpus, recipe: ConversionRecipe, contexts: Sequence[int]) -> dict[str, Any]:
    """Scores and size of a model; state and decoding after so many tokens by a copy, on a GPU in bfloat16."""
    scores = {str(length): found.as_json() for length, found in score(model, corpus, recipe.text).items()}
    on_gpu = model.device.type == "cuda"
    timed = copy.deepcopy(model)
    if on_gpu:
        timed.bfloat16()
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "scores": scores,
        "state_bytes": {str(tokens): state_bytes(timed, tokens) for tokens in contexts},
        "decoding": {str(tokens): _decoding(timed, corpus, recipe, tokens, on_gpu) for tokens in contexts},
    }


def _decoding(model: Any, corpus: TextCorpus, recipe: ConversionRecipe, context: int, on_gpu: bool) -> dict[str, Any]:
    prompt = torch.from_numpy(corpus.held_out[:context].astype(np.int64)).to(model.device)
    one_row = replace(recipe.text, decode_context=context, decode_batches=(1,))
    if not on_gpu:
        return decoding(model, one_row, prompt, _PROMPT_AT_ONCE)["1"]
    gc.collect()
    before = torch.cuda.memory_allocated(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    found = decoding(model, one_row, prompt, _PROMPT_AT_ONCE)["1"]
    return {**found, "peak_bytes": torch.cuda.max_memory_allocated(model.device) - before}


def _bits(file_nats: Sequence[float], results: ConversionResults) -> float:
    return float(np.sum(file_nats) / np.log(2) / np.sum(results.header["file_bytes"]))
