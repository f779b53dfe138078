"""Run by test_tensor_parallel under torchrun: every process loads a share of each model and compares it with the whole.

    torchrun --nproc-per-node 2 tests/distributed/tensor_parallel_worker.py FOLDER CASE...

Writes FOLDER/results.json: how far the shares together lie from one process, by case.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1]))
from one_thread_gloo import ONE_THREAD_GLOO
from tiny_models import OPTIONS, VOCAB, tiny_model

from deltazoo.cli.options import load_rule_file
from deltazoo.distributed import clip_grad_norm_
from deltazoo.distributed.tensor_parallel import CallTogether
from deltazoo.layers import parameter_groups
from deltazoo.models import DeltaRuleForCausalLM

# float64, so that what remains is an error and not rounding; a vocabulary that two processes can share evenly.
DTYPE, EVEN_VOCABULARY = torch.float64, VOCAB + 1


def backward(model: nn.Module, ids: Tensor, batches: int) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a batch in that many backward passes, then of one row of packed documents."""
    model.zero_grad()
    losses = [model(part, labels=part, use_cache=False, num_items_in_batch=100).loss for part in ids.chunk(batches)]
    packed = model(ids.reshape(1, -1), cu_seqlens=torch.tensor([0, 7, 20, ids.numel()]), use_cache=False)
    losses.append(packed.logits.square().mean())
    for loss in losses:
        loss.backward()
    return float(sum(losses).detach()), {name: p.grad for name, p in model.named_parameters()}


def distance(ours: Tensor, whole: Tensor) -> float:
    """Largest difference over the largest value; `ours` may be this rank's part, a DTensor or all of it."""
    if hasattr(ours, "full_tensor"):
        ours = ours.full_tensor()
    scale = whole.abs().max()
    for axis, (part, size) in enumerate(zip(ours.shape, whole.shape, strict=True)):
        if part != size:
            whole = whole.chunk(dist.get_world_size(), axis)[dist.get_rank()]
    return float((ours - whole).abs().max() / scale)


def step(model: nn.Module, ids: Tensor, max_norm: float) -> float:
    """A step of fused AdamW on clipped gradients; their norm before."""
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-2, fused=True)
    model.zero_grad()
    model(ids, labels=ids, use_cache=False).loss.backward()
    norm = clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return float(norm)


def sums(model: nn.Module, ids: Tensor) -> tuple[float, float]:
    """Tensors that ranks sum per block, apart from those of the embeddings and the head: forward and backward."""
    blocks = len(model.model.layers)
    with patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as all_reduce:
        loss = model(ids, labels=ids, use_cache=False).loss
        forward = all_reduce.call_count
        loss.backward()
    return forward / blocks, (all_reduce.call_count - forward) / blocks


def shared_parameters(model: nn.Module) -> float:
    """Parameters of a mixer that all of its heads share, per block."""
    plain = [p for layer in model.model.layers for p in layer.attn.parameters() if not isinstance(p, DTensor)]
    return len(plain) / len(model.model.layers)


def parameters_here(model: nn.Module) -> int:
    """How many numbers of the blocks' matrices this process has."""
    return sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in model.model.layers.parameters() if p.ndim > 1)


def check(case: str, folder: Path) -> dict[str, float | bool]:
    """One case, on every rank."""
    whole = tiny_model(case, vocab_size=EVEN_VOCABULARY)
    for layer in whole.model.layers:
        if hasattr(layer.attn, "log_time"):  # of the outside rule: different in every head
            torch.nn.init.uniform_(layer.attn.log_time, -1, 1)
    if dist.get_rank() == 0:
        whole.save_pretrained(folder / case)
    dist.barrier()
    alone = DeltaRuleForCausalLM.from_pretrained(folder / case, dtype=DTYPE)
    shared = DeltaRuleForCausalLM.from_pretrained(folder / case, dtype=DTYPE, tp_plan="auto")
    ids = torch.randint(0, EVEN_VOCABULARY, (4, 10), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0

    result: dict[str, float | bool] = {"held by one": parameters_here(shared) / parameters_here(alone)}
    for batches in (1, 2):
        (loss, gradients), (whole_loss, expected) = backward(shared, ids, batches), backward(alone, ids, batches)
        result[f"loss, {batches}"] = abs(loss - whole_loss) / abs(whole_loss)
        for kind in (torch.float64, torch.float32):
            distances = [distance(gradients[name], g) for name, g in expected.items() if g.dtype == kind]
            result[f"{kind} gradients, {batches}"] = max(distances, default=0.0)
    has_parts = any(isinstance(p, DTensor) for p in shared.parameters())  # a plain part does not say of what it is one
    if has_parts:
        result["sums"] = sums(shared, ids) == (2, 2 + shared_parameters(shared))
        with patch.object(CallTogether, "_can", return_value=False):  # every part by its own style
            loss, gradients = backward(shared, ids, 1)
        (whole_loss, expected) = backward(alone, ids, 1)
        distances = [distance(gradients[name], g) for name, g in expected.items() if g.dtype == torch.float64]
        result["separately"] = max(abs(loss - whole_loss) / abs(whole_loss), *distances)
    with torch.no_grad():
        logits, expected_logits = (m.eval()(ids, attention_mask=mask).logits for m in (shared, alone))
        result["logits"] = distance(logits[mask.bool()], expected_logits[mask.bool()])
    decode = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    result["same tokens"] = torch.equal(shared.generate(ids, **decode), alone.generate(ids, **decode))
    shared.save_pretrained(folder / f"{case}_saved")
    dist.barrier()
    saved = DeltaRuleForCausalLM.from_pretrained(folder / f"{case}_saved", dtype=DTYPE).state_dict()
    result["saved whole"] = all(torch.equal(x, saved[name]) for name, x in alone.state_dict().items())
    if has_parts:
        norm, expected_norm = (step(m, ids, 0.1) for m in (shared, alone))
        assert expected_norm > 0.1
        result["norm"] = abs(norm - expected_norm) / expected_norm
        after = dict(alone.named_parameters())
        result["step"] = max(distance(p.detach(), after[name].detach()) for name, p in shared.named_parameters())
    return result


def main(folder: Path, cases: list[str]) -> None:
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    dist.init_process_group(ONE_THREAD_GLOO)
    load_rule_file(Path(__file__).parents[1] / "broken_rules" / "trapezoid.py")
    OPTIONS["outside"] = {"mixer": "trapezoid"}
    results = {case: check(case, folder) for case in cases}
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
