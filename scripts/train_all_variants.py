"""Train every variant for 50 steps on the same text with the same settings, and write the table in the documentation.

    python scripts/train_all_variants.py             # train, write the results and the table
    python scripts/train_all_variants.py --table-only  # only the table, from the last run's results

This checks that every variant learns. It does not compare variants: 50 steps with one learning rate do not show which
variant is better.
"""

import argparse
import json
import platform
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

import deltazoo
from deltazoo.workbench.train import load_config, train

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "variants_50_steps.json"
TABLE = ROOT / "docs" / "variants_50_steps.md"
SHOWN_STEPS = (1, 10, 20, 30, 40, 50)
SETTINGS = (
    "tokenizer.vocab_size=1024",
    "model.hidden_size=128",
    "model.num_hidden_layers=2",
    "model.num_heads=4",
    "model.intermediate_size=256",
    "training.steps=50",
    "training.row_length=256",
    "training.rows_per_batch=4",
    "training.learning_rate=4e-3",
    "training.warmup=0.2",
    "training.log_every=1",
    "training.evaluate_every=50",
    "training.save_every=50",
)
console = Console()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table-only", action="store_true", help="render the table from the figures on disk")
    if not parser.parse_args().table_only:
        FIGURES.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    TABLE.write_text(render(figures), encoding="utf-8")
    console.print(f"wrote {FIGURES.relative_to(ROOT)} and {TABLE.relative_to(ROOT)}")
    for variant, run in figures["variants"].items():
        if not run["losses"]["50"] < run["losses"]["1"]:
            raise SystemExit(
                f"{variant} did not learn: its loss went from {run['losses']['1']} to {run['losses']['50']}"
            )


def measure() -> dict:
    """Train each variant in a temporary folder."""
    config = load_config(ROOT / "configs" / "quickstart_cpu.yaml", SETTINGS)
    variants = {}
    for variant in deltazoo.list_variants():
        console.print(f"[bold]{variant}[/]")
        with tempfile.TemporaryDirectory() as folder:
            result = train(replace(config, output=f"{folder}/run", model={**config.model, "mixer": variant}))
        losses = {entry["step"]: entry["loss"] for entry in result.log_history if "loss" in entry}
        last = [entry for entry in result.log_history if "eval_loss" in entry][-1]
        variants[variant] = {
            "parameters": result.num_parameters,
            "losses": {str(step): round(losses[step], 4) for step in SHOWN_STEPS},
            "validation_loss": round(last["eval_loss"], 4),
            "validation_bits_per_byte": round(last["eval_bits_per_byte"], 4),
        }
    return {
        "text": result.corpus.description,
        "settings": list(SETTINGS),
        "device": result.device,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "variants": variants,
    }


def _settings(settings: list[str]) -> str:
    """The settings as `--set` takes them today. A key that was replaced since the run stands behind its successor."""
    values = dict(setting.split("=", 1) for setting in settings)
    shown = []
    for key, value in values.items():
        if key == "training.warmup_steps":
            share = int(value) / int(values["training.steps"])
            shown.append(f"`training.warmup={share:g}` (in the run: `{key}={value}`, an older key for the same)")
        else:
            shown.append(f"`{key}={value}`")
    return ", ".join(shown)


def render(figures: dict) -> str:
    """The page as Markdown."""
    header = ["variant", "parameters", *(f"step {step}" for step in SHOWN_STEPS), "held-out loss", "bits per byte"]
    rows = [
        [
            f"`{variant}`",
            f"{run['parameters']:,}",
            *(f"{run['losses'][str(step)]:.2f}" for step in SHOWN_STEPS),
            f"{run['validation_loss']:.2f}",
            f"{run['validation_bits_per_byte']:.2f}",
        ]
        for variant, run in figures["variants"].items()
    ]
    lines = [
        "# Every variant learns",
        "",
        "Fifty optimizer steps each on the same batches of the same text with the same settings; losses in nats per",
        "token. A check, not a comparison: one learning rate and fifty steps do not say which variant is better.",
        "",
        f"Text: {figures['text']}, Python {figures['python']}. torch {figures['torch']}, {figures['device']}.",
        f"Settings on top of `configs/quickstart_cpu.yaml`: {_settings(figures['settings'])}.",
        "",
        "Written by `scripts/train_all_variants.py` from `docs/variants_50_steps.json`.",
        "",
        "| " + " | ".join(header) + " |",
        "|---" + "|---:" * (len(header) - 1) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
