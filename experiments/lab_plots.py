"""Plots of the lab: colour shows the rule, marker and dash its options; chance and training lengths are drawn."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from deltazoo.training.figures import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, SKY, YELLOW, new_figure, save_figure
from experiments.configurations import label_of, parse_configuration
from experiments.experiment import Experiment
from experiments.lab_records import Record, by_configuration, by_name, median_score
from experiments.repeated_keys import BOUNDS

__all__ = ["draw_comparison", "draw_complexity", "draw_curves", "draw_experiment", "draw_numerics"]

_COLOURS = {
    "delta_net": BLUE,
    "neg_delta_net": BLUE,
    "gated_deltanet": GREEN,
    "neg_gated_deltanet": GREEN,
    "kda": ORANGE,
    "efla": PINK,
    "longhorn": SKY,
    "mamba2_style": YELLOW,
    "linear_attention": GREY,
    "softmax": BLACK,
}
_SPARE = ("#882255", "#999933", "#44AA99")
_MOST_LINES = 14
_DASHES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
_FORM_STYLES = {
    "token loop": (GREY, "s"),
    "parallel scan": (ORANGE, "X"),
    "chunkwise": (BLUE, "o"),
    "triton": (GREEN, "D"),
    "softmax": (BLACK, "^"),
}


def draw_experiment(path: Path, experiment: Experiment, records: Iterable[Record]) -> Path | None:
    """Score against test length or condition: the median of seeds as a line, every seed as a faint mark.

    More configurations than lines can be told apart become a table of medians, coloured.

    Returns:
        The file, or None if there are no results.
    """
    found = [record for record in records if record.experiment == experiment.name]
    if not found:
        return None
    conditions = [str(condition) for condition in experiment.recipe.test]
    if len(by_configuration(found)) > _MOST_LINES:
        columns = [
            _Column(f"{condition}\n{experiment.task.length_is}", experiment, condition) for condition in conditions
        ]
        rows = {_label(group, found): members for group, members in by_configuration(found).items()}
        return _draw_cells(path, columns, rows, f"{experiment.task.title} ({experiment.name})")
    lengths = all(isinstance(condition, int) for condition in experiment.recipe.test)
    figure, axes = new_figure(1, width=9.6, height=4.2)
    axis = axes[0]
    groups = by_configuration(found)
    if lengths and len(conditions) > 1:
        _lines(axis, groups, conditions, [float(condition) for condition in conditions], experiment)
        _length_axis(axis, experiment)
    elif len(conditions) > 1:
        _lines(axis, groups, conditions, [float(position) for position in range(len(conditions))], experiment)
        axis.set_xticks(range(len(conditions)), [condition.replace(" ", "\n") for condition in conditions])
    else:
        _dots(axis, groups, conditions[0], experiment)
    single = len(conditions) == 1
    _score_axis(axis, experiment, horizontal=single)
    axis.set_title(f"{experiment.task.title} ({experiment.name})", loc="left", pad=18)
    if not single:
        axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return save_figure(figure, path)


def draw_comparison(path: Path, experiments: Sequence[Experiment], records: Iterable[Record]) -> Path | None:
    """Every configuration on every experiment, at the experiments' headlines: a table of medians, coloured.

    Returns:
        The file, or None if there are no results.
    """
    rows = {label_of(name): members for name, members in by_name(experiments, records).items()}
    columns = [_Column(f"{e.name}\n{e.shown:,} {e.task.length_is}", e, str(e.shown)) for e in experiments]
    return _draw_cells(path, columns, rows, "every rule on every task") if rows else None


class _Column(NamedTuple):
    """Of a coloured table: an experiment under one condition."""

    title: str
    experiment: Experiment
    condition: str


def _draw_cells(path: Path, columns: Sequence[_Column], rows: Mapping[str, Sequence[Record]], title: str) -> Path:
    """A table of medians over seeds, one row per label, brighter where better.

    Accuracy is coloured from chance to 1, bits from the most in the column to the fewest.
    """
    cells = [[median_score(members, c.experiment, c.condition) for c in columns] for members in rows.values()]
    shades = list(zip(*(_shades(column, [row[j] for row in cells]) for j, column in enumerate(columns)), strict=True))
    figure, (axis,) = new_figure(1, width=3.4 + 1.05 * len(columns), height=1.5 + 0.27 * len(rows))
    axis.imshow(shades, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    for i, row in enumerate(cells):
        for j, value in enumerate(row):
            if value is not None:
                colour = BLACK if shades[i][j] > 0.55 else "white"
                axis.text(j, i, f"{value:.3f}", ha="center", va="center", fontsize=8, color=colour)
    axis.set_xticks(range(len(columns)), [column.title for column in columns], fontsize=8)
    axis.xaxis.tick_top()
    axis.set_yticks(range(len(rows)), list(rows), fontsize=8)
    axis.grid(False)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    figure.suptitle(title, x=0.01, ha="left")
    return save_figure(figure, path)


def _shades(column: _Column, values: Sequence[float | None]) -> list[float]:
    """From 0 (worst) to 1; not a number where there is no value."""
    known = [value for value in values if value is not None]
    task = column.experiment.task
    low, high = (max(known, default=0.0), min(known, default=0.0)) if task.metric == "bits" else (task.chance, 1.0)
    span = high - low or 1.0
    return [math.nan if value is None else min(max((value - low) / span, 0.0), 1.0) for value in values]


def draw_curves(path: Path, experiments: Sequence[Experiment], records: Iterable[Record]) -> Path | None:
    """Training accuracy against step, one panel per experiment."""
    records = list(records)
    panels = [(e, [r for r in records if r.experiment == e.name]) for e in experiments]
    panels = [(experiment, found) for experiment, found in panels if found]
    if not panels:
        return None
    figure, axes = new_figure(len(panels), width=4.4 * len(panels) + 2.4, height=4.0)
    for axis, (experiment, found) in zip(axes, panels, strict=True):
        for group, members in by_configuration(found).items():
            style = _style(group, list(by_configuration(found)))
            style.pop("marker")
            for record in members:
                axis.plot(*list(zip(*record.curve, strict=True))[::2], **style, label=_label(group, found))
        axis.set(xlabel="training step", title=f"{experiment.task.title}")
        _score_axis(axis, experiment, horizontal=False)
        axis.set_ylabel("training accuracy")
    handles, labels = axes[-1].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), loc="outside right center", fontsize=8, frameon=False)
    return save_figure(figure, path)


def draw_numerics(path: Path, measured: dict[str, Any]) -> Path:
    """State norm at beta 2 with and without the guard; error on repeated keys; bfloat16 errors."""
    figure, axes = new_figure(3, width=14.5, height=4.2)
    norms = measured["state_norm"]
    for name, label, colour, marker in (
        ("unguarded", "longest of 4,096 keys, no guard", ORANGE, "X"),
        ("random keys", "random keys, no guard", GREY, "s"),
        ("guarded", "longest of 4,096 keys, guarded", BLUE, "o"),
    ):
        axes[0].plot(norms["tokens"], norms[name], color=colour, marker=marker, markevery=8, label=label)
    axes[0].set(
        yscale="log", xlabel="tokens", ylabel="norm of the state over its start", title="beta = 2, bfloat16 keys"
    )
    _draw_repeated_keys(axes[1], measured["repeated_keys"])
    for rule, colour in (("delta", BLUE), ("scalar decay", GREEN), ("channel decay", ORANGE)):
        rows = [row for row in measured["bf16"] if row["rule"] == rule]
        for form, dash, marker in (("loop", ":", "s"), ("chunk", "-", "o")):
            name = "token loop" if form == "loop" else measured["backend"]
            axes[2].plot(
                [row["tokens"] for row in rows],
                [row[form] for row in rows],
                color=colour,
                linestyle=dash,
                marker=marker,
                fillstyle="none" if form == "loop" else "full",
                label=f"{rule}, {name}",
            )
    axes[2].set(xlabel="tokens", ylabel="relative error against float64", title="bfloat16 inputs and outputs")
    axes[2].set_xscale("log", base=2)
    axes[2].set_ylim(bottom=0, top=1.15 * max(max(row["loop"], row["chunk"]) for row in measured["bf16"]))
    for axis in axes:
        axis.legend(fontsize=8, frameon=False)
    return save_figure(figure, path)


def _draw_repeated_keys(axis: Any, measured: dict[str, Any]) -> None:
    """Error against beta, bfloat16, worse of the two patterns; a cross at the upper edge where it is not finite."""
    rows = [row for row in measured["rows"] if row["dtype"] == "bfloat16"]
    looks = {"token loop": (GREY, "s"), "fla": (ORANGE, "X"), "triton fast": (YELLOW, "^")}
    for who in dict.fromkeys(row["who"] for row in rows):
        colour, marker = looks.get(who, (BLUE, "o"))
        worst: dict[float, float] = {}
        for row in (row for row in rows if row["who"] == who):
            worst[row["beta"]] = max(worst.get(row["beta"], 0.0), math.inf if row["error"] is None else row["error"])
        finite = {beta: error for beta, error in worst.items() if math.isfinite(error)}
        axis.plot(finite.keys(), finite.values(), color=colour, marker=marker, label=who)
        lost = [beta for beta in worst if beta not in finite]
        edge = axis.get_xaxis_transform()
        axis.plot(
            lost, [0.98] * len(lost), "x", color=colour, transform=edge, label=f"{who}, not finite" if lost else None
        )
    axis.set(
        yscale="log",
        xlabel="beta",
        ylabel="relative error against float64",
        title=f"one key, or two in turn, {measured['tokens']:,} times, bfloat16",
    )
    bound = BOUNDS["bfloat16"]
    axis.axhline(bound, color="black", linestyle=":", linewidth=1, label="wanted at most")
    low, high = axis.get_ylim()
    axis.set_ylim(min(low, bound / 100), max(high, bound * 2))


def draw_complexity(path: Path, measured: dict[str, Any]) -> Path:
    """Time and memory against length, with the operation counts beside; time against chunk size and head dimension."""
    has_memory = any(row["bytes"] for row in measured["length"])
    panels = 5 if has_memory else 4
    figure, axes = new_figure(panels, width=4.6 * panels, height=4.2)
    time, operations, *memory, chunk, head_dim = axes
    by_length, tokens = measured["length"], ("tokens", "tokens (4 heads of 64)")
    _draw_forms(time, by_length, *tokens, "seconds", "seconds", "time, forward")
    _draw_forms(operations, by_length, *tokens, "flops", "operations", "operations, forward")
    for axis in memory:
        _draw_forms(axis, by_length, *tokens, "bytes", "peak memory, bytes", "memory, forward")
    _draw_chunk_sizes(chunk, measured["chunk"])
    dims = ("dim", "head dimension (2,048 tokens)")
    _draw_forms(head_dim, measured["head_dim"], *dims, "seconds", "seconds", "time, forward")
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.legend(fontsize=8, frameon=False)
    return save_figure(figure, path)


def _draw_forms(
    axis: Any, rows: Sequence[dict[str, Any]], key: str, xlabel: str, value: str, ylabel: str, title: str
) -> None:
    """A line per form: `value` against `key`."""
    for form in dict.fromkeys(row["form"] for row in rows):
        colour, marker = _FORM_STYLES[form]
        own = [row for row in rows if row["form"] == form]
        axis.plot([r[key] for r in own], [r[value] for r in own], color=colour, marker=marker, label=form)
    axis.set(xlabel=xlabel, ylabel=ylabel, title=title)


def _draw_chunk_sizes(axis: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Time against chunk size, measured and as the operations would have it."""
    sizes, best = [r["chunk"] for r in rows], min(r["seconds"] / r["flops"] for r in rows)
    axis.plot(sizes, [1e3 * r["seconds"] for r in rows], color=BLUE, marker="o", label="measured")
    expected = [1e3 * best * r["flops"] for r in rows]
    axis.plot(sizes, expected, color=GREY, linestyle=":", label="operations at the best rate seen")
    axis.set(xlabel="chunk size", ylabel="milliseconds", title="chunkwise torch, 4,096 tokens")


_Group = tuple[str, float]


def _label(group: _Group, records: Sequence[Record]) -> str:
    several = len({record.learning_rate for record in records}) > 1
    return f"{label_of(group[0])}, lr {group[1]:g}" if several else label_of(group[0])


def _style(group: _Group, groups: Sequence[_Group]) -> dict[str, Any]:
    rule = group[0].split("+")[0]
    unlisted = sorted({g[0].split("+")[0] for g in groups} - _COLOURS.keys())
    colour = _COLOURS.get(rule) or _SPARE[unlisted.index(rule) % len(_SPARE)]
    siblings = [
        g for g in groups if (_COLOURS.get(g[0].split("+")[0]) or g[0].split("+")[0]) == (_COLOURS.get(rule) or rule)
    ]
    configuration = parse_configuration(group[0])
    negative = configuration.spec is not None and (
        configuration.options.get("allow_neg_eigval") or configuration.spec.allow_neg_eigval
    )
    position = siblings.index(group)
    return {
        "color": colour,
        "marker": _MARKERS[list(groups).index(group) % len(_MARKERS)],
        "linestyle": _DASHES[position % len(_DASHES)],
        "markerfacecolor": colour if negative or len(siblings) == 1 else "white",
    }


def _lines(
    axis: Any, groups: dict[_Group, list[Record]], conditions: list[str], positions: list[float], e: Experiment
) -> None:
    records = [record for members in groups.values() for record in members]
    for group, members in groups.items():
        style = _style(group, list(groups))
        if not all(isinstance(condition, int) for condition in e.recipe.test):
            style["linestyle"] = ""  # conditions of different kinds have nothing between them
        values = [[_value(record, condition, e) for record in members] for condition in conditions]
        axis.plot(positions, [median(v) for v in values], **style, label=_label(group, records))
        if len(members) > 1:
            for position, several in zip(positions, values, strict=True):
                axis.plot([position] * len(several), several, color=style["color"], marker="_", linestyle="", alpha=0.5)


def _dots(axis: Any, groups: dict[_Group, list[Record]], condition: str, e: Experiment) -> None:
    records = [record for members in groups.values() for record in members]
    names = [_label(group, records) for group in groups]
    for position, (group, members) in enumerate(groups.items()):
        values = [_value(record, condition, e) for record in members]
        colour = _style(group, list(groups))["color"]
        axis.barh(position, median(values), color=colour, alpha=0.85, height=0.6)
        axis.plot(values, [position] * len(values), color="black", marker="|", linestyle="")
        axis.annotate(f" {median(values):.2f}", (max(values), position), va="center", fontsize=9)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlabel(f"accuracy at {condition} {e.task.length_is}")


def _value(record: Record, condition: str, experiment: Experiment) -> float:
    return getattr(record.scores[condition], experiment.task.metric)


def _length_axis(axis: Any, experiment: Experiment) -> None:
    low, high = experiment.recipe.train_lengths
    ticks = [condition for condition in experiment.recipe.test if isinstance(condition, int)]
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.minorticks_off()
    left = min(ticks) / 1.25
    axis.set_xlim(left, max(ticks) * 1.15)
    if high > left:
        start = max(left, low)
        if low == high:
            axis.axvline(high, color=BLACK, alpha=0.12, lw=6)
        else:
            axis.axvspan(start, high, color=BLACK, alpha=0.06, lw=0)
        axis.annotate(
            "training length" if low == high else "training lengths",
            (start * 1.02, 1.01),
            xycoords=("data", "axes fraction"),
            fontsize=8,
            color="#555555",
            ha="center" if low == high else "left",
        )
    axis.set_xlabel(f"test length ({experiment.task.length_is})")


def _score_axis(axis: Any, experiment: Experiment, *, horizontal: bool) -> None:
    if experiment.task.metric == "bits":
        axis.set_ylabel("bits per byte (lower is better)")
        return
    chance = experiment.task.chance
    line = axis.axvline if horizontal else axis.axhline
    line(chance, color="#555555", linestyle=(0, (1, 1)), lw=1)
    if horizontal:
        axis.set_xlim(0, 1.08)
        axis.annotate(
            "chance", (chance, 1.01), xycoords=("data", "axes fraction"), fontsize=8, color="#555555", ha="center"
        )
    else:
        axis.set_ylim(0, 1.04)
        axis.set_ylabel("accuracy")
        axis.annotate(
            "chance",
            (0.995, chance + 0.012),
            xycoords=("axes fraction", "data"),
            fontsize=8,
            color="#555555",
            ha="right",
        )
