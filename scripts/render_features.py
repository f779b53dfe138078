"""Makes docs/features.md from test results: what works for which model type, on which version of transformers.

    python scripts/render_features.py               # the page from the committed results
    python scripts/render_features.py --run         # runs tests/models on every model type first (half an hour)

`--run` adds the results of the transformers version it runs with to benchmarks/results/features.json; run it once per
supported version, in an environment of its own. Which feature a test is about stands in its `feature` marker, and which
models it built is recorded while it runs (tests/models/conftest.py), so nothing here lists tests.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "features.json"
PAGE = ROOT / "docs" / "features.md"
PACKAGES = ("torch", "transformers", "accelerate", "peft", "huggingface_hub", "tokenizers")

# Key of counts that belong to no model: errors, registration, what is shared.
NO_MODEL = "any"


class Count(NamedTuple):
    """Tests of one feature on one model."""

    passed: int
    run: int


Counts = dict[str, dict[str, Count]]
"""By feature, then by model as `type, pure` or `type, hybrid`."""


def run_tests() -> Path:
    """Runs tests/models in the environment of this interpreter; returns the XML report."""
    report = Path(tempfile.mkdtemp()) / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-o", "junit_family=xunit1", "-p", "no:cacheprovider"]
    command += [f"--junit-xml={report}", str(ROOT / "tests" / "models")]
    environment = {**os.environ, "DELTAZOO_EVERY_MODEL": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=False)  # failures are what the page is to show
    if not report.exists():
        raise SystemExit("pytest wrote no report")
    return report


def count(report: Path) -> Counts:
    """Counts from pytest's XML report; skipped tests count as not run."""
    passed: Counter[tuple[str, str]] = Counter()
    run: Counter[tuple[str, str]] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        properties = [(p.get("name"), p.get("value")) for p in case.iter("property")]
        outcome = {child.tag for child in case}
        if "skipped" in outcome:
            continue
        models = [value for name, value in properties if name == "model"] or [NO_MODEL]
        for feature in (value for name, value in properties if name == "feature"):
            for model in models:
                run[feature, model] += 1
                passed[feature, model] += not outcome & {"failure", "error"}
    counts: Counts = {}
    for feature, model in run:
        counts.setdefault(feature, {})[model] = Count(passed[feature, model], run[feature, model])
    return counts


def commit() -> str:
    """The checked-out commit, marked if the package or its tests differ from it."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "src", "tests"], cwd=ROOT, check=False)
    return head.stdout.strip() + (" and changes" if changed.returncode else "")


def add_results(report: Path) -> None:
    """Put pytest's report into the committed file, in place of an older one with the same version of transformers."""
    suites = list(ElementTree.parse(report).iter("testsuite"))
    tests, failed, errors, skipped = (
        sum(int(suite.get(key, 0)) for suite in suites) for key in ("tests", "failures", "errors", "skipped")
    )
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    results[version("transformers")] = {
        "versions": {name: version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "machine": f"{platform.machine()} CPU, one thread",
        "commit": commit(),
        "passed": tests - failed - errors - skipped,
        "failed": failed + errors,
        "skipped": skipped,
        "counts": {feature: dict(sorted(models.items())) for feature, models in count(report).items()},
    }
    ordered = sorted(results, key=_release)
    text = json.dumps({name: results[name] for name in ordered}, indent=1)
    RESULTS.write_text(text + "\n", encoding="utf-8")


def page(results: dict[str, dict]) -> str:
    """The page, from results by version of transformers."""
    counts = {release: _counts(result["counts"]) for release, result in results.items()}
    features = sorted({feature for release in counts.values() for feature in release}, key=str.casefold)
    models = {model for release in counts.values() for by_model in release.values() for model in by_model}
    sections = [_heading(results)]
    for kind, title in (("pure", "Linear layers only"), ("hybrid", "Hybrids of linear and softmax layers")):
        columns = sorted(model for model in models if model.endswith(f", {kind}"))
        columns.sort(key=lambda model: model.startswith("delta_rule"))
        header = [column.removesuffix(f", {kind}") for column in columns]
        rows = [[feature, *(_cell(feature, column, counts) for column in columns)] for feature in features]
        rows = [row for row in rows if any(row[1:])]
        sections.append(f"## {title}\n\n{_table(['feature', *header], rows)}")
    rows = [[f, _cell(f, NO_MODEL, counts)] for f in features if _cell(f, NO_MODEL, counts)]
    sections.append(
        "## Whatever the model\n\nRegistration, errors, checkpoints of others, and what runs in processes of its own."
        f"\n\n{_table(['feature', 'tests'], rows)}"
    )
    return "\n\n".join(sections) + "\n"


def _heading(results: dict[str, dict]) -> str:
    lines = [
        f"* transformers {release} (torch {r['versions']['torch']}, Python {r['python']}, {r['machine']}), "
        f"commit `{r['commit'][:12]}`{r['commit'][40:]}: {r['passed']:,} tests passed, {r['failed']:,} failed, "
        f"{r['skipped']:,} skipped"
        for release, r in results.items()
    ]
    runs = "\n".join(lines)
    return f"""# What works for which model

How many tests of a feature pass for a model, counted by `scripts/render_features.py` from runs of `tests/models`. One
number where all pass on all versions; otherwise passed/run for each. An empty cell: no test builds that model for that
feature, which says nothing about whether it works. A test that builds several models counts for each of them.
The columns are model types, `delta_rule` with each of its mixers; short convolutions are on in half of the models that
were built for this table.

{runs}

[models.md](models.md), [generation.md](generation.md) and [training.md](training.md) show how each is used."""


def _cell(feature: str, model: str, counts: dict[str, Counts]) -> str:
    cells = {release: by_feature.get(feature, {}).get(model) for release, by_feature in counts.items()}
    if not any(cells.values()):
        return ""
    found = set(cells.values())
    first = next(iter(found))
    if len(found) == 1 and first is not None and first.passed == first.run:
        return str(first.passed)
    return ", ".join(f"{c.passed}/{c.run} ({release})" if c else f"none ({release})" for release, c in cells.items())


def _table(header: list[str], rows: Iterable[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _counts(values: dict[str, dict[str, list[int]]]) -> Counts:
    return {feature: {model: Count(*c) for model, c in models.items()} for feature, models in values.items()}


def _release(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split(".") if part.isdigit())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="run the tests first, with the installed transformers")
    if parser.parse_args().run:
        add_results(run_tests())
    PAGE.write_text(page(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
