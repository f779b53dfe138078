"""The lab's page: for every claim the paper's figure, ours, the difference in recipe and the verdict."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.markdown import picture, table
from deltazoo.spec import list_rules
from experiments.claims import Check, Claim, Scores, Verdict, verdict_of
from experiments.configurations import label_of
from experiments.experiment import Experiment, Run
from experiments.lab_plots import (
    draw_comparison,
    draw_complexity,
    draw_curves,
    draw_experiment,
    draw_numerics,
)
from experiments.lab_records import Environment, Record, by_configuration, by_name, median_score
from experiments.numerics import judge_numerics
from experiments.suite_selection import Selection

__all__ = ["listing", "verdict_table", "write_page"]

Measured = Mapping[str, Any]

_SHOWN: dict[Verdict, str] = {
    "pass": "**pass**",
    "warn": "**warn**",
    "fail": "**FAIL**",
    "printed": "figures only",
    "not run": "not run",
}
_COLOURS: dict[Verdict, str] = {"pass": "green", "warn": "yellow", "fail": "bold red", "printed": "", "not run": "dim"}

_INTRODUCTION = """\
Claims of the papers behind this project are tried here on small models of every rule side by side. `deltazoo lab`
runs the suite mini (two CPU cores, about three minutes). `deltazoo lab --suite full --device cuda --workers 12` runs
the suite full on one large GPU or several, and `--suite family` every rule on the same tasks; workers that share a GPU
are fastest under CUDA's multi-process service. `--suite causes` asks on one CPU core why claims of the others are not
met. Two further suites have pages of their own: `--suite text` trains every rule on real text ([text.md](text.md)), and
`--suite text-conversions` converts its softmax model to delta-rule layers ([text_conversions.md](text_conversions.md)).

`scripts/render_lab.py` writes this page from the result files under `benchmarks/results`.

- The column *paper* shows what a paper reports. Each claim says how our recipe differs from the paper's.
- Models of a comparison have the same number of parameters within 2% and see the same data.
- A gate compares configurations of one run, on the best seed as the papers do; the median stands beside it.
- A gate that is not met counts as `warn` or as `FAIL`, whichever was set for it. The verdict on a claim is that of its
  worst gate: `pass`, `warn` or `FAIL`. A claim without a gate has figures only.
- A task is too easy if the configuration that should struggle does well. It then counts as failed, as it shows nothing.
"""


def verdict_table(selection: Selection, records: Sequence[Record], measured: Measured) -> Table:
    """The verdicts for a terminal."""
    table = Table(title="claims")
    for column in ("claim", "verdict", "found"):
        table.add_column(column, overflow="fold")
    for name, checks in _all_checks(selection.claims, records, measured):
        verdict = verdict_of(checks)
        text = "\n".join(f"{check.verdict}: {check.text}" for check in checks)
        table.add_row(name, f"[{_COLOURS[verdict]}]{verdict}[/]" if _COLOURS[verdict] else verdict, text)
    return table


def listing(selection: Selection) -> Table:
    """What a selection would run."""
    table = Table(title="experiments")
    for column in ("experiment", "task", "configurations", "runs", "steps"):
        table.add_column(column, overflow="fold")
    for experiment in selection.experiments:
        table.add_row(
            experiment.name,
            experiment.task.title,
            _in_short(experiment.configurations),
            str(len(experiment.runs())),
            f"{experiment.recipe.steps:,}",
        )
    return table


def _in_short(configurations: Sequence[str]) -> str:
    """Their names, with "every rule" for all registered ones."""
    rules = set(list_rules())
    if not rules <= set(configurations):
        return ", ".join(configurations)
    return ", ".join(["every rule", *(name for name in configurations if name not in rules)])


def write_page(
    path: Path,
    suites: Mapping[str, tuple[Selection, Sequence[Record], Measured]],
    *,
    images: Path | None = None,
) -> Path:
    """Write the page, and the pictures it shows into `images` (a folder `images` beside it unless given).

    Args:
        path: the Markdown file.
        suites: suite name -> what was selected, its results, its measurements.
        images: folder of the pictures.
    """
    images = images or path.parent / "images"
    suites = {
        suite: (chosen, _in_order_of_experiments(chosen, found), rest)
        for suite, (chosen, found, rest) in suites.items()
    }
    made = [suite for suite, (_, records, _) in suites.items() if records]
    links = [f"[suite {suite}, claim by claim](#suite-{suite}-claim-by-claim)" for suite in made]
    contents = f"Contents: {', '.join(['[at a glance](#at-a-glance)', *links, '[runs](#runs)'])}.\n"
    parts = ["# The lab\n", _answer(suites), _INTRODUCTION, contents, "## At a glance\n"]
    for suite, (selection, records, measured) in suites.items():
        if records:
            parts.append(_summary(suite, selection, records, measured))
    for suite, (selection, records, measured) in suites.items():
        if records:
            parts.append(_suite(suite, selection, records, measured, images, path))
    parts.append(_runs(suites))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(parts).rstrip() + "\n", encoding="utf-8")
    return path


def _answer(suites: Mapping[str, tuple[Selection, Sequence[Record], Measured]]) -> str:
    """How many claims of each suite have which verdict."""
    sentences = []
    for suite, (selection, records, measured) in suites.items():
        if records:
            verdicts = [verdict_of(checks) for _, checks in _all_checks(selection.claims, records, measured)]
            counts = [f"{verdicts.count(v)} {_SHOWN[v].strip('*')}" for v in _SHOWN if v in verdicts]
            sentences.append(f"Suite {suite}, {len(verdicts)} claims: {', '.join(counts)}.")
    return " ".join(sentences) + "\n"


def _runs(suites: Mapping[str, tuple[Selection, Sequence[Record], Measured]]) -> str:
    """Machine, versions and commit of all results."""
    rows = [
        [suite, environment.device, environment.torch, environment.triton or "", f"`{environment.commit[:12]}`", str(n)]
        for suite, (_, records, _) in suites.items()
        for environment, n in Counter(record.environment for record in records).items()
    ]
    return "## Runs\n\n" + table(["suite", "machine", "torch", "Triton", "commit", "runs"], rows)


def _in_order_of_experiments(selection: Selection, records: Sequence[Record]) -> list[Record]:
    """In the order in which experiments name their configurations, not the one in which workers finished them."""
    configurations = {e.name: e.configurations for e in selection.experiments}
    return sorted(
        records, key=lambda r: (configurations.get(r.experiment, ()) + (r.configuration,)).index(r.configuration)
    )


def _all_checks(
    claims: Iterable[Claim], records: Sequence[Record], measured: Measured
) -> list[tuple[str, list[Check]]]:
    scores = Scores(records)
    found = [(claim.name, claim.checks(scores)) for claim in claims]
    if "numerics" in measured:
        found.append(("numerics", judge_numerics(measured["numerics"])))
    return found


def _summary(suite: str, selection: Selection, records: Sequence[Record], measured: Measured) -> str:
    by_environment: dict[Environment, list[Record]] = {}
    for record in records:
        by_environment.setdefault(record.environment, []).append(record)
    lines = [
        f"### Suite {suite}\n",
        *(_machine_and_time(environment, made) for environment, made in by_environment.items()),
        *_unfinished(selection, records),
    ]
    rows = []
    by_name = {claim.name: claim for claim in selection.claims}
    for name, checks in _all_checks(selection.claims, records, measured):
        claim = by_name.get(name)
        statement = (
            claim.statement if claim else "Every form of the operators gives the same numbers; beta near 2 is safe."
        )
        paper = claim.paper if claim else "(no paper: our own gates)"
        rows.append([f"[{statement}](#{suite}-{name.replace('_', '-')})", paper, _SHOWN[verdict_of(checks)]])
    return "\n".join([*lines, table(["claim", "paper", "verdict"], rows)])


def _machine_and_time(environment: Environment, records: Sequence[Record]) -> str:
    """Where a suite's runs were made and how long they took."""
    return (
        f"{len(records)} runs, {sum(r.cpu_seconds for r in records) / 60:.1f} minutes of processor time "
        f"({sum(r.seconds for r in records) / 60:.1f} minutes of run time summed over workers"
        f"{_wall_clock(records)}) on {environment.device}.\n"
    )


def _unfinished(selection: Selection, records: Sequence[Record]) -> list[str]:
    """A paragraph that names the experiments that lack runs; none if all were run."""
    missing = _missing(selection, records)
    if not missing:
        return []
    whole = {experiment.name: len(experiment.runs()) for experiment in selection.experiments}
    named = [
        f"{name} ({whole[name]})" if len(runs) == whole[name] else f"{name} ({len(runs)} of {whole[name]})"
        for name, runs in missing.items()
    ]
    return [f"Cut short. Missing runs by experiment: {', '.join(named)}.\n"]


def _missing(selection: Selection, records: Sequence[Record]) -> dict[str, list[Run]]:
    """The runs without a result, by experiment; experiments that are whole are left out."""
    done = {record.key for record in records}
    due = {e.name: [run for run in e.runs() if run.key not in done] for e in selection.experiments}
    return {name: runs for name, runs in due.items() if runs}


def _wall_clock(records: Sequence[Record]) -> str:
    """How long at least one run was going, over all the calls that made the results, and on how many GPUs."""
    spans = sorted((r.started, r.started + r.seconds) for r in records if r.started is not None)
    if len(spans) < len(records):
        return ""
    seconds, end = 0.0, 0.0
    for start, stop in spans:
        seconds += max(0.0, stop - max(start, end))
        end = max(end, stop)
    gpus = len({record.device for record in records if record.device.startswith("cuda")})
    return f", {seconds / 60:.1f} of wall clock" + (f" on {gpus} GPU{'s' * (gpus > 1)}" if gpus else "")


def _suite(
    suite: str, selection: Selection, records: Sequence[Record], measured: Measured, images: Path, page: Path
) -> str:
    parts = [f"## Suite {suite}, claim by claim\n"]
    scores, shown = Scores(records), set[str]()
    for claim in selection.claims:
        parts.append(_claim(suite, claim, scores, images, page, shown))
    for experiment in selection.experiments:
        if experiment.name not in shown and any(record.experiment == experiment.name for record in records):
            parts += [f"### {suite}: {experiment.name}\n", _experiment(suite, experiment, scores, images, page)]
    if "numerics" in measured:
        drawn = draw_numerics(images / f"lab_{suite}_numerics.png", measured["numerics"])
        parts += [
            f"### {suite}: numerics\n",
            picture(drawn, page, "numerics"),
            *(_check(check) for check in judge_numerics(measured["numerics"])),
            "",
        ]
    if "complexity" in measured:
        drawn = draw_complexity(images / f"lab_{suite}_complexity.png", measured["complexity"])
        device = measured["complexity"]["environment"]["device"]
        parts += [f"### {suite}: complexity\n", f"{device}.\n", picture(drawn, page, "complexity"), _scan(measured)]
    return "\n".join(parts)


def _claim(suite: str, claim: Claim, scores: Scores, images: Path, page: Path, shown: set[str]) -> str:
    checks = claim.checks(scores)
    parts = [
        f"### {suite}: {claim.name.replace('_', ' ')}\n",
        f"{claim.statement} {_SHOWN[verdict_of(checks)]}.\n",
        f"- Paper: {claim.paper}.",
        f"- Difference in recipe: {claim.differences}.",
        *([f"- Tried: {claim.tried}."] if claim.tried else []),
        "",
        *(_check(check) for check in checks),
        "",
    ]
    if claim.picture == "curve":
        drawn = draw_curves(images / f"lab_{suite}_{claim.name}.png", claim.experiments, scores.records)
        if drawn:
            parts.append(picture(drawn, page, claim.name))
    if claim.picture == "table":
        drawn = draw_comparison(images / f"lab_{suite}_{claim.name}.png", claim.experiments, scores.records)
        if drawn:
            parts += [picture(drawn, page, claim.name), _comparison(claim.experiments, scores.records)]
    for experiment in claim.experiments:
        if experiment.name in shown:
            parts.append(f"Table and picture of {experiment.name}: above.\n")
        elif any(record.experiment == experiment.name for record in scores.records):
            parts.append(_experiment(suite, experiment, scores, images, page))
            shown.add(experiment.name)
    return "\n".join(parts)


def _comparison(experiments: Sequence[Experiment], records: Sequence[Record]) -> str:
    """Every configuration on every experiment, at the experiments' headlines, medians over seeds."""
    header = ["configuration", *(f"{e.name}, {e.shown:,} {e.task.length_is}" for e in experiments)]
    rows = []
    for name, members in by_name(experiments, records).items():
        values = [median_score(members, experiment, experiment.shown) for experiment in experiments]
        rows.append([label_of(name), *("" if value is None else f"{value:.3f}" for value in values)])
    in_bits = [experiment.name for experiment in experiments if experiment.task.metric == "bits"]
    note = f"Accuracy; {', '.join(in_bits)}: bits per byte. " if in_bits else "Accuracy. "
    return f"{note}Medians of the seeds.\n\n" + table(header, rows, text_columns=1)


def _check(check: Check) -> str:
    return f"- {_SHOWN[check.verdict] + ': ' if check.verdict != 'printed' else ''}{check.text}"


def _experiment(suite: str, experiment: Experiment, scores: Scores, images: Path, page: Path) -> str:
    drawn = draw_experiment(images / f"lab_{suite}_{experiment.name}.png", experiment, scores.records)
    found = [record for record in scores.records if record.experiment == experiment.name]
    conditions = [str(condition) for condition in experiment.recipe.test]
    lines = [_in_words(experiment), picture(drawn, page, experiment.name) if drawn else ""]
    groups = by_configuration(found)
    rows = []
    for (name, rate), members in groups.items():
        cells = [label_of(name), f"{rate:g}", str(len(members)), f"{members[0].parameters:,}"]
        for condition in conditions:
            values = [getattr(record.scores[condition], experiment.task.metric) for record in members]
            best = min(values) if experiment.task.metric == "bits" else max(values)
            cells.append(f"{best:.3f}" if len(values) == 1 else f"{best:.3f} ({median(values):.3f})")
        rows.append(cells)
    lines.append(table(["configuration", "lr", "seeds", "parameters", *conditions], rows))
    several = any(len(members) > 1 for members in groups.values())
    return "\n".join(lines) + ("\nBest of the seeds, median in brackets.\n" if several else "")


def _in_words(experiment: Experiment) -> str:
    """Task, model and training of an experiment."""
    task, recipe = experiment.task, experiment.recipe
    low, high = recipe.train_lengths
    layers = f"{recipe.num_layers} layer{'s' * (recipe.num_layers > 1)}, width {recipe.hidden_size}"
    if task.metric == "bits":
        made = f"{recipe.precision}, {recipe.steps:,} steps of {recipe.batch_size} x {high:,} {task.length_is}"
        wanted = "bits per byte"
    else:
        lengths = f"{low}" if low == high else f"{low} to {high}"
        made = (
            f"{recipe.num_heads} head{'s' * (recipe.num_heads > 1)} of {recipe.head_dim}, "
            f"{'short convolutions' if recipe.use_short_conv else 'no convolution'}, {recipe.precision}, "
            f"{recipe.steps:,} steps of {recipe.batch_size}, trained on {lengths} {task.length_is}"
        )
        wanted = f"chance {task.chance:.3f}"
    return f"Task: {task.title} (`{task.name}`); {task.source}. {layers}, {made}; {wanted}.\n"


def _scan(measured: Measured) -> str:
    """The parallel scan at head dimension 16, beside the chunk form."""
    rows = measured["complexity"]["scan"]
    by_length: dict[int, dict[str, float]] = {}
    for row in rows:
        by_length.setdefault(row["tokens"], {})[row["form"]] = row["seconds"]
    forms = ("parallel scan", "chunkwise")
    cells = [
        [f"{tokens:,}", *(f"{1e3 * times[form]:.2f}" if form in times else "-" for form in forms)]
        for tokens, times in sorted(by_length.items())
    ]
    return "The parallel scan over transition matrices, at the head dimension (16) where it costs least:\n\n" + table(
        ["tokens", *(f"{form}, ms" for form in forms)], cells
    )
