"""Renders docs/model_speed.md and its plots from the result files of `deltazoo bench model`.

python scripts/render_model_speed.py [--results DIR] [--page FILE] [--plots DIR]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.model_page import write_model_page
from benchmarks.model_results import ModelResults

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "model_speed.md")
    parser.add_argument("--plots", type=Path, default=ROOT / "docs" / "images" / "model_speed")
    args = parser.parse_args()
    files = sorted(args.results.glob("model_*.json"))
    if not files:
        print(f"no result files (model_*.json) in {args.results}", file=sys.stderr)
        return 1
    try:
        results = ModelResults.load(files)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    for path in write_model_page(results, args.page, args.plots):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
