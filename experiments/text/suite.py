"""The suite `text`: every rule, softmax attention and hybrids of both as language models of one size."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.configurations import SOFTMAX
from experiments.loop import Loop, autocast
from experiments.runner import Job, Line
from experiments.text.comparison import bits_per_byte, interval, is_called, seed_spread
from experiments.text.corpus import DEFAULT_PATH, TextCorpus
from experiments.text.models import HYBRID, TextRecipe, base_configurations, build_model, intermediate_size
from experiments.text.scoring import file_bytes, score

HYBRIDS = 4
"""Rules that are also trained as hybrids: the best ones alone."""
SECOND_SEEDS = 5
"""Configurations that are trained with a second seed: the best ones."""


def jobs(lines: list[Line], recipe: TextRecipe | None = None) -> list[Job]:
    """Every rule and softmax attention; then the hybrids of the best four rules; then second seeds of the best five."""
    recipe = recipe or TextRecipe()
    length = recipe.row_length
    trained = {line["configuration"]: line for line in lines if line["seed"] == 0}

    def rank(names: list[str]) -> list[str]:
        finite = [name for name in names if trained[name]["rate"] is not None]
        return sorted(finite, key=lambda name: bits_per_byte(trained[name], length))

    base = base_configurations()
    found = [_job(name, 0, recipe) for name in base]
    if trained.keys() >= set(base):
        hybrids = [HYBRID + name for name in rank(base) if name != SOFTMAX][:HYBRIDS]
        found += [_job(name, 0, recipe) for name in hybrids]
        if trained.keys() >= set(hybrids):
            best = rank([*base, *hybrids])[:SECOND_SEEDS]
            found += [_job(name, 1, recipe, rates=[trained[name]["rate"]]) for name in best]
    return found


def _job(configuration: str, seed: int, recipe: TextRecipe, **more: Any) -> Job:
    settings = {"configuration": configuration, "seed": seed, "recipe": asdict(recipe)}
    return {"id": f"{configuration} seed={seed}", **settings, **more}


def verdicts(lines: list[Line]) -> list[str]:
    """Bits per byte by configuration, the best first, and what is called beside softmax attention."""
    groups: dict[str, list[Line]] = {}
    for line in lines:
        if line["rate"] is not None:
            groups.setdefault(line["configuration"], []).append(line)
    if not groups:
        return []
    length = lines[0]["recipe"]["row_length"]
    spread = seed_spread(list(groups.values()), length)
    found = []
    for name in sorted(groups, key=lambda name: interval(groups[name], length)):
        text = f"{name}: {interval(groups[name], length)} bits per byte"
        if SOFTMAX in groups and name != SOFTMAX:
            difference = interval(groups[name], length, minus=groups[SOFTMAX])
            called = "called" if is_called(difference, spread) else "not called"
            text += f"; {difference} beside softmax attention, {called}"
        found.append(text)
    return found


def train_and_score(
    job: Job, device: str, tick: Callable[[], None], corpus: TextCorpus | None = None
) -> dict[str, Any]:
    """Train a configuration with the best of the learning rates and score it on the held-out part.

    The rate is found by successive halving: all rates start, and the worst ones stop early. If the loss of the best one
    is not finite at the end, the next best one goes on. `rate` is None where no rate has a finite loss.
    """
    corpus = corpus or load_corpus()
    recipe = TextRecipe(**job["recipe"])
    rates = job.get("rates", recipe.rates)
    rungs = recipe.rungs if len(rates) > 1 else ()
    loops = {
        rate: training_loop(job["configuration"], recipe, corpus, rate=rate, seed=job["seed"], device=device)
        for rate in rates
    }
    trials, standing = [], list(rates)
    for place, rung in enumerate(rungs, start=1):
        found = {}
        for rate in standing:
            if loops[rate].advance(rung, tick):
                last = loops[rate].losses[-recipe.judged_steps :]
                found[rate] = round(sum(last) / len(last), 5)
            trials.append({"rate": rate, "rung": rung, "loss": found.get(rate)})
        standing = sorted(found, key=found.__getitem__)
        if place < len(rungs):
            standing = standing[: len(rates) - place]
        loops = {rate: loops[rate] for rate in standing}
    rate = next((rate for rate in standing if loops[rate].advance(recipe.steps, tick)), None)
    result = {"corpus": corpus.digest, "trials": trials, "rate": rate}
    if rate is None:
        return result
    loop = loops[rate]
    return result | {
        "intermediate_size": intermediate_size(job["configuration"], recipe, corpus.vocab_size),
        "curve": loop.curve(),
        "training_seconds": round(loop.seconds, 2),
        "tokens_per_second": round(recipe.tokens_per_step / loop.seconds_per_step, 1),
        **scored(loop.model, corpus, recipe),
    }


def scored(model: Any, corpus: TextCorpus, recipe: TextRecipe) -> dict[str, Any]:
    """Size and scores of a model, as lines have them."""
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "file_bytes": file_bytes(corpus, recipe).tolist(),
        "scores": score(model, corpus, recipe),
    }


def training_loop(
    configuration: str, recipe: TextRecipe, corpus: TextCorpus, *, rate: float, seed: int, device: str
) -> Loop:
    """The training of a configuration from new weights; `seed` is also of the order of the rows."""
    with torch.device(device):
        model = build_model(configuration, recipe, corpus.vocab_size, seed=seed)
    return Loop(
        model,
        training_rows(corpus.train, recipe.row_length, recipe.rows_per_step, seed, device),
        _next_tokens,
        rate=rate,
        factor=recipe.rate_factor,
        weight_decay=recipe.weight_decay,
        betas=recipe.betas,
        clip=recipe.clip,
    )


def _next_tokens(model: Any, rows: Tensor) -> tuple[Tensor]:
    """The mean loss over all tokens, each of which predicts its successor."""
    tokens, successors = rows[:, :-1], rows[:, 1:]
    with autocast(rows.device):
        return (model(input_ids=tokens, labels=tokens, shift_labels=successors, use_cache=False).loss,)


def training_rows(
    tokens: np.ndarray, row_length: int, rows_per_step: int, seed: int, device: torch.device | str
) -> Iterator[Tensor]:
    """For each step rows of `row_length` tokens and the one after them, `[rows_per_step, row_length + 1]` int64.

    An epoch cuts the stream into rows from a random offset on and visits each once, in random order: the same for every
    configuration of a seed. Rows begin where they may and go on into the next file of the package.
    """
    count = len(tokens) // row_length - 1  # the offset takes up to one row
    if count < 1:
        raise ValueError(f"a stream of {len(tokens)} tokens has no two rows of {row_length}")
    stream = torch.from_numpy(tokens.astype(np.int32)).to(device)
    within = torch.arange(row_length + 1, device=device)

    def begins() -> Iterator[int]:
        epoch = 0
        while True:
            numbers = np.random.default_rng((seed, epoch))
            offset = int(numbers.integers(row_length))
            yield from (offset + row_length * numbers.permutation(count)).tolist()
            epoch += 1

    begin = begins()
    while True:
        first = torch.tensor([next(begin) for _ in range(rows_per_step)]).to(device)
        yield stream[first[:, None] + within].long()


@cache
def load_corpus() -> TextCorpus:
    """The corpus of the user's cache, read once per process."""
    return TextCorpus.load(DEFAULT_PATH)
