"""Training speed of a whole model: the first step, tokens per second, peak memory, and where a step's time goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.model_results import ModelRow
from benchmarks.timing import Spread, clock_for
from deltazoo.layers import RMSNorm, SwiGLU

__all__ = [
    "AUTOCAST",
    "OUR_WAYS",
    "PARTS",
    "TRAINING_WAYS",
    "kept_rows",
    "kind_of_work",
    "profile_rows",
    "training_rows",
]

_NOTHING = {"liger": False, "fuse_linear_cross_entropy": False, "recompute": "none"}

OUR_WAYS: dict[str, dict[str, Any]] = {
    "no-options": _NOTHING,
    "plain": {**_NOTHING, "fused_kernels": False},
    "fused-loss": {"fuse_linear_cross_entropy": True},
    "fast": {"liger": True, "fuse_linear_cross_entropy": True},
    "fast-recompute": {"liger": True, "fuse_linear_cross_entropy": True, "recompute": "elementwise"},
    "recompute-elementwise": {"recompute": "elementwise"},
    "recompute-block": {"recompute": "block"},
}
"""Ways that are runtime options of our models, beside the default. no-options: as the default was before the loss was
fused, elementwise results were recomputed, and SwiGLU and norms had kernels; plain: no fusion at all; fast: Liger's
kernels."""

AUTOCAST = "autocast"
"""The dtype of rows with float32 weights under bfloat16 autocast, as `deltazoo train` runs."""

TRAINING_WAYS = ("eager", "compile", *OUR_WAYS)
"""compile: through `torch.compile`."""

PARTS = {
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "::mm", "::addmm", "::bmm", "::linear"),
    "delta rule": ("deltazoo", "chunkwise", "chunk_", "prepare", "invert", "scan", "chain_kernel", "delta", "kkt"),
    "softmax attention": ("attention", "flash", "fmha", "cudnn_generated", "dot_do_o", "convert_dq"),
    "optimizer": ("adam", "multi_tensor", "foreach", "lpnorm", "clip"),
    "loss": ("softmax", "nll_loss", "cross_entropy"),
    "convolution": ("conv", "addcmul"),
    "norms": ("norm",),
    "copies": ("memcpy", "memset", "copy_", "cat"),
}
"""Kinds of work by words in the names of kernels (on a CPU: of operators); the first match counts."""

_OTHER = "elementwise and other"
_SPAN = "Optimizer."  # the profiler also lists the optimizer's whole span, beside its kernels


def training_rows(
    build: Callable[[], Any], row: ModelRow, *, device: str, dtype: torch.dtype, steps: int
) -> Iterator[ModelRow]:
    """`first_step_s`, `train_tok_s` and on a GPU `train_peak_gib` for `row`'s way, batch and tokens."""
    step = _TrainingStep(build, row, device, dtype)
    yield row.about("first_step_s").measured(step.seconds())
    step.seconds()
    if step.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = Spread.of([step.seconds() for _ in range(steps)])
    tokens = row.batch * row.tokens
    # A slow step is a low speed: the percentiles are exchanged.
    speed = Spread(tokens / seconds.median, tokens / seconds.high, tokens / seconds.low, seconds.count)
    yield row.about("train_tok_s").measured(speed)
    if step.on_gpu:
        yield row.about("train_peak_gib").measured(torch.cuda.max_memory_allocated() / 2**30)


def profile_rows(build: Callable[[], Any], row: ModelRow, *, device: str, dtype: torch.dtype) -> Iterator[ModelRow]:
    """`profile_ms` of every kind of work in one training step after two to warm up."""
    step = _TrainingStep(build, row, device, dtype)
    for _ in range(2):
        step.seconds()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if step.on_gpu else [])]
    with profile(activities=activities) as recorded:
        step.seconds()
    spent: dict[str, float] = {}
    where = DeviceType.CUDA if step.on_gpu else DeviceType.CPU  # events of launches repeat the GPU's time
    for event in recorded.key_averages():
        if event.device_type != where or (step.on_gpu and event.key.startswith(_SPAN)):
            continue
        microseconds = event.self_device_time_total if step.on_gpu else event.self_cpu_time_total
        kind = kind_of_work(event.key)
        spent[kind] = spent.get(kind, 0.0) + microseconds / 1e3
    for kind, milliseconds in spent.items():
        yield row.about("profile_ms", part=kind).measured(milliseconds)


def kept_rows(build: Callable[[], Any], row: ModelRow, *, device: str, dtype: torch.dtype) -> Iterator[ModelRow]:
    """`kept_kib`: memory per token that a forward pass leaves allocated for the backward pass, logits included."""
    step = _TrainingStep(build, row, device, dtype)
    step.seconds()
    if step.on_gpu:
        before = torch.cuda.memory_allocated()
        loss = step.loss()
        kept = torch.cuda.memory_allocated() - before
    else:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            loss = step.loss()
        kept = sum(event.self_cpu_memory_usage for event in recorded.key_averages())
    loss.backward()  # keeps what the backward pass needs alive until here
    yield row.about("kept_kib").measured(kept / (row.batch * row.tokens) / 1024)


def kind_of_work(name: str) -> str:
    """Which of `PARTS` a kernel or operator belongs to, by its name."""
    lowered = name.lower()
    for kind, words in PARTS.items():
        if any(word in lowered for word in words):
            return kind
    return _OTHER


class _TrainingStep:
    """Forward, backward, clipping and a step of AdamW on random tokens."""

    def __init__(self, build: Callable[[], Any], row: ModelRow, device: str, dtype: torch.dtype) -> None:
        self.on_gpu = torch.device(device).type == "cuda"
        self.clock = clock_for(device)
        torch.manual_seed(0)
        with torch.device(device):
            self.model = build().to(dtype).train()
        if row.way == "no-options":
            for module in self.model.modules():
                if isinstance(module, SwiGLU) or type(module) is RMSNorm:
                    module.fused = False
        self.autocast = torch.autocast(torch.device(device).type, torch.bfloat16, enabled=row.dtype == AUTOCAST)
        self.forward = torch.compile(self.model) if row.way == "compile" else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        vocabulary = self.model.config.vocab_size
        self.ids = torch.randint(0, vocabulary, (row.batch, row.tokens), device=device)

    def seconds(self) -> float:
        """Run one step and wait for it."""
        began = self.clock()
        self.loss().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.on_gpu:
            torch.cuda.synchronize()
        return self.clock() - began

    def loss(self) -> torch.Tensor:
        """The forward pass."""
        with self.autocast:
            return self.forward(input_ids=self.ids, labels=self.ids, use_cache=False).loss
