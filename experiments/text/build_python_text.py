"""Builds the text of `deltazoo lab --suite text` from installed packages.

    python scripts/build_python_text.py [--out FILE]

It takes the packages and versions of benchmarks/results/text_corpus.json, so that the text stays the same when
constraints.txt changes, and fails if the hash of what it builds is another one. With --renew it takes all packages that
constraints.txt pins and writes that file anew; results on the earlier text do not compare then.
"""

import argparse
import json
from pathlib import Path

from experiments.text.building import build_corpus, installed_sources, read_pins
from experiments.text.text_corpus import default_corpus_path

ROOT = Path(__file__).resolve().parents[1]
MANIFEST = ROOT / "benchmarks" / "results" / "text_corpus.json"
VOCABULARY = 8192
# Of different kinds: training of language models, mathematics, pictures, the network, testing, the terminal, templates.
# None of them is adapted within a package that is trained on, as click is in typer.
HELD_OUT = (
    "anyio",
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
    parser.add_argument("--renew", action="store_true")
    arguments = parser.parse_args()
    known = None if arguments.renew else json.loads(MANIFEST.read_text(encoding="utf-8"))
    pins = (
        read_pins(ROOT / "constraints.txt")
        if known is None
        else {package["package"]: package["version"] for package in known["packages"]}
    )
    corpus = build_corpus(installed_sources(pins), HELD_OUT, VOCABULARY)
    if known is not None and corpus.digest != known["sha256"]:
        raise SystemExit(f"built a text with hash {corpus.digest}, not that of {MANIFEST.name}: {known['sha256']}")
    corpus.save(arguments.out)
    manifest = {**corpus.manifest, "sha256": corpus.digest, "compressed_bytes": arguments.out.stat().st_size}
    print(json.dumps(manifest, indent=1))
    print(
        f"{len(corpus.train):,} tokens to train on, {len(corpus.held_out):,} held out in {len(corpus.file_starts):,} "
        f"files; {len(corpus.new_identifiers):,} occurrences of identifiers that the training part lacks"
    )
    if known is None:
        MANIFEST.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    print(arguments.out)


if __name__ == "__main__":
    main()
