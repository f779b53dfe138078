"""Makes docs/text.md and its pictures from the committed results: python scripts/render_text.py."""

import json
from pathlib import Path

from deltazoo.workbench.lab.text.results import TextResults
from deltazoo.workbench.lab.text.text_page import write_text_page

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "text_h200.jsonl"
MANIFEST = ROOT / "benchmarks" / "results" / "text_corpus.json"
PAGE = ROOT / "docs" / "text.md"


def main(page: Path = PAGE) -> Path:
    results = TextResults.read(RESULTS) if RESULTS.exists() else None
    manifest = json.loads(MANIFEST.read_text(encoding="utf-8"))
    return write_text_page(page, results, manifest, images=page.parent / "images")


if __name__ == "__main__":
    print(main())
