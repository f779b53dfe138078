"""`deltazoo train` on several processes: FSDP2 and context parallelism, and runs that go on on another number."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from several_processes import run_in_processes
from tiny_runs import losses, run_config, write_text_folder
from transformers import AutoModelForCausalLM

from deltazoo.training import RunConfig, load_config
from deltazoo.training.folder import checkpoints
from deltazoo.training.trainer import StopOnSignal

pytestmark = pytest.mark.processes

CLOSE = 2e-5
"""Relative; AdamW divides by the gradient's size, so rounding of small gradients shows after a few steps."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_folder(tmp_path_factory.mktemp("text") / "library")


def configuration(text: Path, output: Path, **training: Any) -> RunConfig:
    """Two blocks, one of them of softmax attention; rows long enough for pieces of two grid cells."""
    model = {"mixer": "gated_deltanet", "layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
    model |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    sizes = {"row_length": 96, "rows_per_batch": 4, "rows_per_step": 8, "evaluation_rows": 3}
    return run_config(text, output, model=model, training={**sizes, **training})


def assert_same(found: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, rel=CLOSE), key


@pytest.fixture(scope="module")
def alone(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    return losses(configuration(text, tmp_path_factory.mktemp("alone") / "run"))


@pytest.fixture(scope="module")
def sharded(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, dict[str, list[float]]]:
    """A finished run of four processes, FSDP2 x context parallelism."""
    config = configuration(text, tmp_path_factory.mktemp("four") / "run", fully_shard=True, context_parallel=2)
    return config, run_in_processes(4, losses, config)[0]


def continued(config: RunConfig, tmp_path: Path, **changes: Any) -> RunConfig:
    """A copy of a run that was stopped after its first checkpoint."""
    copy = tmp_path / "run"
    shutil.copytree(config.output, copy)
    shutil.rmtree(copy / "model")
    shutil.rmtree(copy / "checkpoint-8")
    (copy / "result.json").unlink()
    return replace(config, output=str(copy), training=replace(config.training, **changes))


def test_fsdp2_with_context_parallelism_has_the_losses_of_one_process(
    sharded: tuple[RunConfig, dict[str, list[float]]], alone: dict[str, list[float]]
) -> None:
    config, found = sharded
    assert_same(found, alone)
    assert [path.name for path in checkpoints(Path(config.output))] == ["checkpoint-4", "checkpoint-8"]
    AutoModelForCausalLM.from_pretrained(Path(config.output) / "model")


@pytest.mark.parametrize(
    ("processes", "changes"),
    [
        (1, {"context_parallel": 1}),
        (2, {"context_parallel": 1, "rows_per_batch": 2}),
        (2, {"context_parallel": 2, "fully_shard": False}),
    ],
    ids=["one", "two, FSDP2", "two, context parallelism"],
)
def test_a_sharded_checkpoint_goes_on_on_another_number_of_processes(
    processes: int,
    changes: dict[str, Any],
    sharded: tuple[RunConfig, dict[str, list[float]]],
    alone: dict[str, list[float]],
    tmp_path: Path,
) -> None:
    config = continued(sharded[0], tmp_path, **changes)
    found = losses(config, True) if processes == 1 else run_in_processes(processes, losses, config, True)[0]
    assert_same(found, alone)


def test_a_whole_checkpoint_goes_on_sharded(text: Path, tmp_path: Path, alone: dict[str, list[float]]) -> None:
    config = configuration(text, tmp_path / "whole", diagnose_every=4)
    whole = losses(config)
    assert len(whole["diagnose_gain_max"]) == 3  # before the first step, after four, after eight
    assert_same(whole, {key: alone[key] for key in ("loss", "grad_norm", "eval_loss")})
    assert_same(run_in_processes(2, losses, continued(config, tmp_path, fully_shard=True), True)[0], whole)


def killed_at_the_sixth_step(config: RunConfig) -> None:
    """A run whose rank 1 dies as the kernel kills it, without a word to the other."""
    reached = StopOnSignal.on_step_end

    def on_step_end(self: StopOnSignal, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.process_index == 1 and state.global_step == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        reached(self, args, state, control, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(StopOnSignal, "on_step_end", on_step_end)
        losses(config)


def test_a_killed_rank_ends_the_other_and_loses_nothing_saved(
    text: Path, tmp_path: Path, alone: dict[str, list[float]]
) -> None:
    config = configuration(text, tmp_path / "run", context_parallel=2)
    with pytest.raises(AssertionError, match=r"rank 0:\n[\s\S]*RuntimeError"):
        run_in_processes(2, killed_at_the_sixth_step, config, timeout=60)
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-4"]
    assert_same(losses(replace(config, training=replace(config.training, context_parallel=1)), True), alone)


def test_rows_divide_among_processes() -> None:
    settings = load_config("configs/paper_340m.yaml").training
    assert [settings.divided(processes) for processes in (1, 8, 64)] == [(16, 16), (16, 2), (4, 1)]
    shared = replace(settings, context_parallel=4)
    assert shared.divided(8) == (16, 8), "two groups"
    with pytest.raises(ValueError, match=r"256 rows of a step .* do not divide among 3 processes"):
        settings.divided(3)
    with pytest.raises(
        ValueError, match=r"context_parallel=4 .* 6 are no multiple of that: torchrun --nproc-per-node 4"
    ):
        shared.divided(6)
    with pytest.raises(ValueError, match="10 rows per step, for each of 2 processes, are no whole number .*=4"):
        replace(settings, rows_per_step=20, rows_per_batch=4).divided(2)
