"""`deltazoo train` of transformers' own classes on two processes: the losses of one, resumed on one; float32 gates."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from native_runs import INSTALLED, SECTIONS, native_config
from several_processes import run_in_processes
from tiny_runs import losses, write_text_folder
from transformers import AutoModelForCausalLM

from deltazoo.training import RunConfig, TokenizerConfig

pytestmark = pytest.mark.processes

ARCHITECTURES = [name for name in ("olmo_hybrid", "kimi_linear") if name in INSTALLED]
"""One decay per head and rotary positions; one decay per channel, latent attention and experts."""
WAYS = {"DDP": {}, "FSDP2": {"fully_shard": True}, "both": {"fully_shard": True, "context_parallel": 2}}


def configuration(text: Path, output: Path, architecture: str, **training: Any) -> RunConfig:
    sizes = {"row_length": 96, "rows_per_batch": 4, "rows_per_step": 8, "evaluation_rows": 3}
    return native_config(text, output, architecture, training={**sizes, **training})


def all_ways(text: Path, folder: Path, architecture: str) -> dict[str, Any]:
    """Losses by way of sharing the work among the ranks; all in one start of the processes."""
    return {way: losses(configuration(text, folder / way, architecture, **training)) for way, training in WAYS.items()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_processes_have_the_losses_of_one(architecture: str, tmp_path: Path) -> None:
    text = write_text_folder(tmp_path / "text", 3000)
    alone = losses(configuration(text, tmp_path / "alone", architecture))
    together = run_in_processes(2, all_ways, text, tmp_path, architecture)[0]
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "alone" / "model").state_dict()
    for way, found in together.items():
        for key, values in alone.items():
            assert found[key] == pytest.approx(values, rel=2e-5), (way, key)
        state = AutoModelForCausalLM.from_pretrained(tmp_path / way / "model").state_dict()
        assert state.keys() == expected.keys()
        for name, x in expected.items():
            torch.testing.assert_close(state[name], x, rtol=1e-2, atol=1e-4, msg=f"{way}, {name}")

    sharded = tmp_path / "FSDP2"
    for later in ("checkpoint-4", "model"):
        shutil.rmtree(sharded / later)
    (sharded / "result.json").unlink()
    continued = losses(configuration(text, sharded, architecture), resume=True)
    for key, values in alone.items():
        assert continued[key] == pytest.approx(values, rel=2e-5), key


def gates_in_forward(architecture: str) -> set[torch.dtype]:
    """The dtypes in which a sharded model in mixed precision computes with the parameters of its decay."""
    from accelerate import PartialState
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from deltazoo.distributed import fully_shard_model
    from deltazoo.training.run import build_model
    from deltazoo.training.tokens import build_tokenizer

    PartialState()
    section = {"architecture": architecture, **SECTIONS[architecture]}
    model = build_model(section, build_tokenizer(TokenizerConfig("byte"), []))
    fully_shard_model(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    (mixer,) = [layer for layer in model.modules() if hasattr(layer, "deltazoo_backend")]
    seen = []
    kept = mixer.apply_rule

    def apply_rule(*arguments: Any, **options: Any) -> Any:
        seen.extend(p.dtype for name, p in mixer.named_parameters() if name.endswith(("A_log", "dt_bias")))
        return kept(*arguments, **options)

    mixer.apply_rule = apply_rule
    ids = torch.arange(3, 35)[None]
    with torch.autocast("cpu", torch.bfloat16):
        model(ids, labels=ids, use_cache=False).loss.backward()
    return set(seen)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sharding_in_bfloat16_casts_no_gate(architecture: str) -> None:
    assert run_in_processes(2, gates_in_forward, architecture) == [{torch.float32}] * 2
