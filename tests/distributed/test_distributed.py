"""Two CPU processes train as one does: DDP and FSDP2, through Trainer, accelerate, from_pretrained and plain loops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from several_processes import run_script
from tiny_families import tiny_original
from tiny_models import tiny_model, tokens
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from deltazoo import swap_attention

pytestmark = pytest.mark.processes

WORKER = Path(__file__).with_name("distributed_worker.py")
CASE, STEPS, ROWS = "hybrid_kda", 4, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distributed")
    tiny_model(CASE).save_pretrained(folder / "model")
    swapped = tiny_original("llama")
    swap_attention(swapped, "kda", [0, 2])
    swapped.save_pretrained(folder / "swapped")
    return folder


@pytest.fixture(scope="module")
def together(folder: Path) -> dict[str, Any]:
    """Results of two processes, by way of training."""
    run_script(2, WORKER, str(folder))
    return json.loads((folder / "results.json").read_text())


def losses_alone(
    path: Path, optimizer_class: type[torch.optim.Optimizer], steps: int, dtype: torch.dtype
) -> list[float]:
    """The plain loop of the worker in this process."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    optimizer = optimizer_class(model.parameters(), lr=1e-2)  # type: ignore[call-arg]
    losses = []
    for ids in tokens(16, 12).split(ROWS)[:steps]:
        optimizer.zero_grad()
        # In the worker's two halves, so that bfloat16 sums what it sums there.
        for half in ids.chunk(2):
            loss = model(half, labels=half, use_cache=False).loss / 2
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
    return [first + second for first, second in zip(losses[::2], losses[1::2], strict=True)]


@pytest.fixture(scope="module")
def trained_alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of transformers' Trainer in this process."""
    arguments = TrainingArguments(
        output_dir=str(tmp_path_factory.mktemp("alone")),
        max_steps=STEPS,
        per_device_train_batch_size=ROWS,
        learning_rate=1e-2,
        weight_decay=0.1,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    data = [{"input_ids": row, "labels": row} for row in tokens(16, 12)]
    trainer = Trainer(model=tiny_model(CASE), args=arguments, train_dataset=data)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


# Sums over rows are taken in another order, a few hundred terms each.
CLOSE = 100 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("route", ["Trainer, DDP", "Trainer, DDP, resumed", "from_pretrained, Trainer"])
def test_trainer(route: str, together: dict[str, Any], trained_alone: list[float]) -> None:
    if route not in together:
        pytest.skip("this version of transformers does not shard in from_pretrained, nor resume several CPU processes")
    assert together[route] == pytest.approx(trained_alone, rel=CLOSE)


def test_fsdp2_equals_one_process_and_goes_on_where_it_was_interrupted(together: dict[str, Any], folder: Path) -> None:
    alone = losses_alone(folder / "model", torch.optim.AdamW, STEPS, torch.float32)
    assert together["FSDP2, whole"] == pytest.approx(alone, rel=CLOSE)
    assert together["FSDP2, loss without logits"] == pytest.approx(alone, rel=CLOSE)
    assert together["FSDP2, recomputed"] == together["FSDP2, whole"]
    assert together["FSDP2, interrupted"] == together["FSDP2, whole"]


def test_a_small_model_is_one_group_besides_that_of_its_gates(together: dict[str, Any], folder: Path) -> None:
    assert together["one group"] == together["one group, bfloat16"] == ["", "model"]
    assert together["one group, float32 embeddings"] == "torch.bfloat16"
    assert together["one group, swapped, float32 embeddings, padded"] == "torch.bfloat16"
    alone = losses_alone(folder / "model", torch.optim.AdamW, STEPS, torch.float32)
    assert together["one group, losses"] == pytest.approx(alone, rel=CLOSE)
    assert together["one group, mixed precision"] == together["fully_shard_model, mixed precision"]


def test_mixed_precision_rounds_no_number_of_labels(together: dict[str, Any]) -> None:
    found, mean = together["loss by number"]
    assert found == pytest.approx(mean * 11 / 759, rel=1e-6)


def test_a_policy_casts_the_results_of_the_model_and_of_no_block(together: dict[str, Any]) -> None:
    assert together["float32 outputs"] == together["one group, float32 outputs"] == ["torch.float32"] * 2 + [True]


def test_a_block_is_one_group_and_so_are_the_gates_of_all_where_something_is_cast(together: dict[str, Any]) -> None:
    uncast, parameters_cast, gradients_cast = together["sharded modules"]
    assert set(uncast) == {"", *(f"model.layers.{number}" for number in range(len(uncast) - 1))}
    assert set(parameters_cast) == set(gradients_cast) == {*uncast, "model"}


def test_gates_stay_float32_where_blocks_run_twice_and_without_a_head(together: dict[str, Any]) -> None:
    assert together["mixed precision, recomputed"] == together["fully_shard_model, mixed precision"]
    found = together["no head"]
    assert (found["gates"], found["matrices"]) == (["torch.float32"] * 3, "torch.bfloat16")
    assert found["losses"][:1] == together["no head, alone"]


@pytest.mark.parametrize(
    ("route", "dtype"),
    [
        ("fully_shard_model, bfloat16", torch.bfloat16),
        ("fully_shard_model, mixed precision", torch.float32),
        ("accelerate", torch.float32),
        ("accelerate, sharded before, bfloat16", torch.bfloat16),
        ("from_pretrained, bfloat16", torch.bfloat16),
        ("fully_shard_model, swapped, bfloat16", torch.bfloat16),
        ("from_pretrained, swapped, bfloat16", torch.bfloat16),
    ],
)
def test_gates_stay_float32_whatever_the_rest_is_in(
    route: str, dtype: torch.dtype, together: dict[str, Any], folder: Path
) -> None:
    if route not in together:
        pytest.skip("this version of transformers does not shard in from_pretrained")
    found = together[route]
    assert found["matrices"] == str(dtype)
    assert found["gates"] == ["torch.float32"] * 3  # stored, in the forward pass, the gradient
    computed_in = torch.bfloat16 if "mixed" in route else dtype
    # The first loss is that of the same weights; a bfloat16 step rounds what the processes add up.
    path = folder / ("swapped" if "swapped" in route else "model")
    first, second = losses_alone(path, torch.optim.SGD, 2, computed_in)
    assert found["losses"][0] == pytest.approx(first, rel=CLOSE)
    assert found["losses"][1] == pytest.approx(second, rel=max(CLOSE, torch.finfo(computed_in).eps))


def test_two_stages_compute_what_one_process_does(together: dict[str, Any]) -> None:
    if "pipeline" not in together:
        pytest.skip("this version of transformers has no pipeline stages")
    assert together["pipeline"] == dict.fromkeys(("rows", "padded", "packed", "generated"), True)


def test_the_script_finds_no_difference() -> None:
    """DDP, FSDP2 in both precisions and context parallelism, with AdamW."""
    output = run_script(2, WORKER.with_name("check_distributed.py"), "--cases", "kda")
    assert output.count("losses off by") == 5
