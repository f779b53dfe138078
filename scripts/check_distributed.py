"""Whether a model trains the same on several processes as on one: losses and gradients under DDP and FSDP2.

    torchrun --nproc-per-node 2 scripts/check_distributed.py

Uses a GPU per process where there are enough, else the CPU. Every process computes the whole batch alone first, then
its share of it together with the others; one line per case says how far they lie apart, and the exit status is 1 if
that is more than rounding.
"""

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from deltazoo.models import DeltaRuleConfig, DeltaRuleForCausalLM

SIZES = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 2, "intermediate_size": 128}
HYBRID = {"layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 4}
CASES = {"gated_deltanet": {}, "kda": {"mixer": "kda"}, "efla": {"mixer": "efla"}, "hybrid": HYBRID}
# Of the largest value: sums are taken in another order.
TOLERANCE = 1e-4


def backward(model: nn.Module, ids: Tensor) -> Tensor:
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach()


def replicated(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def distance(ours: Tensor, expected: Tensor) -> float:
    return ((ours - expected).abs().max() / expected.abs().max()).item()


def compare(distribute, alone: nn.Module, ids: Tensor) -> tuple[float, float]:
    """Largest relative distance of the loss and of any gradient from those of one process."""
    alone, model = copy.deepcopy(alone), distribute(copy.deepcopy(alone))
    expected = backward(alone, ids)
    loss = backward(model, ids.chunk(dist.get_world_size())[dist.get_rank()])
    dist.all_reduce(loss)
    gradients = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
    whole = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in gradients.items()}
    worst = max(distance(whole[name], p.grad) for name, p in alone.named_parameters())
    return distance(loss / dist.get_world_size(), expected), worst


def main() -> int:
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", dist.get_rank()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    failed = False
    for case, options in CASES.items():
        torch.manual_seed(0)
        model = DeltaRuleForCausalLM(DeltaRuleConfig(**SIZES, **options)).to(device).train()
        ids = torch.randint(0, 97, (2 * dist.get_world_size(), 48), device=device)
        for name, distribute in {"DDP": replicated, "FSDP2": sharded}.items():
            loss, gradient = compare(distribute, model, ids)
            failed |= not max(loss, gradient) < TOLERANCE
            if dist.get_rank() == 0:
                print(f"{case:16} {name:6} loss off by {loss:.1e}, gradients by {gradient:.1e}", flush=True)
    dist.destroy_process_group()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
