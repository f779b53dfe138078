"""Renders docs/benchmarks.md and its plots from the operators' result files, benchmarks/results/ops_*.json.

python scripts/render_benchmarks.py [--results DIR] [--page FILE] [--plots DIR]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.operator_page import write_page
from benchmarks.operator_results import OperatorResults

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "benchmarks.md")
    parser.add_argument("--plots", type=Path, default=ROOT / "docs" / "benchmarks")
    args = parser.parse_args()
    files = sorted(args.results.glob("ops_*.json"))
    if not files:
        print(f"no result files (ops_*.json) in {args.results}", file=sys.stderr)
        return 1
    try:
        results = OperatorResults.load(files)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    for path in write_page(results, args.page, args.plots):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
