"""Benchmarks run on a CPU at tiny sizes, write a result file, and `tables` prints it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import deltazoo
from benchmarks import accelerate, captured_training, decoding, host, in_vllm, models, operators, tables
from benchmarks.inputs import OPERATORS, Shape, gates_of, make_inputs
from deltazoo import names
from deltazoo.ops import delta_rule, linear_attention

SHAPE = Shape(1, 40, 2, 16, 8)


def run(module: ModuleType, out: Path, monkeypatch: pytest.MonkeyPatch, options: str) -> list[dict[str, Any]]:
    """The rows of a run, none of which failed."""
    monkeypatch.setattr(sys, "argv", [module.__name__, "--out", str(out), "--device", "cpu", *options.split()])
    assert module.main() == 0
    content = json.loads(out.read_text())
    assert [row["run"] for row in content["rows"]] == [content["runs"][0]["id"]] * len(content["rows"])
    return content["rows"]


def test_operators_and_their_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = f"--shapes {SHAPE} --ops delta kda softmax --gates medium --measure forward training host --peers sdpa"
    rows = run(operators, tmp_path / "run.json", monkeypatch, options)
    timed = {"first_forward_s", "forward_ms", "host_forward_us", "host_forward_grad_us"}
    timed |= {"first_training_s", "forward_backward_ms"}
    for op, library in (("delta", "deltazoo chunkwise"), ("kda", "deltazoo chunkwise"), ("softmax", "sdpa")):
        found = [row for row in rows if (row["op"], row["library"]) == (op, library)]
        assert {row["measure"] for row in found} == timed and all(row["value"] > 0 for row in found)
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["tables", str(tmp_path / "run.json"), "--only", "measure=forward_ms"])
    tables.main()
    printed = capsys.readouterr().out
    assert "shape: 1x40x2x16x8" in printed and "| op | gates | library | forward_ms |" in printed
    assert len([line for line in printed.splitlines() if line.startswith("|")]) == 2 + 3


def test_what_is_compared_with_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = "--size quickstart --rules gated_deltanet --streams 2 --prompt 20 --new 3 --ways generate engine"
    rows = run(in_vllm, tmp_path / "run.json", monkeypatch, options)
    assert [(row["way"], row["measure"]) for row in rows] == [
        (way, measure) for way in ("generate", "engine") for measure in ("with_prompts", "decoding")
    ]
    assert all(row["value"] > 0 for row in rows if row["measure"] == "with_prompts")


def test_every_operator_has_inputs_of_its_own_and_gradients_for_all_of_them() -> None:
    for op, operator in OPERATORS.items():
        gates = "medium" if "medium" in gates_of(op) else "none"
        inputs = make_inputs(SHAPE, op, gates, device="cpu", dtype=torch.float32)
        [ours] = operators.candidates_for(op, backend="chunkwise", precisions=[None], peers=["sdpa"])
        output, gradients = ours.forward(inputs), ours.train_step(inputs)
        assert len(gradients) == len(inputs.leaves(op)) and all(x.abs().max() > 0 for x in gradients), op
        arguments = dict(q=inputs.q, k=inputs.k, v=inputs.v, log_decay=inputs.log_decay, backend="reference")
        if not operator.corrects:
            expected = linear_attention(**arguments)
        else:
            erase_key = inputs.erase_key
            if operator.gated:
                erase_key, arguments["v"] = inputs.erase_gate * inputs.k, inputs.write_gate * inputs.v
            arguments |= dict(beta=inputs.beta, erase_key=erase_key, num_micro_steps=operator.num_micro_steps)
            expected = delta_rule(**arguments, erase_reads="undecayed" if operator.undecayed else "decayed")
        torch.testing.assert_close(output, expected.output, msg=op)


def test_models_and_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.SIZES, "quickstart", models.Size(32, 2, 2, 16, 48, 61))
    options = "--models gated_deltanet --peers llama --shapes 2x16 --steps 1"
    rows = run(models, tmp_path / "model.json", monkeypatch, options)
    assert all(row["value"] > 0 for row in rows)
    found = {(row["model"], row["library"], row["measure"]) for row in rows}
    for measure in ("first_step_s", "train_tok_s"):
        assert {("gated_deltanet", "deltazoo", measure), ("llama", "transformers", measure)} <= found
    names = "--models gated_deltanet --peers qwen3-next"
    rows = run(decoding, tmp_path / "decoding.json", monkeypatch, f"{names} --batches 2 --contexts 8 --new-tokens 3")
    assert all(row["value"] > 0 for row in rows)
    ways = {(row["library"], row["way"]) for row in rows if row["measure"] == "decode_tok_s"}
    assert ways == {
        *(("deltazoo", way) for way in ("generate", "generate-plain", "loop")),
        *(("accelerated", way) for way in ("generate", "loop")),
        ("transformers", "generate"),
    }
    assert len([row for row in rows if row["measure"] == "token_ms"]) == 3


def test_before_and_after_accelerating(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerate, "ROUNDS", 1)
    monkeypatch.setattr(accelerate, "BUDGET", 0)
    monkeypatch.setattr(accelerate, "NEW_TOKENS", 6)
    monkeypatch.setitem(accelerate.COMMON, "vocab_size", 64)
    rows = run(accelerate, tmp_path / "run.json", monkeypatch, "--small --families qwen3_next --tokens 80")
    assert [row["phase"] for row in rows] == accelerate.PHASES
    for row in rows:
        assert row["after"]["low"] <= row["after"]["tokens_per_s"] <= row["after"]["high"]
        assert (row["before"] is None) == (row["phase"] == "packed training")


def test_captured_training_beside_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = "--shapes 1x32 --steps 2 --recipes loop trainer"
    rows = run(captured_training, tmp_path / "run.json", monkeypatch, options)
    found = [(row["model"], row["recipe"], row["way"]) for row in rows]
    ours = [("gated_deltanet", recipe, way) for recipe in ("loop", "trainer") for way in ("eager", "captured")]
    assert found == [*ours, *[("llama", recipe, "eager") for recipe in ("loop", "trainer")]]
    assert all(row["value"] > 0 for row in rows)


def test_host_times_a_step_of_each_source_by_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = str(Path(deltazoo.__file__).parents[1])
    options = f"--shapes 1x16 --steps 1 --rounds 1 --sources {source}"
    *timed, ours, llama = run(host, tmp_path / "run.json", monkeypatch, options)
    assert [row["model"] for row in timed] == ["gated_deltanet", "llama"]
    for row in timed:
        phases = sum(row[f"{phase}_ms"] for phase in ("forward", "backward", "optimizer"))
        assert 0 < phases == pytest.approx(row["value"]) and phases <= row["step_ms"]
    for row in (ours, llama):  # which are of a GPU
        assert row["measure"] == "launches" and row["value"] == row["forward"]["ours"] == 0


def test_host_counts_launches_wherever_they_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda **_: launched.append(grid)

    module, launched = pytest.importorskip("deltazoo.ops.triton.launch"), []
    monkeypatch.setattr("deltazoo.names.launch_kernel", module.launch, raising=False)
    [ours] = models.candidates(models.SIZES["quickstart"], ["gated_deltanet"], [])
    step = host.Step(ours, {"way": "eager", "dtype": "float32", "batch": 1, "tokens": 8}, "cpu")
    for block in step.model.model.layers:
        block.register_forward_hook(lambda *_: names.launch_kernel(Kernel(), module.Constants(7)))
    counts = step.launches([1, 8])
    assert (counts["forward"]["ours"], counts["backward"]["ours"]) == (2, 0)
    assert launched == [(7,)] * 2 * 4  # after two steps to warm up, and a first profile
    assert names.launch_kernel is module.launch
