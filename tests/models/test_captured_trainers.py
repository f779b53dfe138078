"""Captured training steps in the trainers of transformers and TRL, without a line in the user's program.

Graphs are stood in for as in test_captured_training.py. Losses and norms of gradients are compared bit by bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from captured_training import as_on_a_gpu, reasons, replayed
from datasets import Dataset
from peft import LoraConfig
from tiny_families import swapped
from tiny_models import tiny_model, tokens
from transformers import Trainer, TrainingArguments

from deltazoo.models import DeltaRuleForCausalLM

trl = pytest.importorskip("trl", reason="TRL is not installed; it comes with the extra `test`")
ARGUMENTS: dict[str, Any] = {
    "max_steps": 6,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
    "disable_tqdm": True,
}


@pytest.fixture(autouse=True)
def captures(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)


def own() -> Any:
    return tiny_model("gated_deltanet")


def losses(trainer: Any) -> list[tuple[float, float]]:
    trainer.train()
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]


def assert_trains_alike(
    make: Callable[[], Any], trainer_of: Callable[[Any], Any], replays: int, reason: str | None = None
) -> None:
    eager, captured = make(), make()
    eager.set_runtime(captured_training=False)
    assert losses(trainer_of(eager)) == losses(trainer_of(captured))
    watched = 0 if isinstance(captured, DeltaRuleForCausalLM) else 1
    assert replayed(captured) == replays - watched, reasons(captured)
    if reason is not None:
        assert reason in reasons(captured)


PLAIN: dict[str, Any] = {}
CHECKPOINTING = {"gradient_checkpointing": True}  # of the model, not by an argument of Trainer


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (own, PLAIN),
        (own, {"gradient_accumulation_steps": 2, "max_steps": 3}),
        (own, CHECKPOINTING),
        (own, {"neftune_noise_alpha": 5.0}),
        (own, {"max_grad_norm": 0.01, "torch_empty_cache_steps": 2}),
        (swapped, PLAIN),  # of what blocks are called with, only checkpointing changes anything
        (swapped, CHECKPOINTING),
    ],
    ids=["plain", "accumulation", "checkpointing", "neftune", "clipping", "swapped", "swapped_checkpointing"],
)
def test_trainer(make, options, tmp_path):
    rows = [{"input_ids": row, "labels": row} for row in tokens(12, 10)]
    checkpointing = options is CHECKPOINTING

    def trainer(model: Any) -> Trainer:
        if checkpointing:
            model.gradient_checkpointing_enable()
        arguments = {**ARGUMENTS, "per_device_train_batch_size": 2, "output_dir": str(tmp_path)}
        arguments |= {} if checkpointing else options
        return Trainer(model=model, args=TrainingArguments(**arguments), train_dataset=rows)

    assert_trains_alike(make, trainer, 4)


@pytest.mark.parametrize("make", [own, swapped])
@pytest.mark.parametrize("lora", [False, True])
def test_sft(make, lora, tokenizer, tmp_path):
    """With TRL's own defaults, gradient checkpointing among them."""
    rows = Dataset.from_dict({"input_ids": tokens(16, 10).tolist()})

    def trainer(model: Any) -> Any:
        torch.manual_seed(0)
        settings = trl.SFTConfig(**ARGUMENTS, output_dir=str(tmp_path), per_device_train_batch_size=2)
        adapter = LoraConfig(r=2, target_modules=["o_proj"]) if lora else None
        return trl.SFTTrainer(model, settings, train_dataset=rows, processing_class=tokenizer, peft_config=adapter)

    assert_trains_alike(make, trainer, 4)


def test_dpo(tokenizer, tmp_path):
    pairs = Dataset.from_dict({"prompt": ["1 2"] * 16, "chosen": ["3 4"] * 16, "rejected": ["5 6"] * 16})

    def trainer(model: Any) -> Any:
        settings = trl.DPOConfig(**ARGUMENTS, output_dir=str(tmp_path), per_device_train_batch_size=2)
        options = {"args": settings, "train_dataset": pairs, "processing_class": tokenizer}
        return trl.DPOTrainer(model, ref_model=copy.deepcopy(model), **options)

    assert_trains_alike(own, trainer, 4)


def test_grpo(tokenizer, tmp_path):
    prompts = Dataset.from_dict({"prompt": ["1 2 3"] * 16})

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(len(set(text))) for text in completions]

    def trainer(model: Any) -> Any:
        torch.manual_seed(0)
        settings = trl.GRPOConfig(
            **{**ARGUMENTS, "max_steps": 4},
            output_dir=str(tmp_path),
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=5,
        )
        return trl.GRPOTrainer(model, reward, args=settings, train_dataset=prompts, processing_class=tokenizer)

    eager, captured = own(), own()
    eager.set_runtime(captured_training=False)
    assert losses(trainer(eager)) == losses(trainer(captured))
    assert "training steps:" in reasons(captured)
