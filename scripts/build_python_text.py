"""Builds the text of `deltazoo lab --suite text` from the installed packages that constraints.txt pins.

    python scripts/build_python_text.py [--out FILE]

Prints what went in, and writes the manifest to benchmarks/results/text_corpus.json.
"""

import argparse
import json
from pathlib import Path

from deltazoo.workbench.lab.text.building import build_corpus, installed_sources
from deltazoo.workbench.lab.text.text_corpus import default_corpus_path

ROOT = Path(__file__).resolve().parents[1]
MANIFEST = ROOT / "benchmarks" / "results" / "text_corpus.json"
VOCABULARY = 8192
# Of different kinds: training of language models, mathematics, pictures, the network, testing, the terminal, templates.
HELD_OUT = (
    "anyio",
    "click",
    "Jinja2",
    "mpmath",
    "pillow",
    "pydantic",
    "pytest",
    "rich",
    "trl",
    "urllib3",
    "virtualenv",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=default_corpus_path())
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt")
    arguments = parser.parse_args()
    corpus = build_corpus(installed_sources(arguments.constraints), HELD_OUT, VOCABULARY)
    corpus.save(arguments.out)
    manifest = {**corpus.manifest, "sha256": corpus.digest, "compressed_bytes": arguments.out.stat().st_size}
    print(json.dumps(manifest, indent=1))
    print(
        f"{len(corpus.train):,} tokens to train on, {len(corpus.held_out):,} held out in {len(corpus.file_starts):,} "
        f"files; {len(corpus.new_identifiers):,} occurrences of identifiers that the training part lacks"
    )
    MANIFEST.write_text(json.dumps(manifest, indent=1) + "\n")
    print(arguments.out)


if __name__ == "__main__":
    main()
