"""The page of the suite, made from its result file and the manifest of its text alone."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.markdown import filled, picture, table
from experiments.configurations import SOFTMAX, parse_configuration
from experiments.text.results import TextResult, TextResults, Trial
from experiments.text.suite import HYBRIDS, SECOND_SEEDS
from experiments.text.text_comparison import (
    LEVEL,
    RESAMPLES,
    Interval,
    bits_per_byte,
    compare,
    interval,
    length_gain,
    seed_spread,
)
from experiments.text.text_configurations import HYBRID, TOLERANCE, base_configurations, configuration_label
from experiments.text.text_pictures import REFERENCE, draw_all
from experiments.text.text_recipe import TextRecipe

__all__ = ["write_text_page"]

_FIXED = (
    "Fixed before the first model was trained, except for the choice of learning rates. At first it was made by trials "
    "of 128 steps with a warm-up of 10, which turned out to depend on chance: [what was found](log.md#the-text-suite-"
    "short-trials-do-not-order-learning-rates). The table of which rule to take for what came then, too, when four "
    "models had been trained at the lowest rate, and costs measured apart from the trainings when fifteen had been."
)
_AS_FAST = 0.05
"""Speeds that differ by less count as equal."""
_ALL_STEPS, _OTHER_COMMIT = "\N{DAGGER}", "\N{DOUBLE DAGGER}"
_CAPTIONS = {
    "bits": "Bits per byte of every model",
    "position": "Bits per byte by position in the row",
    "recall": "Share of second occurrences completed, by distance",
    "cost": "Bits per byte beside the speed of training and decoding",
    "curves": "Loss in training",
}


def write_text_page(page: Path, results: TextResults | None, manifest: dict[str, Any], *, images: Path) -> Path:
    """Write the page, and pictures below `images`, the folder of pictures beside it.

    Args:
        page: its file.
        results: None before the first of them; the page then says so, and shows the design.
        manifest: of the text.
        images: where pictures go.

    Raises:
        ValueError: the results are of another text than the manifest.
    """
    if results is not None and results.header["corpus"] != manifest["sha256"]:
        raise ValueError(f"{results.path} is of another text than the manifest")
    recipe = TextRecipe() if results is None else results.recipe
    parts = ["# Every rule on real text\n", _introduction(recipe)]
    if results is None or not results.configurations:
        said = "No model is trained with a learning rate that was found for it yet."
        if results is not None and results.trials:
            said += " What has been trained is under [Learning rates](#learning-rates)."
        parts.append(filled(said) + "\n")
    else:
        ranked = sorted(
            {configuration for configuration, _ in results.configurations},
            key=lambda configuration: interval(configuration, results).value,
        )
        drawn = draw_all(images, results, ranked)
        parts += ["## Which rule for what\n", _choices(results, ranked, recipe)]
        parts += ["## Findings\n", _findings(results, ranked, recipe)]
        shown = {key: picture(drawn[key], page, caption) for key, caption in _CAPTIONS.items()}
        parts += [shown["bits"], "## Bits per byte\n", _quality(results, ranked, recipe), shown["curves"]]
        parts += ["## Beyond the training length\n", _lengths(results, ranked, recipe), shown["position"]]
        parts += ["## Recall\n", shown["recall"]]
        if results.costs:
            parts += ["## Costs\n", _costs(results, ranked, recipe), shown["cost"]]
    parts += ["## What is missing\n", _missing(results, recipe), "## Design\n", _design(recipe)]
    parts += ["## Text\n", _text(manifest, recipe)]
    if results is not None and results.trials:
        parts += ["## Learning rates\n", _rates(results, recipe), "## Runs\n", _runs(results)]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(parts), encoding="utf-8")
    return page


def _introduction(recipe: TextRecipe) -> str:
    return filled(
        "Every rule of the zoo, softmax attention and hybrids of both, as causal language models of "
        f"{recipe.parameters / 1e6:g} M parameters, trained on the same {recipe.tokens / 1e6:.0f} M tokens of Python "
        "source in the same order. The result file and this page are made by"
    ) + (
        "\n\n"
        "    python scripts/build_python_text.py\n"
        "    deltazoo lab --suite text --device cuda --out benchmarks/results/text.jsonl --limit 900\n"
        "    python scripts/render_text.py\n\n"
        "The second command trains what the file lacks, the most important first and one on each GPU, and can be given "
        "again and\nagain.\n\n"
        "The softmax model of this suite, converted to delta-rule layers: [text_conversions.md](text_conversions.md).\n"
    )


def _choices(results: TextResults, ranked: Sequence[str], recipe: TextRecipe) -> str:
    """For each use the best model, its figure, and which others are as good by the rules of the design."""
    first = {configuration: results.of_configuration(configuration)[0] for configuration in ranked}
    rows = []
    lengths = recipe.row_length, recipe.scored_lengths[-1]
    for length in lengths:
        best = min(ranked, key=lambda configuration: interval(configuration, results, length).value)
        ties = [other for other in ranked if other != best and not compare(other, best, results, length).called]
        found = f"{interval(best, results, length)} bits per byte"
        rows.append((f"text, rows of {length:,} tokens", best, found, ties))
    recall = {configuration: _recalled(result, recipe.row_length) for configuration, result in first.items()}
    if all(asked for _, asked in recall.values()):
        best = max(recall, key=lambda configuration: _share(recall[configuration]))
        ties = [other for other in ranked if other != best and _tie(recall[other], recall[best])]
        rows.append(("recall within the row", best, f"{_share(recall[best]):.1%}", ties))
    speeds = {"training": {name: result.tokens_per_second for name, result in results.costs.items()}}
    for batch in recipe.decode_batches:
        speeds[f"decoding {batch} {'row' if batch == 1 else 'rows'}"] = results.decoding_speeds(batch)
    for use, found_speeds in speeds.items():
        speed = {name: found_speeds[name] for name in ranked if name in found_speeds}
        if not speed:
            continue
        best = max(speed, key=speed.__getitem__)
        ties = [other for other in speed if other != best and speed[other] >= (1 - _AS_FAST) * speed[best]]
        rows.append((use, best, f"{speed[best]:,.0f} tokens/s", ties))
    shown = [
        [use, configuration_label(best), _mixer(best), found, _listed(ties) or "-"] for use, best, found, ties in rows
    ]
    if seed_spread(results) is None:
        for row in shown[: len(lengths)]:
            row[-1] = "not known before second seeds"
    note = (
        f"As good: no difference is called; recall differs by less than two standard errors; speed by less than "
        f"{_AS_FAST:.0%}."
    )
    asked = recall[ranked[0]][1]
    if asked:
        share = max(map(_share, recall.values()))
        error = 100 * math.sqrt(share * (1 - share) / asked)
        note += (
            f" For recall {asked:,} second occurrences of identifiers are scored: the standard error of the best share "
            f"is {error:.2f} percentage points, that of its difference from a share near it {math.sqrt(2) * error:.2f}."
        )
    header = ("for", "best", "`mixer`", "figure", "as good")
    return table(header, shown, text_columns=5) + "\n" + filled(note) + "\n\n" + filled(_how_to_build(recipe)) + "\n"


def _how_to_build(recipe: TextRecipe) -> str:
    pattern = f"{recipe.softmax_every - 1} times `linear_attention`, then `full_attention`"
    return (
        "`mixer` is the key to set in a model's configuration: `model.mixer` for `deltazoo train`, the argument "
        "`mixer` of the model type `delta_rule` in Python. Options beside it are keys of the same configuration. The "
        f"[next table](#bits-per-byte) has both for all models. A {recipe.softmax_every - 1}:1 hybrid has two keys "
        f"more: `layer_types`, {pattern}, repeated over all layers; and `num_attention_heads`, the number of heads of "
        "its softmax layers ([models.md](models.md#build))."
    )


def _mixer(configuration: str) -> str:
    """What to give as `mixer`, with its options."""
    parsed = parse_configuration(configuration.removeprefix(HYBRID))
    if parsed.spec is None:
        return "any; all layers `full_attention`"
    options = (f"`{key}: {json.dumps(value)}`" for key, value in parsed.options.items())
    return ", ".join([f"`{parsed.spec.name}`", *options, *(["hybrid"] if configuration.startswith(HYBRID) else [])])


def _listed(configurations: Sequence[str], most: int = 5) -> str:
    shown = "; ".join(configuration_label(configuration) for configuration in configurations[:most])
    return shown if len(configurations) <= most else f"{shown} and {len(configurations) - most} more"


def _findings(results: TextResults, ranked: Sequence[str], recipe: TextRecipe) -> str:
    """One sentence each; only what the rule of the design calls is said to differ."""
    best, spread = ranked[0], seed_spread(results)
    lines = [f"Fewest bits per byte: {configuration_label(best)}, {interval(best, results)}."]
    if spread is None:
        lines.append("No model has two seeds yet, so no difference between models is called.")
    else:
        ties = [
            configuration_label(configuration)
            for configuration in ranked[1:]
            if not compare(configuration, best, results).called
        ]
        lines.append(f"Ties with it: {'; '.join(ties) or 'none'}.")
        lines += [_beside(other, ranked, results) for other in (REFERENCE, SOFTMAX) if other in ranked]
        lines.append(f"Two seeds of one model differ by up to {spread:.4f} bits per byte.")
    for length in recipe.scored_lengths[1:]:
        gains = {configuration: length_gain(configuration, results, length) for configuration in ranked}
        sides = (
            (
                "fewer bits per byte",
                {configuration: gain for configuration, gain in gains.items() if gain.high < 0},
            ),
            ("more", {configuration: gain for configuration, gain in gains.items() if gain.low > 0}),
        )
        said = [_most(what, side) for what, side in sides if side]
        instead = f"Rows of {length:,} tokens instead of {recipe.row_length:,}"
        lines.append(
            f"{instead}, the same text: no change in any model."
            if not said
            else f"{instead}, the same text. {said[0][0].upper()}{'; '.join(said)[1:]}."
        )
    return "\n".join(filled(line, bullet="* ") for line in lines) + "\n"


def _beside(other: str, ranked: Sequence[str], results: TextResults) -> str:
    differences = {
        configuration: compare(configuration, other, results) for configuration in ranked if configuration != other
    }
    better = {
        configuration: d.interval for configuration, d in differences.items() if d.called and d.interval.value < 0
    }
    worse = {configuration: d.interval for configuration, d in differences.items() if d.called and d.interval.value > 0}
    ties = [configuration_label(configuration) for configuration, d in differences.items() if not d.called]
    said = [_most(what, side) for what, side in (("better", better), ("worse", worse)) if side]
    return f"Beside {configuration_label(other)}: " + "; ".join([*said, f"ties: {'; '.join(ties) or 'none'}"]) + "."


def _most(what: str, intervals: dict[str, Interval]) -> str:
    """How many configurations, and the one with the largest difference."""
    most = max(intervals, key=lambda configuration: abs(intervals[configuration].value))
    return f"{what}: {len(intervals)}, most {configuration_label(most)} by {_signed(intervals[most])}"


def _signed(found: Interval) -> str:
    return f"{found.value:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"


def _quality(results: TextResults, ranked: Sequence[str], recipe: TextRecipe) -> str:
    others = [other for other in (REFERENCE, SOFTMAX) if other in ranked]
    header = [
        "model",
        "`mixer`",
        "bits per byte",
        *(f"minus {configuration_label(other)}" for other in others),
        "recall",
        "training loss",
        "seeds",
    ]
    rows = []
    for configuration in ranked:
        differences = [
            "-" if configuration == other else _difference(configuration, other, results) for other in others
        ]
        of_seeds = results.of_configuration(configuration)
        recall = _recall(of_seeds[0], recipe.row_length)
        rows.append(
            [
                configuration_label(configuration),
                _mixer(configuration),
                str(interval(configuration, results)),
                *differences,
                recall,
                f"{of_seeds[0].curve[-1][1]:.3f}",
                str(len(of_seeds)),
            ]
        )
    note = (
        f"Brackets: {LEVEL:.0%} of bootstrap resamples of files. Bold: called a difference by the rule below. Recall: "
        "the share of second occurrences of new identifiers that the first seed completes, in rows of the training "
        "length. Training loss: nats per token at the end of the first seed's training, on text that it has read "
        "before."
    )
    return table(header, rows, text_columns=2) + "\n" + filled(note) + "\n"


def _difference(configuration: str, other: str, results: TextResults) -> str:
    found = compare(configuration, other, results)
    return f"**{_signed(found.interval)}**" if found.called else _signed(found.interval)


def _lengths(results: TextResults, ranked: Sequence[str], recipe: TextRecipe) -> str:
    header = [
        "model, change in bits per byte",
        *(f"rows of {length:,}" for length in recipe.scored_lengths[1:]),
    ]
    rows = (
        [
            configuration_label(configuration),
            *(_signed(length_gain(configuration, results, length)) for length in recipe.scored_lengths[1:]),
        ]
        for configuration in ranked
    )
    return table(header, rows, text_columns=1)


def _costs(results: TextResults, ranked: Sequence[str], recipe: TextRecipe) -> str:
    header = [
        "model",
        "training, tokens/s",
        "training, GiB",
        *(f"decoding {batch} {'row' if batch == 1 else 'rows'}, tokens/s" for batch in recipe.decode_batches),
        *(f"state after {length:,} tokens, MiB" for length in recipe.scored_lengths[:2]),
        "parameters",
    ]
    measured = {name: results.costs[name] for name in ranked if name in results.costs}
    longer = {name for name, costs in measured.items() if costs.training_steps > recipe.rungs[0]}
    commits: dict[str, list[str]] = {}
    for name, costs in measured.items():
        commits.setdefault(costs.environment.commit[:7], []).append(name)
    most = max(commits, key=lambda commit: len(commits[commit]), default="")
    rows = []
    for configuration in ranked:
        first = results.of_configuration(configuration)[0]
        found = measured.get(configuration)
        label = configuration_label(configuration)
        steps = f" {_ALL_STEPS}" if configuration in longer else ""
        rows.append(
            [
                label if found is None or configuration in commits[most] else f"{label} {_OTHER_COMMIT}",
                f"{found.tokens_per_second:,.0f}{steps}" if found else "-",
                f"{found.peak_bytes / 2**30:.1f}{steps}" if found and found.peak_bytes else "-",
                *(found.decoding_figure(batch) if found else "-" for batch in recipe.decode_batches),
                *(
                    f"{found.state_bytes[str(length)] / 2**20:.1f}" if found else "-"
                    for length in recipe.scored_lengths[:2]
                ),
                f"{first.parameters:,}",
            ]
        )
    notes = [f"Measured on one {results.card}."]
    if longer:
        notes.append(f"{_ALL_STEPS} Training speed and memory of all steps, not of the first {recipe.rungs[0]:,}.")
    if len(commits) > 1:
        others = (f"{_listed(names, len(names))} (`{commit}`)" for commit, names in commits.items() if commit != most)
        notes.append(f"Rows without {_OTHER_COMMIT} are of commit `{most}`.")
        notes.append(f"{_OTHER_COMMIT} {'; '.join(others)}: kernels may differ from commit to commit.")
    return table(header, rows, text_columns=1) + "\n" + filled(" ".join(notes)) + "\n"


def _recall(result: TextResult, length: int) -> str:
    found = _recalled(result, length)
    return f"{_share(found):.1%}" if found[1] else "-"


def _recalled(result: TextResult, length: int) -> tuple[int, int]:
    """Second occurrences that are completed, and all of them."""
    groups = [counts for key, counts in result.scores[str(length)]["recall"].items() if key != "first"]
    return sum(counts[1] for counts in groups), sum(counts[0] for counts in groups)


def _share(found: tuple[int, int]) -> float:
    return found[0] / found[1]


def _tie(found: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether two shares differ by less than two standard errors of their difference."""
    variance = sum(_share(x) * (1 - _share(x)) / x[1] for x in (found, other))
    return abs(_share(found) - _share(other)) <= 2 * math.sqrt(variance)


def _missing(results: TextResults | None, recipe: TextRecipe) -> str:
    done = set() if results is None else {configuration for configuration, _ in results.configurations}
    configurations = [
        configuration_label(configuration) for configuration in base_configurations() if configuration not in done
    ]
    hybrids = sum(configuration.startswith(HYBRID) for configuration in done)
    seconds = 0 if results is None else sum(seed > 0 for _, seed in results.configurations)
    lines = [
        f"Of {len(base_configurations())} models, every rule and softmax attention, {len(configurations)} are not "
        f"trained: {'; '.join(configurations)}."
        if configurations
        else "Every rule and softmax attention is trained.",
        f"Hybrids: {hybrids} of {HYBRIDS} planned are trained. Second seeds: {seconds} of {SECOND_SEEDS} planned.",
    ]
    if results is not None and (unmeasured := done - results.costs.keys()):
        names = "; ".join(
            configuration_label(name) for name, seed in results.configurations if name in unmeasured and not seed
        )
        lines.append(f"Not measured: the costs of {names}.")
    return "\n".join(filled(line, bullet="* ") for line in lines) + "\n"


def _design(recipe: TextRecipe) -> str:
    *rates, last_rate = (f"{rate:g}" for rate in recipe.rates)
    lengths = " and ".join(f"{length:,}" for length in recipe.scored_lengths[1:])
    points = {
        "Models": f"{recipe.num_layers} blocks of width {recipe.hidden_size}, {recipe.num_heads} heads of "
        f"{recipe.hidden_size // recipe.num_heads} channels in queries, keys and values of every rule (papers differ "
        "here; with equal heads the states have one size), short convolutions and output gates as in each rule's "
        "paper, SwiGLU, tied embeddings. The width of the MLP makes up for what a mixer has more or less than others: "
        f"{recipe.parameters / 1e6:g} M parameters within {TOLERANCE:.0%}, embedding included. Softmax attention has "
        f"rotary positions (base 10,000). In hybrids one of every {recipe.softmax_every} blocks has it, the last of "
        "them.",
        "Training": f"{recipe.steps:,} steps of {recipe.rows_per_step} rows of {recipe.row_length:,} tokens, "
        f"{recipe.tokens / 1e6:.0f} M tokens in all. A row is a piece of the stream of files; it may begin within a "
        "file and go on into the next, behind a beginning token. The seed decides the initial weights and the order of "
        f"rows: all models of a seed see the same rows. AdamW, betas {recipe.betas[0]} and {recipe.betas[1]}, weight "
        f"decay {recipe.weight_decay}, gradients clipped to norm {recipe.clip:g}; warm-up over {recipe.warmup:.0%} of "
        f"the steps, then a cosine to {recipe.final_rate:.0%} of the peak. bfloat16 autocast over float32 weights.",
        "Learning rate": f"{', '.join(rates)} or {last_rate}, found for each model by successive halving "
        "(arXiv:1502.07943): trainings with all of them start, and the one with the highest mean loss over the last "
        f"{recipe.judged_steps} steps is dropped after {_in_words(recipe.rungs)} steps of its {recipe.steps:,}; the "
        "last one goes on to the end. So a rate is judged by the training that it is chosen for, warm-up included. "
        f"What is dropped costs {sum(recipe.rungs) / recipe.steps:.0%} of a training. A rate at which the loss is not "
        "finite is out. A second seed takes the rate of the first.",
        "Scores": f"The held-out stream is cut into rows of {recipe.row_length:,} tokens, and again of {lengths}, each "
        "read from an empty state; every token but beginning tokens is scored. Logits are float32. Bits per byte: the "
        "sum over all tokens, divided by their bytes.",
        "Recall": "An identifier is new if it occurs nowhere in the training part and has at least three tokens. At "
        "its second occurrence in a row it is completed if each of its tokens after the first is the model's likeliest "
        "one. First occurrences are counted beside, as what guessing gives.",
        "Costs": "Trainings may be done on several kinds of GPU (see [Runs](#runs)); costs are measured on one kind, "
        f"apart from them. Training: median pace and peak memory of the first {recipe.rungs[0]:,} steps at the rate "
        "that was found, without those in which kernels are compiled (rules with one decay per channel slow down "
        "while their gates grow stronger). Decoding: weights in bfloat16, greedy, captured, "
        f"{recipe.decode_tokens} tokens after {recipe.decode_context:,}, by the loop of `deltazoo.generate`. The "
        "blocks of rules are [fused for it](generation.md#deltazoogenerate); softmax attention is torch's "
        "`scaled_dot_product_attention` over a static cache. To measure again, delete lines of the kind `costs` from "
        "the result file.",
        "Intervals": f"{LEVEL:.0%} of {RESAMPLES:,} bootstrap resamples of held-out files, the same ones for all "
        "models, so that differences are paired. Files of one package are alike, which resampling files leaves out.",
        "Calling a difference": "Two models differ, each by the mean of its seeds, if the interval of the paired "
        "difference excludes 0 and the difference is larger than any two seeds of one model differ. Everything else is "
        "a tie. Until a model has two seeds, nothing is called.",
        "Order": f"Every rule and softmax attention with seed 0; then hybrids of the best {HYBRIDS} rules; then seed 1 "
        f"of the best {SECOND_SEEDS} models. A training that does not end within the limit of a session leaves "
        "nothing.",
    }
    bullets = [filled(f"**{what}.** {text}", bullet="* ") for what, text in points.items()]
    return "\n".join([filled(_FIXED) + "\n", *bullets]) + "\n"


def _in_words(rungs: Sequence[int]) -> str:
    return " and ".join(f"{rung:,}" for rung in rungs)


def _text(manifest: dict[str, Any], recipe: TextRecipe) -> str:
    parts: dict[str, list[dict[str, Any]]] = {"training": [], "held out": []}
    for package in manifest["packages"]:
        parts[package["part"]].append(package)
    tokens = {part: sum(package.get("tokens", 0) for package in packages) for part, packages in parts.items()}
    rows = [
        (
            package["package"],
            package["version"],
            package["part"],
            *(f"{package.get(key, 0):,}" for key in ("kept_files", "kept_bytes", "tokens", "copies_bytes")),
        )
        for part in ("held out", "training")
        for package in sorted(parts[part], key=lambda package: -package.get("kept_bytes", 0))
        if part == "held out" or package.get("kept_bytes", 0) >= 1e6
    ]
    small = [package for package in parts["training"] if package.get("kept_bytes", 0) < 1e6]
    size = sum(package.get("kept_bytes", 0) for package in small)
    return filled(
        "The Python sources of the packages that `constraints.txt` pinned when the text was made, split by package. "
        "Dropped are near-copies (half of a file's runs of three lines occur in files kept before it), tables of data "
        "(letters are less than 40% of the characters) and files of fewer than three lines. The byte-level BPE of "
        f"{manifest['vocab_size']:,} entries is trained on the training part. That part has "
        f"{tokens['training']:,} tokens, and a training reads {recipe.tokens / tokens['training']:.2f} times as many; "
        f"{tokens['held out']:,} are held out. The text itself is not distributed: the script builds it from what is "
        f"installed in these versions. SHA-256 `{manifest['sha256']}`."
    ) + (
        "\n\n"
        + table(
            ("package", "version", "part", "files", "bytes", "tokens", "bytes of near-copies dropped"),
            [*rows, (f"{len(small)} smaller ones", "", "training", "", f"{size:,}", "", "")],
            text_columns=3,
        )
    )


def _rates(results: TextResults, recipe: TextRecipe) -> str:
    rows, at_ends = [], []
    for configuration in dict.fromkeys(configuration for configuration, _, _ in results.trials):
        found = results.rate_of(configuration)
        cells = [_rate_cell(results, configuration, rate) for rate in recipe.rates]
        if found is not None:
            place = recipe.rates.index(found)
            cells[place] = f"**{cells[place]}**"
            if place in (0, len(recipe.rates) - 1):
                at_ends.append(configuration_label(configuration))
        rows.append((configuration_label(configuration), *cells))
    header = ("model", *(f"{rate:g}" for rate in recipe.rates))
    note = (
        f"Loss in nats per token over the last {recipe.judged_steps} steps before {_in_words(recipe.rungs)} steps, and "
        "bits per byte where a training went to the end. Bold: the rate that was found."
    )
    if at_ends:
        note += f" It is an end of the sweep, so one beyond it may be better: {'; '.join(at_ends)}."
    if early := _judged_though_dropped(results, recipe):
        names = "; ".join(configuration_label(name) for name in early)
        rates = " and ".join(f"{rate:g}" for rate in sorted({rate for found in early.values() for rate in found}))
        note += (
            f" {names}: a loss at {rates} is shown after more steps than the halving gives that rate, since these "
            "models had been trained at it to the end before the halving was introduced ([log.md](log.md#the-text-"
            "suite-short-trials-do-not-order-learning-rates))."
        )
    return table(header, rows, text_columns=1) + "\n" + filled(note) + "\n"


def _judged_though_dropped(results: TextResults, recipe: TextRecipe) -> dict[str, list[float]]:
    """By configuration the rates that have a loss at a rung which they did not reach by successive halving."""
    found: dict[str, list[float]] = {}
    for configuration in dict.fromkeys(configuration for configuration, _, _ in results.trials):
        losses = results.losses(configuration)
        for rung in recipe.rungs[1:]:
            left, _ = recipe.standing({key: loss for key, loss in losses.items() if key[1] < rung})
            out = [rate for rate in recipe.rates if rate not in left and (rate, rung) in losses]
            if out:
                found[configuration] = sorted({*found.get(configuration, []), *out})
    return found


def _rate_cell(results: TextResults, configuration: str, rate: float) -> str:
    trials = [results.trials.get((configuration, rate, rung)) for rung in results.recipe.rungs]
    shown = [f"{trial.loss:.3f}" if math.isfinite(trial.loss) else "not finite" for trial in trials if trial]
    training = results.trainings.get((configuration, 0, rate))
    if training is not None:
        shown.append(f"{bits_per_byte(training, results):.4f} bits")
    return ", ".join(shown) or "-"


def _runs(results: TextResults) -> str:
    environments: dict[tuple[str, ...], list[str]] = {}
    done: list[Trial | TextResult] = [*results.trials.values(), *results.trainings.values()]
    for result in done:
        here = result.environment
        key = (here.device, here.torch, here.triton or "-", here.transformers or "-", f"`{here.commit[:12]}`")
        environments.setdefault(key, []).append("configuration" if isinstance(result, TextResult) else "trial")
    rows = [(*key, str(kinds.count("configuration")), str(kinds.count("trial"))) for key, kinds in environments.items()]
    return table(("machine", "torch", "Triton", "transformers", "commit", "trainings", "rungs reached"), rows)
