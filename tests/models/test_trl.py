"""TRL's SFTTrainer: packed documents train like documents in padded rows, and like documents one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tiny_families import swapped
from tiny_models import VOCAB, tiny_model, tokens
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

trl = pytest.importorskip("trl", reason="TRL is not installed; it comes with the extra `test`")

DOCUMENTS = [tokens(length, seed=length).tolist() for length in (5, 9, 3, 7, 12, 4, 6, 8)]
CASES = ["gated_deltanet", "hybrid_kda"]
# TRL computes the loss in float32, over some fifty tokens.
CLOSE = 100 * torch.finfo(torch.float32).eps


def settings(path: Path, **options: Any) -> dict[str, Any]:
    """Training arguments for three steps on eight rows on the CPU."""
    return {
        "output_dir": str(path),
        "max_steps": 3,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        "max_length": 16,
        "gradient_checkpointing": False,
        **options,
    }


def losses(case: str, tokenizer: PreTrainedTokenizerFast, path: Path, **options: Any) -> list[float]:
    """Losses of three steps on all documents."""
    arguments = trl.SFTConfig(**settings(path, **options))
    trainer = trl.SFTTrainer(
        model=tiny_model(case),
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": DOCUMENTS}),
        processing_class=tokenizer,
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("case", CASES)
def test_packing(case: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = tiny_model(case)
    one_by_one = [model(ids, labels=ids).loss.item() for ids in (torch.tensor([row]) for row in DOCUMENTS)]
    predicted = [len(row) - 1 for row in DOCUMENTS]
    mean = sum(loss * n for loss, n in zip(one_by_one, predicted, strict=True)) / sum(predicted)

    padded = losses(case, tokenizer, tmp_path)
    assert padded[0] == pytest.approx(mean, rel=CLOSE)
    # The losses of later steps are equal only if the gradients are.
    for options in ({"packing": True}, {"packing": True, "gradient_checkpointing": True}):
        assert losses(case, tokenizer, tmp_path, **options) == pytest.approx(padded, rel=CLOSE), options
    assert losses(case, tokenizer, tmp_path, padding_free=True, max_length=None) == pytest.approx(padded, rel=CLOSE)


@pytest.mark.parametrize(
    "make", [lambda: tiny_model("gated_deltanet"), lambda: swapped(layers=[0], sizes={"vocab_size": VOCAB})]
)
def test_models_from_a_path(make: Callable[[], Any], tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """SFTTrainer loads the model, and DPOTrainer its reference, by the name of the class in config.json."""
    model = make()
    model.save_pretrained(tmp_path / "model")
    options = {"processing_class": tokenizer}
    sft = trl.SFTTrainer(
        str(tmp_path / "model"),
        trl.SFTConfig(**settings(tmp_path / "sft")),
        train_dataset=Dataset.from_dict({"input_ids": DOCUMENTS}),
        **options,
    )
    assert type(sft.model) is type(model)
    pairs = Dataset.from_dict({"prompt": ["1 2"] * 2, "chosen": ["3 4"] * 2, "rejected": ["5"] * 2})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    dpo = trl.DPOTrainer(loaded, args=trl.DPOConfig(**settings(tmp_path / "dpo")), train_dataset=pairs, **options)
    assert type(dpo.ref_model) is type(model) and dpo.ref_model is not dpo.model
    assert dpo.compute_loss(dpo.model.eval(), next(iter(dpo.get_train_dataloader()))).isclose(torch.tensor(2.0).log())
