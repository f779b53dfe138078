"""Check that a model trains the same on several processes as on one: DDP, FSDP2 and context parallelism.

    torchrun --nproc-per-node 2 tests/distributed/check_distributed.py    # --help for the options

Uses one GPU per process (NCCL) if there are enough, else the CPU (gloo). Every process first takes a few optimizer
steps alone on whole batches, then the same steps together with the others. For each case the script prints the losses
and the differences in losses and first gradients. The exit status is 1 if these exceed rounding.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from transformers.utils import logging

import deltazoo
from deltazoo.distributed import fully_shard_model, local_batch
from deltazoo.layers import parameter_groups
from deltazoo.models import DeltaRuleConfig, DeltaRuleForCausalLM

SIZES = {"vocab_size": 96, "hidden_size": 64, "head_dim": 32, "num_hidden_layers": 2, "intermediate_size": 128}
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
CASES = {"gated_deltanet": {}, "kda": {"mixer": "kda"}, "efla": {"mixer": "efla"}, "hybrid": HYBRID}
STEPS, ROWS_PER_PROCESS, ROW_LENGTH = 4, 2, 48


class Mode(NamedTuple):
    """One way of spreading a model over processes."""

    name: str
    distribute: Callable[[Path, torch.dtype], nn.Module]
    """Loads the model of a checkpoint and distributes it."""
    dtype: torch.dtype = torch.float32
    divides: Literal["rows", "tokens"] = "rows"
    """What of a batch each process has its share of."""


class Run(NamedTuple):
    """The result of training."""

    losses: Tensor
    """`[STEPS]`."""
    gradients: dict[str, Tensor]
    """Gradients of the first step."""


def load(path: Path, dtype: torch.dtype) -> DeltaRuleForCausalLM:
    return DeltaRuleForCausalLM.from_pretrained(path, dtype=dtype).to(device())


def replicated(path: Path, dtype: torch.dtype) -> nn.Module:
    return DistributedDataParallel(load(path, dtype))


def sharded(path: Path, dtype: torch.dtype) -> nn.Module:
    return fully_shard_model(load(path, dtype))


def sharing_tokens(distribute: Callable[[nn.Module], nn.Module], path: Path, dtype: torch.dtype) -> nn.Module:
    return distribute(deltazoo.context_parallel(load(path, dtype), all_processes()))


def all_processes() -> DeviceMesh:
    return init_device_mesh(device().type, (dist.get_world_size(),))


MODES = [
    Mode("DDP", replicated),
    Mode("FSDP2", sharded),
    Mode("FSDP2, bfloat16", sharded, dtype=torch.bfloat16),
    Mode("context parallel", partial(sharing_tokens, DistributedDataParallel), divides="tokens"),
    Mode("FSDP2 x context", partial(sharing_tokens, fully_shard_model), divides="tokens"),
]


def device() -> torch.device:
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return torch.device("cpu")


def train(model: nn.Module, batches: list[dict[str, Tensor]], average: bool) -> Run:
    """A few steps of AdamW, one per batch; `average` the losses over the processes."""
    model.train()
    names = {id(p): name.removeprefix("module.") for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(parameter_groups(getattr(model, "module", model), 0.01), lr=1e-3, foreach=False)
    losses, gradients = [], {}
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        if not gradients:
            gradients = {names[id(p)]: whole(p.grad) for p in model.parameters()}
        optimizer.step()
        losses.append(loss.detach().double())
    result = torch.stack(losses)
    if average:
        dist.all_reduce(result)
        result /= dist.get_world_size()
    return Run(result, gradients)


def whole(gradient: Tensor) -> Tensor:
    return (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).clone()


def distance(ours: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest value."""
    return ((ours - expected).abs().max() / expected.abs().max()).item()


def compare(mode: Mode, path: Path, batches: Tensor) -> tuple[Run, Run]:
    """Train alone, then together."""
    whole = [{"input_ids": ids, "labels": ids} for ids in batches]
    if mode.divides == "rows":
        rows = slice(dist.get_rank() * ROWS_PER_PROCESS, (dist.get_rank() + 1) * ROWS_PER_PROCESS)
        share = [{name: ids[rows] for name, ids in batch.items()} for batch in whole]
    else:
        share = [local_batch(batch, all_processes()) for batch in whole]
    alone = train(load(path, mode.dtype), whole, average=False)
    return alone, train(mode.distribute(path, mode.dtype), share, average=True)


def report(case: str, mode: Mode, alone: Run, together: Run) -> bool:
    """Print one line; whether the two agree."""
    loss = distance(together.losses, alone.losses)
    gradient = max(distance(together.gradients[name], expected) for name, expected in alone.gradients.items())
    # Sums are taken in another order. In bfloat16 the processes' gradients are rounded before they are added up; in
    # float32 the error of a long sum counts, and an optimizer that divides by the gradient's size.
    allowed = (2 if mode.dtype == torch.bfloat16 else 100) * torch.finfo(mode.dtype).eps
    if dist.get_rank() == 0:
        for who, run in (("alone", alone), ("together", together)):
            print(f"{case:16} {mode.name:16} {who:8} losses {' '.join(f'{x:.6f}' for x in run.losses)}")
        print(f"{case:16} {mode.name:16} losses off by {loss:.1e}, gradients by {gradient:.1e}", flush=True)
    return max(loss, gradient) < allowed


def main(arguments: argparse.Namespace) -> int:
    logging.disable_progress_bar()
    if device().type == "cuda":
        torch.cuda.set_device(device())
    dist.init_process_group("nccl" if device().type == "cuda" else "gloo")
    processes = dist.get_world_size()
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, device=device())
    agree = True
    for case in arguments.cases:
        options = {**SIZES, **CASES[case], "num_heads": 2}
        if "layer_types" in options:
            options |= {"num_attention_heads": 4, "num_key_value_heads": 2}
        path = Path(str(folder[0])) / case
        if dist.get_rank() == 0:
            torch.manual_seed(0)
            DeltaRuleForCausalLM(DeltaRuleConfig(**options)).save_pretrained(path)
        dist.barrier()
        shape = (STEPS, ROWS_PER_PROCESS * processes, ROW_LENGTH)
        batches = torch.randint(0, SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(0)).to(device())
        for mode in MODES:
            agree &= report(case, mode, *compare(mode, path, batches))
    dist.destroy_process_group()
    return int(not agree)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), help="which models; all")
    sys.exit(main(parser.parse_args()))
