"""Trains two tiny models, of which one diverges, with `deltazoo.DiagnoseCallback`; the pictures of docs/diagnosis.md.

    python scripts/diagnose_diverging_run.py           # trains, about a minute on a CPU, writes the result, draws it
    python scripts/diagnose_diverging_run.py --draw    # draws the committed result again

Both are DeltaNets with step sizes up to 2. One is `neg_delta_net`: unit keys, step sizes of at most `2 / |k|^2`. The
other has neither: nothing keeps its erase gain below 2.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import sysconfig
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

import deltazoo
from benchmarks.provenance import describe_run
from deltazoo import DeltaRuleAttention, RuleSpec, register_rule
from deltazoo.diagnosis import Diagnosis
from deltazoo.diagnosis.diagnosis_picture import draw_records
from deltazoo.models import DeltaRuleConfig, DeltaRuleForCausalLM
from deltazoo.training.figures import BLUE, GREY, ORANGE, new_figure, save_figure

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "diagnosis_cpu.json"
IMAGES = ROOT / "docs" / "images"
STEPS, ROWS, LENGTH = 40, 8, 256
BOUNDED, UNBOUNDED = "neg_delta_net", "unbounded_delta_net"


@register_rule(
    RuleSpec(
        name=UNBOUNDED,
        paper="none",
        summary="DeltaNet with step sizes up to 2 and keys of any length: nothing bounds its erase gain.",
        equation="S_t = (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T",
        step_size="euler",
        normalize_k=False,
        allow_neg_eigval=True,
    )
)
class UnboundedDeltaNet(DeltaRuleAttention):
    def rule_inputs(self, hidden_states: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return super().rule_inputs(hidden_states, q, k, v)._replace(beta=2 * self.step_gate(hidden_states))


class KeepAll(deltazoo.DiagnoseCallback):
    """Keeps every diagnosis."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.found: list[Diagnosis] = []

    def measure(self, *arguments: Any) -> None:
        super().measure(*arguments)
        assert self.latest is not None
        self.found.append(self.latest)


def train(rule: str, rows: Tensor) -> dict[str, Any]:
    """Losses and summaries of every step, and the last diagnosis whose summary is finite."""
    torch.manual_seed(0)
    config = DeltaRuleConfig(
        mixer=rule,
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=4,
        num_heads=4,
        intermediate_size=128,
        initializer_range=0.06,
    )
    model = DeltaRuleForCausalLM(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=ROWS,
            learning_rate=5e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_strategy="no",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        dataset = [{"input_ids": row, "labels": row} for row in rows[4:]]
        trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
        callback = KeepAll(trainer, rows[:4], every=1)
        trainer.add_callback(callback)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    finite = [step for step, found in enumerate(callback.found) if all(map(math.isfinite, found.summary().values()))]
    last = callback.found[finite[-1]]
    return {
        "rule": rule,
        "losses": [finite_or_none(loss) for loss in losses],
        "summaries": [{k: finite_or_none(v) for k, v in found.summary().items()} for found in callback.found],
        "warnings": [found.warnings for found in callback.found],
        "last_finite_step": finite[-1],
        "last_finite": last.records(),
    }


def finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def measure(path: Path, commit: str | None) -> None:
    text = b"".join(file.read_bytes() for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40])
    rows = torch.tensor(list(text[: LENGTH * (4 + STEPS * ROWS)])).view(-1, LENGTH)
    run = describe_run(device="cpu", commit=commit, command=sys.argv)
    content = {"run": asdict(run), "runs": [train(rule, rows) for rule in (BOUNDED, UNBOUNDED)]}
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def draw(path: Path, images: Path) -> list[Path]:
    """The curves of both runs, and the heat maps of the diverging one."""
    runs = {run["rule"]: run for run in json.loads(path.read_text(encoding="utf-8"))["runs"]}
    figure, (loss, gain) = new_figure(2, width=9.0, height=3.2)
    labels = {BOUNDED: "unit keys, bounded step sizes", UNBOUNDED: "neither"}
    for (rule, label), colour in zip(labels.items(), (BLUE, ORANGE), strict=True):
        losses = [math.nan if value is None else value for value in runs[rule]["losses"]]
        gains = [math.nan if x["gain_max"] is None else x["gain_max"] for x in runs[rule]["summaries"]]
        loss.plot(range(1, STEPS + 1), losses, color=colour, label=label)
        gain.plot(range(STEPS + 1), gains, color=colour, label=label)
    for axis in (loss, gain):
        axis.axvline(runs[UNBOUNDED]["losses"].index(None), color=GREY, linestyle="--", linewidth=1)
        axis.set(xlabel="step")
    gain.axhline(2, color=GREY, linewidth=1)
    loss.set(title="training loss, nats per byte; dashed: the last step before NaN")
    gain.set(title="largest erase gain; above 2 a state expands")
    for axis in (loss, gain):
        axis.title.set_fontsize("medium")
    loss.legend(frameon=False)
    curves = save_figure(figure, images / "diagnosis_diverging_run.png")
    return [curves, draw_records(runs[UNBOUNDED]["last_finite"], images / "diagnosis_layers.png")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--draw", action="store_true", help="draw what --out holds, without training")
    parser.add_argument("--commit", help="of the code; default: asked from git")
    arguments = parser.parse_args()
    if not arguments.draw:
        measure(arguments.out, arguments.commit)
    print(*draw(arguments.out, IMAGES), sep="\n")


if __name__ == "__main__":
    main()
