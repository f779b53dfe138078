"""Makes docs/lab.md and its pictures from the committed results: python scripts/render_lab.py."""

from pathlib import Path

from experiments.lab_page import write_page
from experiments.lab_records import Record, read_records
from experiments.measurements import read_measurements
from experiments.suite_selection import select
from experiments.suites import SUITES

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def main() -> None:
    suites = {}
    for suite in SUITES:
        records = _records(suite)
        suites[suite] = (select(suite), records, read_measurements(RESULTS, prefix=f"lab_{suite}_"))
    page = write_page(ROOT / "docs" / "lab.md", suites, images=ROOT / "docs" / "images")
    print(page)


def _records(suite: str) -> list[Record]:
    """Of all result files of a suite, each of which holds whole experiments."""
    records: list[Record] = []
    for path in sorted(RESULTS.glob(f"lab_{suite}*.jsonl")):
        found = read_records(path)
        if twice := {r.experiment for r in found} & {r.experiment for r in records}:
            raise ValueError(f"{path} holds experiments that another file holds too: {', '.join(sorted(twice))}")
        records += found
    return records


if __name__ == "__main__":
    main()
