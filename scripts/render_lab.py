"""Makes docs/lab.md and its pictures from the committed results: python scripts/render_lab.py."""

from pathlib import Path

from deltazoo.lab.measurements import read_measurements
from deltazoo.lab.report import write_page
from deltazoo.lab.results import read_records
from deltazoo.lab.selection import select
from deltazoo.lab.suites import SUITES

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def main() -> None:
    suites = {}
    for suite in SUITES:
        path = RESULTS / f"lab_{suite}.jsonl"
        records = read_records(path) if path.exists() else []
        suites[suite] = (select(suite), records, read_measurements(RESULTS, prefix=f"lab_{suite}_"))
    page = write_page(ROOT / "docs" / "lab.md", suites, images=ROOT / "docs" / "images")
    print(page)


if __name__ == "__main__":
    main()
