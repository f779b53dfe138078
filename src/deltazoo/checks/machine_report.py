"""Speeds of layers on a GPU, and the page of `deltazoo check --report`: versions, verdicts and speeds in Markdown."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch
from torch.utils.benchmark import Timer

from deltazoo import __version__
from deltazoo.checks.kernel_check import Verdict
from deltazoo.layers import make_layer

RULES = ("linear_attention", "delta_net", "gated_deltanet", "kda", "gated_deltanet2")
SHAPES = ((8, 2048), (1, 16384))  # rows and tokens
_FORWARD = "with torch.no_grad(): layer(x)"
_TRAINING = "torch.autograd.grad(layer(x), [x, *layer.parameters()], torch.ones_like(x))"


class Speed(NamedTuple):
    """Median milliseconds of a layer of 16 heads of 128 in bfloat16, with projections and norms."""

    rule: str
    rows: int
    tokens: int
    forward: float
    training: float
    """Milliseconds of forward and backward pass."""


def speeds(
    device: str, shapes: Iterable[tuple[int, int]] = SHAPES, hidden_size: int = 2048, seconds: float = 0.3
) -> list[Speed]:
    """The speeds of a few rules, each measured for about `seconds`."""
    if device.startswith("cuda"):
        torch.cuda.set_device(torch.device(device).index or 0)  # Timer waits for the current device
    found = []
    for rows, tokens in shapes:
        x = torch.randn(rows, tokens, hidden_size, device=device, dtype=torch.bfloat16, requires_grad=True)
        for rule in RULES:
            layer = make_layer(rule, hidden_size, num_heads=hidden_size // 128, head_dim=128, expand_v=1)
            layer = layer.to(device, torch.bfloat16)

            names = {"torch": torch, "layer": layer, "x": x}
            times = [
                1e3 * Timer(statement, globals=names).blocked_autorange(min_run_time=seconds).median
                for statement in (_FORWARD, _TRAINING)
            ]
            found.append(Speed(rule, rows, tokens, *times))
    return found


def machine_report(backend: str, device: str, verdicts: Sequence[Verdict], measured: Sequence[Speed]) -> str:
    """The page in Markdown: versions, number of cases, every case that failed, and the speeds if there are any."""
    wrong = [verdict for verdict in verdicts if not verdict.passed]
    facts = {"deltazoo": __version__, "Python": platform.python_version(), "torch": torch.__version__}
    facts |= {name: _version(name) for name in ("triton", "transformers")}
    facts |= {"system": platform.platform(), "device": _device(device), "backend": backend}
    lines = ["## deltazoo check", "", *_table(("", ""), facts.items())]
    lines += ["", f"{len(verdicts) - len(wrong)} of {len(verdicts)} cases right."]
    if wrong:
        lines += ["", "```", *map(str, wrong), "```"]
    if measured:
        heads = ("layer in bfloat16", "rows x tokens", "forward, ms", "training, ms")
        rows = [(s.rule, f"{s.rows} x {s.tokens:,}", f"{s.forward:.2f}", f"{s.training:.2f}") for s in measured]
        lines += ["", *_table(heads, rows)]
    return "\n".join(lines) + "\n"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (headings, ["---"] * len(headings), *rows)]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _device(device: str) -> str:
    if not device.startswith("cuda"):
        return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    found = torch.cuda.get_device_properties(device)
    return (
        f"{found.name}, {found.total_memory / 2**30:.0f} GiB, sm_{found.major}{found.minor}, CUDA {torch.version.cuda}"
    )
