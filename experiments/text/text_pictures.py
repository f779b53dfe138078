"""Pictures of the suite: the leading models, softmax attention and the reference in colour, the others in grey."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deltazoo.training.figures import BLACK, GREEN, GREY, PALETTE, new_figure, save_figure
from experiments.configurations import SOFTMAX
from experiments.text.results import TextResult, TextResults
from experiments.text.scoring import FIRST_POSITIONS
from experiments.text.text_comparison import compare, interval
from experiments.text.text_configurations import HYBRID, configuration_label

__all__ = ["REFERENCE", "draw_all", "position_bits", "recall_by_distance"]

REFERENCE = "gated_deltanet"
_COLOURED = 5
_PALE = "#C4C4C4"
_OTHERS = "other rules"


def draw_all(folder: Path, results: TextResults, ranked: Sequence[str]) -> dict[str, Path]:
    """Write all pictures of at least one configuration, the best first; by their subject."""
    colours = _colours(ranked)
    first = {configuration: results.of_configuration(configuration)[0] for configuration in ranked}
    lengths = results.header["recipe"]["scored_lengths"]
    row_length = results.header["recipe"]["row_length"]
    warm = results.recipe.warmup * results.recipe.steps
    curves = {name: [point for point in result.curve if point[0] > warm] for name, result in first.items()}
    return {
        "bits": _draw_bits(folder / "text_bits.png", results, ranked, colours),
        "position": _draw_lines(
            folder / "text_position.png",
            [(f"rows of {length:,} tokens", _by_position(first, length)) for length in lengths[1:]],
            colours,
            x="position in the row (tokens)",
            y="bits per byte (lower is better)",
            mark=row_length,
        ),
        "recall": _draw_lines(
            folder / "text_recall.png",
            [(f"rows of {length:,} tokens", _by_distance(first, length)) for length in lengths[:2]],
            colours,
            x="tokens since the first occurrence",
            y="second occurrences completed",
            mark=row_length,
        ),
        "cost": _draw_costs(folder / "text_cost.png", results, ranked, colours),
        "curves": _draw_lines(
            folder / "text_curves.png",
            [("after the warm-up", curves)],
            colours,
            x="optimizer steps",
            y="training loss (nats per token)",
            log_x=False,
        ),
    }


def position_bits(result: TextResult, length: int) -> list[tuple[int, float]]:
    """(end of a group of positions, bits per byte in it) in rows of a length."""
    score = result.scores[str(length)]
    groups = zip(score["position_nats"], score["position_bytes"], strict=True)
    return [
        (min(FIRST_POSITIONS * 2**place, length), nats / math.log(2) / size)
        for place, (nats, size) in enumerate(groups)
        if size
    ]


def recall_by_distance(result: TextResult, length: int, fewest: int = 30) -> list[tuple[int, float]]:
    """(distance that a group does not reach, share completed) for groups of at least so many second occurrences."""
    groups = {key: counts for key, counts in result.scores[str(length)]["recall"].items() if key != "first"}
    return [(int(key), counts[1] / counts[0]) for key, counts in groups.items() if counts[0] >= fewest]


def _colours(ranked: Sequence[str]) -> dict[str, str]:
    fixed = {SOFTMAX: BLACK, REFERENCE: GREEN}
    spare = [colour for colour in PALETTE if colour not in fixed.values()]
    leading = [configuration for configuration in ranked if configuration not in fixed][:_COLOURED]
    return {configuration: fixed[configuration] for configuration in ranked if configuration in fixed} | dict(
        zip(leading, spare, strict=False)
    )


def _by_position(first: dict[str, TextResult], length: int) -> dict[str, list[tuple[int, float]]]:
    return {configuration: position_bits(result, length) for configuration, result in first.items()}


def _by_distance(first: dict[str, TextResult], length: int) -> dict[str, list[tuple[int, float]]]:
    return {configuration: recall_by_distance(result, length) for configuration, result in first.items()}


def _draw_bits(path: Path, results: TextResults, ranked: Sequence[str], colours: dict[str, str]) -> Path:
    """Bits per byte, and beside them the paired differences from the reference, whose intervals are the narrower."""
    panels = ["bits per byte of held-out files"]
    if REFERENCE in ranked:
        panels.append(f"minus {configuration_label(REFERENCE)}, file by file")
    figure, axes = new_figure(len(panels), width=2.6 + 4.4 * len(panels), height=1.2 + 0.25 * len(ranked))
    for place, configuration in enumerate(ranked):
        found = [interval(configuration, results)]
        if REFERENCE in ranked and configuration != REFERENCE:
            found.append(compare(configuration, REFERENCE, results).interval)
        for axis, shown in zip(axes, found, strict=False):
            colour = colours.get(configuration, GREY)
            axis.plot([shown.low, shown.high], [place, place], color=colour, lw=2, alpha=0.6)
            axis.plot(shown.value, place, _marker(configuration), color=colour)
    for axis, panel in zip(axes, panels, strict=True):
        axis.set_yticks(range(len(ranked)), [""] * len(ranked))
        axis.set_ylim(len(ranked) - 0.4, -0.6)
        axis.set_xlabel(panel)
    axes[0].set_yticks(range(len(ranked)), [configuration_label(configuration) for configuration in ranked], fontsize=8)
    axes[0].set_title("with 95% of bootstrap resamples; lower is better", loc="left", fontsize=10)
    if len(axes) > 1:
        axes[1].axvline(0.0, color=GREY, lw=1, ls=":")
    return save_figure(figure, path)


def _draw_lines(
    path: Path,
    panels: Sequence[tuple[str, dict[str, Any]]],
    colours: dict[str, str],
    *,
    x: str,
    y: str,
    mark: int | None = None,
    log_x: bool = True,
) -> Path:
    figure, axes = new_figure(len(panels), width=5.2 * len(panels) + 2.2, height=4.0)
    for axis, (title, lines) in zip(axes, panels, strict=True):
        for configuration in sorted(
            lines, key=lambda configuration: configuration in colours
        ):  # grey ones first, below the others
            if lines[configuration]:
                width, label = (1.8, configuration_label(configuration)) if configuration in colours else (0.8, None)
                dash = "--" if configuration.startswith(HYBRID) else "-"
                colour = colours.get(configuration, _PALE)
                axis.plot(*zip(*lines[configuration], strict=True), color=colour, ls=dash, lw=width, label=label)
        if log_x:
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:,.0f}")
        if mark is not None:
            axis.axvline(mark, color=GREY, lw=1, ls=":")
            axis.annotate("training length", (mark, 1.0), xycoords=("data", "axes fraction"), fontsize=7, ha="right")
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel(x)
    axes[0].set_ylabel(y)
    points = [point for _, lines in panels for line in lines.values() for point in line]
    low = min((value for _, value in points), default=0.0)
    # A configuration that fails beyond its training length would flatten all others: what is within it sets the top.
    high = max((value for place, value in points if mark is None or place <= mark), default=1.0)
    top = high + 0.05 * (high - low) + 1e-6
    for axis, (_, lines) in zip(axes, panels, strict=True):
        axis.set_ylim(low - 0.05 * (high - low), top)
        if mark is not None:
            leaving = (_leaving(configuration, points, top) for configuration, points in lines.items())
            axis.annotate(
                "\n".join(line for line in leaving if line),
                (mark, 0.98),
                xycoords=("data", "axes fraction"),
                xytext=(-4, 0),
                textcoords="offset points",
                fontsize=7,
                ha="right",
                va="top",
            )
    if any(lines[configuration] for _, lines in panels for configuration in lines.keys() - colours.keys()):
        axes[-1].plot([], [], color=_PALE, lw=0.8, label=_OTHERS)
    axes[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return save_figure(figure, path)


def _leaving(configuration: str, points: Sequence[tuple[int, float]], top: float) -> str | None:
    """Where a line leaves its panel at the top, and its highest value; None if it does not."""
    place, highest = max(points, key=lambda point: point[1], default=(0, top))
    if highest <= top:
        return None
    label = configuration_label(configuration)
    last = max((x for x, value in points if x < place and value <= top), default=None)
    where = "" if last is None else f"after {last:,} tokens "
    return f"{label} leaves the panel\n{where}and reaches {highest:.2f} at {place:,}"


def _draw_costs(path: Path, results: TextResults, ranked: Sequence[str], colours: dict[str, str]) -> Path:
    batch = results.recipe.decode_batches[-1]
    training = {name: result.tokens_per_second for name, result in results.costs.items()}
    subjects = (
        ("training, tokens per second", training),
        (f"decoding, {batch} rows, tokens per second", results.decoding_speeds(batch)),
    )
    figure, axes = new_figure(len(subjects), width=11.6, height=4.0)
    for axis, (title, speeds) in zip(axes, subjects, strict=True):
        for configuration in ranked:
            value, colour, fast = (
                interval(configuration, results).value,
                colours.get(configuration, GREY),
                speeds.get(configuration),
            )
            if fast is not None:
                axis.plot(
                    fast,
                    value,
                    _marker(configuration),
                    color=colour,
                    label=configuration_label(configuration) if configuration in colours else None,
                )
        axis.set_xlabel(title)
        axis.set_xlim(0, 1.05 * axis.get_xlim()[1])
        axis.locator_params(axis="x", nbins=6)
        axis.xaxis.set_major_formatter(lambda speed, _: f"{speed:,.0f}")
    axes[0].set_ylabel("bits per byte (lower is better)")
    if set(ranked) - colours.keys():
        axes[0].plot([], [], "o", color=GREY, label=_OTHERS)
    shown = axes[0].get_legend_handles_labels()  # the other panel may lack some, by errors
    axes[-1].legend(*shown, fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return save_figure(figure, path)


def _marker(configuration: str) -> str:
    return "^" if configuration == SOFTMAX else "D" if configuration.startswith(HYBRID) else "o"
