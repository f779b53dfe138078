"""The page of the suite, made from its result file and that of the suite `text` alone."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.markdown import filled, picture, table
from deltazoo.training.conversion_config import DistillationConfig, StageConfig
from deltazoo.training.figures import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, new_figure, save_figure
from experiments.configurations import label_of
from experiments.text.results import TextResult, TextResults
from experiments.text.text_comparison import LEVEL, RESAMPLES, Interval, bits_per_byte, ratio_interval
from experiments.text.text_configurations import HYBRID
from experiments.text_conversions.conversion_recipe import CONTROL, Conversion, ConversionRecipe, tokens_of
from experiments.text_conversions.conversion_results import ConversionResults, DecodingResult, Measured

__all__ = ["write_conversion_page"]

_COLOURS = (GREEN, BLUE, ORANGE, PINK)
_STAGES = {"align": "align", "distill": "distill", "finetune": "fine-tune"}
_PURPOSES = {
    "gated_deltanet": "the reference of the suite",
    "kda": "its decay differs from channel to channel",
    "delta_net": "it has no decay, as softmax attention has none",
    "mamba2_style": "it has the decay of Gated DeltaNet and no correction of old values",
}


def write_conversion_page(
    page: Path, results: ConversionResults | None, configurations: TextResults | None, *, images: Path
) -> Path:
    """Write the page, and its picture below `images`, the folder of pictures beside it.

    Args:
        page: its file.
        results: None before the first of them; the page then says so, and shows the design.
        configurations: of the suite `text`, for models trained from the start; those of another text or recipe are left
            out.
        images: where the picture goes.
    """
    recipe = ConversionRecipe() if results is None else results.recipe
    parts = ["# The softmax model of the text suite, converted\n", _introduction(recipe)]
    if results is None or not results.conversions:
        parts.append("Nothing has been converted yet; what is planned is below.\n")
    else:
        shown = [conversion for conversion in recipe.conversions() if conversion in results.conversions]
        alike = _of_same_text(configurations, results)
        parts += ["## Findings\n", _findings(results, alike, recipe)]
        parts += ["## Bits per byte\n", _quality(shown, results, alike, recipe)]
        parts.append(
            picture(
                _draw(images / "text_conversions.png", results, recipe),
                page,
                "Bits per byte by tokens read, beginning above the panels, whose vertical scales differ",
            )
        )
        parts += ["## Beyond the training length\n", _lengths(shown, results, recipe)]
    if results is not None and results.decodings:
        parts += ["## Decoding and memory\n", _decoding(results, recipe)]
    parts += ["## What is missing\n", _missing(results, recipe), "## Design\n", _design(recipe)]
    if results is not None and results.conversions:
        parts += ["## Runs\n", _runs(results)]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(parts), encoding="utf-8")
    return page


def _introduction(recipe: ConversionRecipe) -> str:
    return (
        filled(
            "The softmax model of the suite on [real text](text.md) is trained, its attention is replaced by "
            f"delta-rule layers, and each of these models is trained on {recipe.tokens / 1e6:.1f} M tokens, "
            f"{recipe.tokens / recipe.text.tokens:.0%} of what the softmax model read. How to convert a model of your "
            "own: [swap.md](swap.md). The result file and this page are made by"
        )
        + "\n\n"
        "    python scripts/build_python_text.py\n"
        "    deltazoo lab --suite text-conversions --device cuda --out benchmarks/results/text_conversions.jsonl "
        "--limit 900\n"
        "    python scripts/render_text.py\n\n"
        + filled(
            "The second command trains the softmax model or finds it in the user's cache folder, converts what the "
            "file lacks, the most important first, measures decoding, and can be given again and again. Several "
            "processes share the work with the same `--out`, on one GPU, too, which the many small steps of alignment "
            "leave mostly idle: `--only teacher` trains the softmax model, then each process gets conversions of its "
            "own, `--device cuda:1 --only kda@3:1,kda@all`, and `--only decoding` comes last, alone. No weights are "
            "published."
        )
        + "\n"
    )


def _findings(results: ConversionResults, configurations: TextResults | None, recipe: ConversionRecipe) -> str:
    """One sentence each; only what the rule of the design calls is said to differ."""
    size, spread = _bytes(results), _seed_spread(results)
    above = {
        conversion: _scored(result, results) - _scored(results.teacher_of(result), results)
        for conversion, result in results.conversions.items()
    }
    lines = []
    for layers in recipe.layers:
        done = [conversion for conversion in above if conversion.layers == layers and conversion.seed == 0]
        if not done:
            continue
        best = min(done, key=lambda conversion: above[conversion].sum())
        result = results.conversions[best]
        lost = _bits(result.transfer_nats, results) - _scored(results.teacher_of(result), results)
        missing = len(done) < len(recipe.rules)
        among = f" of {len(done)} {'rule' if len(done) == 1 else 'rules'} converted so far" if missing else ""
        lines.append(
            f"{_in_words(layers)}: {label_of(best.rule)} has the fewest bits per byte{among}, "
            f"{_signed(ratio_interval(above[best], size))} beside the softmax model; it recovers "
            f"{_share(ratio_interval(lost - above[best], lost))} of what the swap lost."
        )
        behind = {other: ratio_interval(above[other] - above[best], size) for other in done if other != best}
        if spread is not None and behind:
            worse = [
                f"{label_of(other.rule)} {_signed(found)}"
                for other, found in behind.items()
                if found.low > 0 and found.value > spread
            ]
            lines[-1] += f" Worse than it: {'; '.join(worse) or 'none'}."
    if CONTROL in above:
        change = _signed(ratio_interval(above[CONTROL], size))
        lines.append(f"The softmax model itself, trained on with nothing swapped, changes by {change}.")
    further = (
        _beside_the_start(results, configurations, recipe),
        _in_longer_rows(results, recipe),
        *_in_decoding(results, recipe),
    )
    lines += [line for line in further if line]
    return "\n".join(filled(line, bullet="* ") for line in lines) + "\n"


def _beside_the_start(
    results: ConversionResults, configurations: TextResults | None, recipe: ConversionRecipe
) -> str | None:
    """Each conversion minus the model with the same rule in the same layers that was trained from the start."""
    differences = []
    for conversion, result in results.conversions.items():
        started = _trained_from_the_start(conversion, configurations, recipe)
        if started is not None and not conversion.seed:
            started_bits = _bits(started.scores[str(recipe.text.row_length)]["file_nats"], results)
            found = ratio_interval(_scored(result, results) - started_bits, _bytes(results))
            differences.append(f"{conversion.label}: {_signed(found)}")
    if not differences:
        return None
    said = "Bits per byte of a conversion minus those of the same rule in the same layers, trained from the start"
    return f"{said} on {recipe.text.tokens / 1e6:.0f} M tokens: {'; '.join(differences)}."


def _in_longer_rows(results: ConversionResults, recipe: ConversionRecipe) -> str | None:
    lengths = recipe.text.scored_lengths[1:]
    if not lengths:
        return None
    models: dict[str, list[Measured]] = {"in the softmax model": list(results.teachers.values())}
    for layers in recipe.layers:
        found = [result for conversion, result in results.conversions.items() if conversion.layers == layers]
        models[f"with {_in_words(layers).lower()} swapped" if layers == "all" else f"in {layers}"] = list(found)
    changes = {
        who: [[_length_change(model, length, results).value for model in found] for length in lengths]
        for who, found in models.items()
        if found
    }
    said = (f"{' and '.join(map(_range_of, by_length))} {who}" for who, by_length in changes.items())
    times = " and ".join(f"{length / recipe.text.row_length:g}" for length in lengths)
    return f"In rows {times} times as long as in training, bits per byte change by {'; '.join(said)}."


def _range_of(values: Sequence[float]) -> str:
    low, high = f"{min(values):+.4f}", f"{max(values):+.4f}"
    return low if low == high else f"{low} to {high}"


def _in_decoding(results: ConversionResults, recipe: ConversionRecipe) -> list[str | None]:
    """Speed after each context, and memory after the longest."""
    contexts = recipe.decode_contexts
    speeds = [_by_layers("Decoding one row", "tokens_per_second", "tokens/s", 1, x, results, recipe) for x in contexts]
    memory = "Memory beside the weights in decoding one row"
    return [*speeds, _by_layers(memory, "peak_bytes", "MiB", 2**20, contexts[-1], results, recipe)]


def _by_layers(
    what: str, key: str, unit: str, size: int, context: int, results: ConversionResults, recipe: ConversionRecipe
) -> str | None:
    """What was measured in decoding after a context, of the softmax model and of each choice of layers."""
    values: dict[str, list[float]] = {}
    for conversion in recipe.decodings():
        measured = results.decodings.get(conversion)
        value = measured.decoding[str(context)].get(key) if measured is not None else None
        if value is not None:
            values.setdefault(conversion.layers, []).append(value / size)
    if values.keys() <= {CONTROL.layers}:
        return None
    said = []
    for layers, found in values.items():
        low, high = f"{min(found):,.0f}", f"{max(found):,.0f}"
        who = "the softmax model" if layers == CONTROL.layers else _in_words(layers).lower()
        said.append(f"{low if low == high else f'{low} to {high}'} {unit} for {who}")
    return f"{what} after {context:,} tokens: {'; '.join(said)}."


def _quality(
    shown: Sequence[Conversion],
    results: ConversionResults,
    configurations: TextResults | None,
    recipe: ConversionRecipe,
) -> str:
    stages = [stage.section for stage in recipe.stages]
    titles = {"align": "aligned", "distill": "distilled", "finetune": "fine-tuned"}
    header = ["conversion", "parameters", "softmax model", "swapped", *(titles[stage] for stage in stages)]
    header += ["minus softmax model", "recovered", "trained from the start"]
    one_teacher = _one_teacher(shown, results)
    alone = f"{_scored(one_teacher, results).sum() / _bytes(results).sum():.4f}"
    rows = [["softmax model", f"{one_teacher.parameters:,}", alone, *(["-"] * (len(header) - 3))]]
    for conversion in shown:
        result = results.conversions[conversion]
        last = {stage: f"{bits:.4f}" for stage, _, bits in result.points}
        size, swapped = _bytes(results), _bits(result.transfer_nats, results)
        teacher, converted = _scored(results.teacher_of(result), results), _scored(result, results)
        started = _trained_from_the_start(conversion, configurations, recipe)
        rows.append(
            [
                _label(conversion),
                f"{result.parameters:,}",
                f"{teacher.sum() / size.sum():.4f}",
                last["transfer"] if result.swapped else "-",
                *(last.get(stage, "-") for stage in stages),
                _signed(ratio_interval(converted - teacher, size)),
                _share(ratio_interval(swapped - converted, swapped - teacher)) if result.swapped else "-",
                f"{bits_per_byte(started, configurations):.4f}" if started is not None and configurations else "-",
            ]
        )
    spread = _seed_spread(results)
    hybrids = f"{recipe.text.softmax_every - 1}:1"
    other_rules = _hybrids_of_other_rules(shown, configurations, recipe)
    return (
        table(header, rows, text_columns=1)
        + "\n"
        + filled(
            "Recovered: (swapped - converted) / (swapped - softmax model). It does not order the rules, since its "
            "denominator is what each rule's own swap lost. "
            + (
                f"Trained from the start: the {hybrids} hybrids of the suite are of other rules "
                f"({'; '.join(other_rules)}), so no {hybrids} conversion has one. "
                if other_rules
                else ""
            )
            + f"Brackets: {LEVEL:.0%} of bootstrap resamples of held-out files; they leave out what seeds change. "
            + (
                "No conversion has two seeds yet."
                if spread is None
                else f"Two seeds of one conversion differ by up to {spread:.4f} bits per byte."
            )
        )
        + "\n"
    )


def _lengths(shown: Sequence[Conversion], results: ConversionResults, recipe: ConversionRecipe) -> str:
    longer = recipe.text.scored_lengths[1:]
    models: dict[str, Measured] = {"softmax model": _one_teacher(shown, results)}
    models |= {_label(conversion): results.conversions[conversion] for conversion in shown}
    rows = []
    for label, model in models.items():
        rows.append([label, *(_signed(_length_change(model, length, results)) for length in longer)])
    return table(["change in bits per byte", *(f"rows of {length:,}" for length in longer)], rows, text_columns=1)


def _decoding(results: ConversionResults, recipe: ConversionRecipe) -> str:
    models = {
        "softmax model" if conversion == CONTROL else conversion.label: results.decodings[conversion]
        for conversion in recipe.decodings()
        if conversion in results.decodings
    }
    contexts = [str(context) for context in recipe.decode_contexts]
    figures: dict[str, Callable[[DecodingResult, str], str]] = {
        "tokens/s": lambda model, context: (
            model.decoding[context].get("error") or f"{model.decoding[context]['tokens_per_second']:,.0f}"
        ),
        "state, MiB": lambda model, context: f"{model.state_bytes[context] / 2**20:,.1f}",
        "memory, MiB": lambda model, context: (
            f"{model.decoding[context]['peak_bytes'] / 2**20:,.0f}" if "peak_bytes" in model.decoding[context] else "-"
        ),
    }
    header = ["model", *(f"{name} after {int(context):,}" for name in figures for context in contexts)]
    rows = [
        [label, *(figure(model, context) for figure in figures.values() for context in contexts)]
        for label, model in models.items()
    ]
    at = sorted({f"{found.environment.device} at commit `{found.environment.commit[:7]}`" for found in models.values()})
    ending = f"Memory: the most held beside the weights. Measured on one {' and '.join(at)}."
    return table(header, rows, text_columns=1) + "\n" + filled(ending) + "\n"


def _missing(results: ConversionResults | None, recipe: ConversionRecipe) -> str:
    conversions = recipe.conversions()
    missing = [conversion for conversion in conversions if results is None or conversion not in results.conversions]
    unmeasured = [model for model in recipe.decodings() if results is None or model not in results.decodings]
    sentences = []
    if missing:
        names = "; ".join(_label(conversion) for conversion in missing)
        sentences.append(f"Of {len(conversions)} conversions, {len(missing)} are not done: {names}.")
    if unmeasured:
        sentences.append(f"Decoding of {len(unmeasured)} models is not measured.")
    return filled(" ".join(sentences) or "Nothing.") + "\n"


def _design(recipe: ConversionRecipe) -> str:
    text = recipe.text
    rules = "; ".join(
        f"{label_of(rule)}: {_PURPOSES[rule]}" if rule in _PURPOSES else label_of(rule) for rule in recipe.rules
    )
    contexts = " and ".join(f"{context:,}" for context in recipe.decode_contexts)
    points = {
        "Softmax model": "`softmax` of the suite on real text, seed 0: its model, rows and training on "
        f"{text.tokens / 1e6:.0f} M tokens at a learning rate of {recipe.rate:g}. It becomes a Llama of transformers, "
        "which computes the same. Where a file holds conversions of several trainings of it, each is compared with its "
        "own.",
        "Rules": f"{rules}. They were chosen for these differences.",
        "Layers": f"{', '.join(recipe.layers)}: delta-rule to softmax layers, repeated from the first layer on. All "
        "starts are those of `swap_attention`; nothing is chosen by measuring layers.",
        "Stages": "The recipe of [swap.md](swap.md#the-recipe). "
        + " ".join(_stage(stage) for stage in recipe.stages)
        + f" Together {recipe.tokens:,} tokens, {recipe.tokens / text.tokens:.1%} of the softmax model's. Rates and "
        "schedules are those of [configs/swap_gpu.yaml](../configs/swap_gpu.yaml), chosen on another text before; none "
        "is tried out on this one.",
        "Rows": f"Pieces of {text.row_length:,} tokens of the training part, which the softmax model has read already, "
        "in another order.",
        "Scores": "As in the suite on real text, in rows of the training length, several times within a stage; at "
        "the end in longer rows as well.",
        "Control": "The softmax model itself through distillation and fine-tuning, with nothing swapped: what it gains "
        "is no merit of a conversion.",
        "From the start": "The suite's configuration with the same rule in the same layers, which read "
        f"{text.tokens / 1e6:.0f} M tokens. Its convolutions and norms are those of the rule's paper, and its MLP "
        "makes up for what the mixer has more. The suite has no 1:1 models, and "
        f"{text.softmax_every - 1}:1 models only of the rules that are best on its text.",
        "Decoding": f"Weights in bfloat16, one row, greedy, captured, {text.decode_tokens} tokens after {contexts}, by "
        "the loop of `deltazoo.generate`, for the softmax model as for the swapped ones. Speed and memory do not "
        "depend on what the weights are, so they are measured apart from the conversions.",
        "Intervals": f"{LEVEL:.0%} of {RESAMPLES:,} bootstrap resamples of held-out files, those of the suite. "
        + (
            f"The conversions of {label_of(recipe.again)} run with a second order of rows. One conversion is called "
            "worse than another if the interval of the paired difference lies above 0 and the difference is larger "
            "than any two orders of one conversion differ, each beside its own softmax model; until there are two, "
            "none is."
            if recipe.again
            else ""
        ),
    }
    bullets = [filled(f"**{what}.** {said}", bullet="* ") for what, said in points.items()]
    return "\n".join(["Fixed before the first conversion.\n", *bullets]) + "\n"


def _stage(stage: StageConfig) -> str:
    rows = f"{stage.rows_per_batch} {'row' if stage.rows_per_batch == 1 else 'rows'}"
    end = f" down to {stage.min_learning_rate_ratio:.0%} of it" if stage.min_learning_rate_ratio else ""
    text = f", text at weight {stage.text_weight:g}" if isinstance(stage, DistillationConfig) else ""
    return f"`{stage.section}`: {stage.steps:,} steps of {rows}, peak rate {stage.learning_rate:g}{end}{text}."


def _runs(results: ConversionResults) -> str:
    rows = []
    for teacher in results.teachers.values():
        here = teacher.environment
        count = sum(result.teacher == teacher.teacher for result in results.conversions.values())
        seconds = [result.seconds for result in results.conversions.values() if result.teacher == teacher.teacher]
        rows.append(
            [
                f"`{teacher.teacher}`",
                here.device,
                here.torch,
                here.triton or "-",
                here.transformers or "-",
                f"`{here.commit[:12]}`",
                f"{teacher.training['rate']:g}",
                f"{teacher.training['seconds']:,.0f}",
                str(count),
                f"{sum(seconds):,.0f}",
            ]
        )
    header = ("softmax model", "machine", "torch", "Triton", "transformers", "commit", "rate", "seconds")
    return table((*header, "conversions", "seconds of all"), rows)


def _draw(path: Path, results: ConversionResults, recipe: ConversionRecipe) -> Path:
    """A panel for each choice of layers, a line for each rule; softmax model and control as level lines."""
    figure, axes = new_figure(len(recipe.layers), width=4.6 * len(recipe.layers) + 2.2, height=4.0)
    for axis, layers in zip(axes, recipe.layers, strict=True):
        for rule, colour in zip(recipe.rules, _COLOURS, strict=False):
            result = results.conversions.get(Conversion(rule, layers))
            if result is not None:
                tokens, bits = zip(*((tokens / 1e6, bits) for _, tokens, bits in result.points), strict=True)
                axis.plot(tokens, bits, "o-", ms=3, color=colour, label=label_of(rule))
        for label, level, colour in _levels(results):
            axis.axhline(level, color=colour, lw=1, ls="--", label=label)
        axis.set_title(_in_words(layers), loc="left", fontsize=10, pad=14)
        axis.set_xlabel("tokens read since the swap (millions)")
        trained = [bits for line in axis.get_lines() for bits in line.get_ydata()[1:]]
        low, high = min(trained), max(trained)  # without that before training, which would flatten all others
        if high > low:
            axis.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
        begin = 0.0
        for stage in recipe.stages:
            if begin:
                axis.axvline(begin, color=GREY, lw=1, ls=":")
            axis.annotate(
                _STAGES[stage.section],
                (begin, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(2, 1),
                textcoords="offset points",
                fontsize=7,
                color=GREY,
            )
            begin += tokens_of(stage) / 1e6
    axes[0].set_ylabel("bits per byte (lower is better);\nvertical scales differ between panels")
    handles = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    axes[-1].legend(
        handles.values(), handles.keys(), fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False
    )
    return save_figure(figure, path)


def _levels(results: ConversionResults) -> list[tuple[str, float, str]]:
    size = _bytes(results).sum()
    levels = [
        ("softmax model", float(_scored(teacher, results).sum() / size), BLACK) for teacher in results.teachers.values()
    ]
    if CONTROL in results.conversions:
        levels.append((CONTROL.label, results.conversions[CONTROL].points[-1][2], GREY))
    return levels


def _in_words(layers: str) -> str:
    return "All layers" if layers == "all" else layers


def _label(conversion: Conversion) -> str:
    return conversion.label + (f", seed {conversion.seed}" if conversion.seed else "")


def _one_teacher(shown: Sequence[Conversion], results: ConversionResults) -> Measured:
    return results.teacher_of(results.conversions[shown[0]])


def _bytes(results: ConversionResults) -> np.ndarray:
    """`[files]`: of the files that are scored."""
    size = np.array(results.header["file_bytes"], dtype=np.float64)
    return size[size > 0]


def _bits(file_nats: Sequence[float], results: ConversionResults) -> np.ndarray:
    """`[files]`: of the files that are scored."""
    return np.array(file_nats)[np.array(results.header["file_bytes"]) > 0] / math.log(2)


def _scored(model: Measured, results: ConversionResults) -> np.ndarray:
    """`[files]`: bits in rows of the training length."""
    return _bits(model.scores[str(results.header["recipe"]["text"]["row_length"])]["file_nats"], results)


def _length_change(model: Measured, length: int, results: ConversionResults) -> Interval:
    """Bits per byte of the same text in rows of a length, minus those in rows of the training length."""
    longer = _bits(model.scores[str(length)]["file_nats"], results)
    return ratio_interval(longer - _scored(model, results), _bytes(results))


def _seed_spread(results: ConversionResults) -> float | None:
    """The largest difference between two seeds of one conversion, in bits per byte beside its softmax model.

    The softmax model may have been trained twice, too.
    """
    size = _bytes(results).sum()
    spreads = []
    for conversion, result in results.conversions.items():
        first = results.conversions.get(Conversion(conversion.rule, conversion.layers))
        if conversion.seed and first is not None:
            above = [(_scored(x, results) - _scored(results.teacher_of(x), results)).sum() for x in (first, result)]
            spreads.append(float(abs(above[1] - above[0]) / size))
    return max(spreads, default=None)


def _of_same_text(configurations: TextResults | None, results: ConversionResults) -> TextResults | None:
    if configurations is None or any(
        configurations.header[key] != results.header[key] for key in ("corpus", "file_bytes")
    ):
        return None
    return configurations if configurations.header["recipe"] == results.header["recipe"]["text"] else None


def _trained_from_the_start(
    conversion: Conversion, configurations: TextResults | None, recipe: ConversionRecipe
) -> TextResult | None:
    configuration = conversion.configuration(recipe.text.softmax_every)
    if configurations is None or configuration is None:
        return None
    return configurations.configurations.get((configuration, 0))


def _hybrids_of_other_rules(
    shown: Sequence[Conversion], configurations: TextResults | None, recipe: ConversionRecipe
) -> list[str]:
    """The rules whose hybrids are trained from the start, by label, if no conversion that is shown is of one."""
    if configurations is None:
        return []
    hybrids = {name for name, _ in configurations.configurations if name.startswith(HYBRID)}
    if hybrids & {conversion.configuration(recipe.text.softmax_every) for conversion in shown}:
        return []
    return sorted(label_of(name.removeprefix(HYBRID)) for name in hybrids)


def _signed(found: Interval) -> str:
    return f"{found.value:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"


def _share(found: Interval) -> str:
    return f"{found.value:.1%} [{found.low:.1%}, {found.high:.1%}]"
