"""``deltazoo lab``: test the papers' claims on small models of every rule."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from deltazoo.cli.rule_files import LoadOption, load_rule_file

if TYPE_CHECKING:
    from experiments.text.text_corpus import TextCorpus

_EXAMPLE = (
    "Examples: [bold]deltazoo lab[/] (three minutes on two CPU cores), "
    "[bold]deltazoo lab --suite full --device cuda --workers 12[/] (on all GPUs), "
    "[bold]deltazoo lab --suite family --device cuda --workers 16[/] (every rule on the same tasks), "
    "[bold]deltazoo lab --only parity --rules kda+neg,softmax[/], [bold]deltazoo lab --load my_task.py[/], "
    "[bold]deltazoo lab --suite text --device cuda --out text.jsonl --limit 900[/] (every rule on real text), "
    "[bold]deltazoo lab --suite text-conversions --device cuda --out conversions.jsonl --limit 900[/] "
    "(its softmax model, converted)"
)
_OF_TEXT = ("text", "text-conversions")
_NOT_TEXT = "Not for text and text-conversions."
_NOT_OF_TEXT = ("rules", "workers", "load", "steps", "measure", "fresh")


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("lab", epilog=_EXAMPLE)(lab)


def lab(
    context: typer.Context,
    suite: Annotated[
        str, typer.Option(help="mini, full, family, causes, text or text-conversions; the last two take no --load.")
    ] = "mini",
    only: Annotated[
        str,
        typer.Option(
            help="Tasks, experiments or claims (text: configurations; text-conversions: RULE@LAYERS), comma separated; "
            "all unless given."
        ),
    ] = "",
    rules: Annotated[
        str,
        typer.Option(
            help="Configurations instead of each experiment's own: rule[+option...], comma separated, or softmax. "
            + _NOT_TEXT
        ),
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for results and page, runs/lab_SUITE unless given; text: the result file."),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            help="cpu; cuda, all GPUs, over which workers (text: trainings) are spread; or one of them: cuda:1."
        ),
    ] = "cpu",
    workers: Annotated[int, typer.Option(min=1, help=f"Processes; several share one GPU. {_NOT_TEXT}")] = 2,
    load: LoadOption = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help=f"Steps to train, instead of each recipe's. {_NOT_TEXT}")
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            "--time-limit",
            "--limit",
            min=1,
            help="Stop after this many seconds, cheap experiments first (text: the most important first); the same "
            "command continues.",
        ),
    ] = None,
    measure: Annotated[bool, typer.Option(help=f"Also measure numerics and complexity. {_NOT_TEXT}")] = True,
    fresh: Annotated[bool, typer.Option("--fresh", help=f"Discard earlier results in --out. {_NOT_TEXT}")] = False,
    commit: Annotated[str | None, typer.Option(help="Commit to record; read from git unless given.")] = None,
    show: Annotated[bool, typer.Option("--list", help="List what can be run, and stop.")] = False,
    corpus: Annotated[
        Path | None,
        typer.Option(
            help="text and text-conversions: the file that scripts/build_python_text.py wrote, if not in the cache."
        ),
    ] = None,
) -> None:
    """Train small models of every rule on tasks on which they differ, and write a page with plots."""
    from deltazoo.training.device import check_device

    check_device(device)
    if suite in _OF_TEXT:
        if given := [f"--{name}" for name in _NOT_OF_TEXT if _is_given(context, name)]:
            raise typer.BadParameter(f"the suite {suite!r} has no {', '.join(given)}")
        path = out or Path("runs") / f"lab_{suite.replace('-', '_')}" / "results.jsonl"
        if path.is_dir():
            raise typer.BadParameter(f"the suite {suite!r} writes one file, and {path} is a folder", param_hint="--out")
        return _run_on_text(suite, _names(only), path, device, time_limit, commit, corpus, show)
    if corpus is not None:
        raise typer.BadParameter("--corpus belongs to the suites 'text' and 'text-conversions'")

    from experiments.lab_page import listing, verdict_table, write_page
    from experiments.lab_records import Environment, ResultFile, read_records
    from experiments.measurements import MEASUREMENTS, run_measurements
    from experiments.runner import Plan, run_suite
    from experiments.suite_selection import select

    console = Console()
    load = load or []
    loaded = [rule for path in load for rule in load_rule_file(path)]
    selection = select(
        suite, only=_names(only), configurations=_names(rules), further_configurations=loaded, steps=steps
    )
    if show:
        console.print(listing(selection))
        return
    folder = out or Path("runs") / f"lab_{suite}"
    path = folder / "results.jsonl"
    if fresh:
        path.unlink(missing_ok=True)
        for name in MEASUREMENTS:
            (folder / f"{name}.json").unlink(missing_ok=True)
    results = ResultFile(path, suite, Environment.here(device, commit, load))
    plan = Plan(device=device, workers=workers, time_limit=time_limit, load=tuple(load))
    try:
        missing = run_suite(selection.experiments, selection.claims, results, plan, _report)
    finally:
        console.print(f"results in {path}")
    if missing:
        console.print(f"[bold]{missing} runs are missing: give the same command again to go on[/]")
        return
    measured = run_measurements(folder, suite, results.environment, device, _report) if measure else {}
    records = read_records(path)
    page = write_page(folder / "lab.md", {suite: (selection, records, measured)})
    console.print(verdict_table(selection, records, measured))
    console.print(f"page and pictures: {page}")


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether an option was named; newer versions of typer bring a click of their own, with its own constants."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _run_on_text(
    suite: str,
    only: list[str],
    path: Path,
    device: str,
    limit: float | None,
    commit: str | None,
    corpus_path: Path | None,
    show: bool,
) -> None:
    """Train the configurations on real text that the result file lacks, or convert the softmax model as it lacks it."""
    began = time.monotonic()
    from experiments.lab_records import Environment
    from experiments.text.text_corpus import TextCorpus, default_corpus_path

    listed_alone = show and corpus_path is None  # names of jobs need no text
    corpus = None if listed_alone else TextCorpus.load(corpus_path or default_corpus_path())
    run, missing_names = (_trainings if suite == "text" else _conversions)(path, corpus, only, device)
    if show:
        _report("\n".join(missing_names()))
        return
    missing = run(
        corpus=corpus,
        environment=Environment.here(device, commit),
        limit=None if limit is None else limit - (time.monotonic() - began),
        only=only,
        report=_report,
    )
    _report(f"results in {path}; {len(missing)} jobs are missing" + (": the same command goes on" * bool(missing)))


_Run = tuple[Callable[..., Sequence[object]], Callable[[], list[str]]]
"""What runs the jobs that a result file lacks and returns those that are left, and what names them beforehand."""


def _trainings(path: Path, corpus: "TextCorpus | None", only: list[str], device: str) -> _Run:
    from experiments.text.suite import devices_of, missing_jobs, open_results, run_text_suite
    from experiments.text.text_recipe import TextRecipe

    results = open_results(path, TextRecipe(), corpus)
    run = partial(run_text_suite, results, devices=devices_of(device))
    return run, lambda: [job.name for job in missing_jobs(results, only)]


def _conversions(path: Path, corpus: "TextCorpus | None", only: list[str], device: str) -> _Run:
    from experiments.text_conversions.conversion_recipe import ConversionRecipe
    from experiments.text_conversions.conversion_suite import (
        missing_conversion_jobs,
        open_conversions,
        run_conversions,
    )
    from experiments.text_conversions.teacher import default_teacher_path

    recipe = ConversionRecipe()
    results = open_conversions(path, recipe, corpus)
    run = partial(run_conversions, results, recipe, device=device, teacher_path=default_teacher_path())
    return run, lambda: [job.name for job in missing_conversion_jobs(results, recipe, only)]


def _report(line: str) -> None:
    Console().print(line, soft_wrap=True, markup=False, highlight=False)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
