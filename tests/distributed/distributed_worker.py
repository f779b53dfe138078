"""Run by test_distributed.py under torchrun: a model trained by two processes through what transformers users have.

    torchrun --nproc-per-node 2 tests/distributed/distributed_worker.py FOLDER

FOLDER/model holds a checkpoint, FOLDER/swapped one of a swapped model. Writes FOLDER/results.json: by route, the losses
and the dtypes of gate parameters.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import nn
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny_models import tokens

from deltazoo.distributed import data_parallel, fully_shard_model
from deltazoo.layers import DeltaRuleAttention
from deltazoo.models import DeltaRuleForCausalLM

ROWS, STEPS = 4, 4


def trainer(model: nn.Module, folder: Path, **options: Any) -> Trainer:
    """transformers' Trainer on the data that the test trains on in one process."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=ROWS // PartialState().num_processes,
        learning_rate=1e-2,
        weight_decay=0.1,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **{"save_strategy": "no", **options},
    )
    return Trainer(model=model, args=arguments, train_dataset=[{"input_ids": x, "labels": x} for x in tokens(16, 12)])


def losses(trainer: Trainer, resume: str | None = None) -> list[float]:
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, begin: int, end: int) -> list[float]:
    """Losses over all processes of some steps of a plain loop."""
    found = []
    for ids in tokens(16, 12).split(ROWS)[begin:end]:
        rows = ids.chunk(dist.get_world_size())[dist.get_rank()]
        optimizer.zero_grad()
        loss = model(rows, labels=rows, use_cache=False).loss
        loss.backward()
        optimizer.step()
        total = loss.detach().double()
        dist.all_reduce(total)
        found.append(float(total) / dist.get_world_size())
    return found


class WithLoss(nn.Module):
    """A model without a head, whose outputs have a loss all the same."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, ids: torch.Tensor, **options: Any) -> SimpleNamespace:
        del options["labels"]
        return SimpleNamespace(loss=self.base(ids, **options).last_hidden_state.float().square().mean())


def gates(model: nn.Module) -> dict[str, Any]:
    """Losses of a plain loop, and the dtypes of a gate parameter: as stored, in the forward pass, of its gradient."""
    attn = next(module for module in model.modules() if isinstance(module, DeltaRuleAttention))
    seen = []
    attn.q_proj.register_forward_hook(lambda *_: seen.append(str(attn.A_log.dtype)))
    found = steps(model, torch.optim.SGD(model.parameters(), lr=1e-2), 0, 2)
    dtypes = [str(attn.A_log.dtype), *set(seen), str(attn.A_log.grad.dtype)]
    return {"losses": found, "gates": dtypes, "matrices": str(attn.q_proj.weight.dtype)}


def loss_by_number(model: nn.Module) -> tuple[float, float]:
    """The loss of a row and its sum over labels divided by a number that 16 bits cannot hold, as Trainer passes it."""
    ids = tokens(1, 12)
    with torch.no_grad():
        mean = model(ids, labels=ids, use_cache=False).loss
        return float(model(ids, labels=ids, use_cache=False, num_items_in_batch=torch.tensor(759.0)).loss), float(mean)


def sharded_modules(model: DeltaRuleForCausalLM, **options: Any) -> list[str]:
    """Names of the modules that are a group."""
    sharded = fully_shard_model(model, **options)
    return [name for name, module in sharded.named_modules() if isinstance(module, FSDPModule)]


@torch.no_grad()
def same_outputs(ours: nn.Module, alone: nn.Module) -> dict[str, bool]:
    """Whether two models compute exactly the same; each process passes the same batch."""
    ids = tokens(2, 10)
    inputs: dict[str, dict[str, Any]] = {
        "rows": {"input_ids": ids},
        "padded": {"input_ids": ids, "attention_mask": torch.tensor([[0, 0] + [1] * 8, [1] * 10])},
        "packed": {"input_ids": ids.reshape(1, -1), "cu_seqlens": torch.tensor([0, 7, 20])},
    }
    ours, alone = ours.eval(), alone.eval()
    same = {name: torch.equal(ours(**batch).logits, alone(**batch).logits) for name, batch in inputs.items()}
    # Unpadded: to mask softmax layers transformers asks the first layer of the cache, which only the first stage fills.
    decode = {**inputs["rows"], "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    return {**same, "generated": torch.equal(ours.generate(**decode), alone.generate(**decode))}


def prepared_by_accelerate(model: nn.Module, **options: Any) -> nn.Module:
    """accelerate's FSDP2 wrapping, which it does itself on accelerators only."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False, **options
    )
    state = SimpleNamespace(fsdp_plugin=plugin)
    accelerator = SimpleNamespace(
        state=state, mixed_precision="no", is_main_process=False, device=torch.device("cpu"), torch_device_mesh=None
    )
    return fsdp2_prepare_model(accelerator, model)


def interrupted(make: Callable[[], nn.Module], folder: Path) -> list[float]:
    """A run that saves after two steps, and a new one that goes on from there."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = steps(model, optimizer, 0, 2)
    save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return found + steps(model, optimizer, 2, STEPS)


def main(folder: Path) -> None:
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    PartialState(cpu=True)

    def model(dtype: torch.dtype = torch.float32, **options: Any) -> DeltaRuleForCausalLM:
        return DeltaRuleForCausalLM.from_pretrained(folder / "model", dtype=dtype, **options)

    def swapped(**options: Any) -> nn.Module:
        return AutoModelForCausalLM.from_pretrained(folder / "swapped", dtype=torch.bfloat16, **options)

    half = torch.bfloat16
    ddp = {"save_strategy": "steps", "save_steps": 2, "ddp_find_unused_parameters": False}

    def sharded_steps(**options: Any) -> list[float]:
        sharded = fully_shard_model(model(**options))
        return steps(sharded, torch.optim.AdamW(sharded.parameters(), lr=1e-2), 0, STEPS)

    mixed = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    wide_outputs = MixedPrecisionPolicy(param_dtype=half, output_dtype=torch.float32)

    def results_in_float32(sharded: nn.Module) -> list[Any]:
        """Dtypes of logits and loss, and whether logits are those of 16 bits, under a policy that casts the output."""
        ids = tokens(2, 12)
        found = sharded(ids, labels=ids, use_cache=False)
        found.loss.backward()
        narrow = bool(torch.equal(found.logits, found.logits.to(half).float()))
        return [str(found.logits.dtype), str(found.loss.dtype), narrow]

    embeddings = torch.ones(1, 4, model().config.hidden_size)
    one_group = {
        "one group, float32 embeddings": str(
            fully_shard_model(model(), mp_policy=mixed)(inputs_embeds=embeddings, use_cache=False).logits.dtype
        ),
        "one group, swapped, float32 embeddings, padded": str(
            fully_shard_model(swapped(), mp_policy=mixed)(
                inputs_embeds=swapped().get_input_embeddings()(tokens(2, 4)).float(),
                attention_mask=torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]),
                use_cache=False,
            ).logits.dtype
        ),
        "one group": sharded_modules(model(), mp_policy=mixed),
        "one group, bfloat16": sharded_modules(model(half)),
        "one group, losses": sharded_steps(),
        "one group, float32 outputs": results_in_float32(fully_shard_model(model(half), mp_policy=wide_outputs)),
        "one group, mixed precision": gates(fully_shard_model(model(), mp_policy=mixed)),
    }
    data_parallel._ONE_GROUP = 0  # as if it were large: each block is a group
    results: dict[str, Any] = one_group | {
        "Trainer, DDP": losses(trainer(model(), folder / "ddp", **ddp)),
        "FSDP2, whole": sharded_steps(),
        "FSDP2, loss without logits": sharded_steps(fuse_linear_cross_entropy=True),
        "FSDP2, recomputed": sharded_steps(recompute="elementwise"),
        "FSDP2, interrupted": interrupted(lambda: fully_shard_model(model()), folder / "fsdp"),
        "fully_shard_model, bfloat16": gates(fully_shard_model(model(half))),
        "fully_shard_model, swapped, bfloat16": gates(fully_shard_model(swapped())),
        "fully_shard_model, mixed precision": gates(fully_shard_model(model(), mp_policy=mixed)),
        "mixed precision, recomputed": gates(fully_shard_model(model(recompute="block"), mp_policy=mixed)),
        "float32 outputs": results_in_float32(fully_shard_model(model(), mp_policy=wide_outputs)),
        "loss by number": loss_by_number(fully_shard_model(model(), mp_policy=mixed)),
        "no head, alone": steps(WithLoss(model(half).model), torch.optim.SGD([torch.zeros(1)]), 0, 1),
        "no head": gates(WithLoss(fully_shard_model(model(half).model))),
        "sharded modules": [
            sharded_modules(model(), mp_policy=MixedPrecisionPolicy(**dtypes))
            for dtypes in ({}, {"param_dtype": half}, {"reduce_dtype": half})
        ],
        "accelerate": gates(prepared_by_accelerate(model())),
        "accelerate, sharded before, bfloat16": gates(prepared_by_accelerate(fully_shard_model(model(half)))),
    }
    # Newer versions shard in from_pretrained; older ones cannot read an optimizer's state on several CPU processes.
    if hasattr(DeltaRuleForCausalLM, "_resolve_parallel_plans"):
        from transformers.distributed import DistributedConfig

        resume = str(folder / "ddp" / "checkpoint-2")
        results["Trainer, DDP, resumed"] = losses(trainer(model(), folder / "ddp", **ddp), resume)
        results["from_pretrained, Trainer"] = losses(
            trainer(model(distributed_config=DistributedConfig(fsdp_size=2)), folder / "native")
        )
        results["from_pretrained, bfloat16"] = gates(model(half, distributed_config=DistributedConfig(fsdp_size=2)))
        results["from_pretrained, swapped, bfloat16"] = gates(
            swapped(distributed_config=DistributedConfig(fsdp_size=2))
        )
        results["pipeline"] = same_outputs(model(distributed_config=DistributedConfig(pp_size=2)), model())
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
