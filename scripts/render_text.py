"""Makes docs/text.md, docs/text_conversions.md and their pictures from the committed results.

python scripts/render_text.py
"""

import json
from pathlib import Path

from experiments.text.results import TextResults
from experiments.text.text_page import write_text_page
from experiments.text_conversions.conversion_page import write_conversion_page
from experiments.text_conversions.conversion_results import ConversionResults

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "text.jsonl"
CONVERSIONS = ROOT / "benchmarks" / "results" / "text_conversions.jsonl"
MANIFEST = ROOT / "benchmarks" / "results" / "text_corpus.json"
DOCS = ROOT / "docs"


def main(folder: Path = DOCS) -> list[Path]:
    results = TextResults.read(RESULTS) if RESULTS.exists() else None
    manifest = json.loads(MANIFEST.read_text(encoding="utf-8"))
    conversions = ConversionResults.read(CONVERSIONS) if CONVERSIONS.exists() else None
    images = folder / "images"
    return [
        write_text_page(folder / "text.md", results, manifest, images=images),
        write_conversion_page(folder / "text_conversions.md", conversions, results, images=images),
    ]


if __name__ == "__main__":
    print(*main(), sep="\n")
