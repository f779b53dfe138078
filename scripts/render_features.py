"""Writes docs/features.md from test results: what works for which model family.

    python scripts/render_features.py               # the page from the committed results
    python scripts/render_features.py --run         # runs tests/models on every model type first (half an hour)

`--run` adds the results of the transformers version it runs with to benchmarks/results/features.json; run it once per
supported version, in an environment of its own. A test names its feature in a `feature` marker, and tests/models/
conftest.py records which models it builds, so nothing here lists tests.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from benchmarks.markdown import table
from benchmarks.provenance import git_commit

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "features.json"
PAGE = ROOT / "docs" / "features.md"
PACKAGES = ("torch", "transformers", "accelerate", "peft", "huggingface_hub", "tokenizers")

# Key of counts that belong to no model: errors, registration, what is shared.
NO_MODEL = "any"

# Features that start so are about messages, not about what a model can do.
ERRORS = "errors: "

KINDS = {"pure": "models of linear layers alone", "hybrid": "hybrids"}

LEGEND = """\
{cells}

A family is a rule, under its own model type (`kda`, ...) or as a mixer of `delta_rule`. Rules without a column run the
same code; `tests/rules` has gradients, caches, padding, packing and parameters of each. A hybrid mixes linear and
softmax layers. [models.md](models.md), [generation.md](generation.md) and [training.md](training.md) show how each
feature is used. `scripts/render_features.py` writes this page from runs of `tests/models`.
"""


CELLS = {
    "yes": "**yes**: every test of the feature passes.",
    "no": "**no**: a test fails.",
    "-": "**-**: no test, which says nothing about whether it works.",
}


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
        "commit": git_commit(ROOT / "src", ROOT / "tests"),
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
    return _Page(results).text()


class _Page:
    """Tables of yes and no that share their footnotes."""

    def __init__(self, results: dict[str, dict]) -> None:
        self.results = results
        self.counts = {release: _counts(result["counts"]) for release, result in results.items()}
        found = {
            (feature, model) for release in self.counts.values() for feature in release for model in release[feature]
        }
        self.features = sorted({feature for feature, _ in found if not feature.startswith(ERRORS)}, key=str.casefold)
        self.families = sorted({_family(model) for _, model in found} - {NO_MODEL})
        self.footnotes: dict[str, int] = {}

    def text(self) -> str:
        general = [feature for feature in self.features if 2 * len(self.tested(feature)) > len(self.families)]
        special = [feature for feature in self.features if feature not in general]
        cells = {feature: [self.cell(feature, [family], kinds=True) for family in self.families] for feature in general}
        by_family = table(["feature", *self.families], [[feature, *row] for feature, row in cells.items()])
        rows = [
            [
                feature,
                self.cell(feature, self.tested(feature) or [NO_MODEL]),
                ", ".join(self.tested(feature)) or "tests without a model",
            ]
            for feature in special
        ]
        some = table(["feature", "works", "tested with"], rows)
        used = {cell.split(" (")[0] for row in [*cells.values(), *([row[1]] for row in rows)] for cell in row}
        legend = LEGEND.format(cells=" ".join(text for cell, text in CELLS.items() if cell in used))
        notes = "".join(f"{number}. {text}\n" for text, number in self.footnotes.items())
        parts = [
            f"# What works for which model\n\n{self.answer(cells)}\n\n{legend}",
            f"## By family\n\n{by_family}",
            f"## Tested with some families only\n\nThe families do not differ here, or only some have it.\n\n{some}",
            *([f"## Exceptions\n\n{notes}"] if notes else []),
            f"## Test runs\n\n{self.runs()}",
        ]
        return "\n".join(parts)

    def answer(self, cells: dict[str, list[str]]) -> str:
        """One sentence for a reader who wants no table."""
        releases = " and ".join(self.results)
        exceptions = [feature for feature, row in cells.items() if any(not cell.startswith("yes") for cell in row)]
        everything = f"All {len(cells)} features of the first table work for every family in it"
        if exceptions:
            everything = (
                f"{len(cells) - len(exceptions)} of the {len(cells)} features below work for every family in the table"
            )
        return f"{everything}, in models of linear layers alone and in hybrids, with transformers {releases}."

    def tested(self, feature: str) -> list[str]:
        """Families with a test of a feature."""
        models = {_family(model) for release in self.counts.values() for model in release.get(feature, {})}
        return [family for family in self.families if family in models]

    def cell(self, feature: str, families: list[str], *, kinds: bool = False) -> str:
        """yes, no or -, with the numbers of footnotes; `kinds` wants tests of both kinds of model."""
        found = [
            (_kind(model), release, count)
            for release, by_feature in self.counts.items()
            for model, count in by_feature.get(feature, {}).items()
            if _family(model) in families
        ]
        if not found:
            return "-"
        failing = [
            f"with transformers {release}, {count.run - count.passed} of {count.run} tests of {kind} fail"
            for kind, release, count in found
            if count.passed < count.run
        ]
        releases = {release for _, release, _ in found}
        notes = failing or [f"not tested with transformers {one}" for one in self.counts if one not in releases]
        if kinds:
            untested = sorted(set(KINDS.values()) - {kind for kind, _, _ in found})
            notes += [f"not tested in {kind}" for kind in untested]
        return ("no" if failing else "yes") + "".join(f" ({self.footnote(note)})" for note in notes)

    def footnote(self, text: str) -> int:
        return self.footnotes.setdefault(text, len(self.footnotes) + 1)

    def runs(self) -> str:
        rows = [
            [release, r["versions"]["torch"], r["python"], r["machine"], f"`{r['commit'][:12]}`{r['commit'][40:]}",
             f"{r['passed']:,}", f"{r['failed']:,}", f"{r['skipped']:,}"]
            for release, r in self.results.items()
        ]  # fmt: skip
        return table(["transformers", "torch", "Python", "machine", "commit", "passed", "failed", "skipped"], rows)


def _family(model: str) -> str:
    """`delta_rule: kda, hybrid` -> `kda`."""
    return model.split(", ")[0].removeprefix("delta_rule: ")


def _kind(model: str) -> str:
    return KINDS[model.split(", ")[1]] if ", " in model else "no model"


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
