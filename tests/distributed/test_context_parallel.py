"""Sequences that several ranks share: the same bits at any degree, models equal to one rank, errors on every rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from several_processes import run_script

from deltazoo.runtime import RECOMPUTE_LEVELS

pytestmark = pytest.mark.processes

WORKER = Path(__file__).with_name("context_worker.py")

DEAD_RANK = """
import os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from deltazoo.ops import ContextParallel, delta_rule

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
x, beta = torch.randn(1, 64, 2, 8), torch.rand(1, 64, 2)
context = ContextParallel(dist.group.WORLD)
delta_rule(x, x, x, beta, context=context)
if dist.get_rank() == 1:
    os._exit(0)
try:
    delta_rule(x, x, x, beta, context=context)
except RuntimeError:
    print("ended with an error", flush=True)
os._exit(0)
"""

DEAD_GPU = """
import os, sys, threading, traceback
from datetime import timedelta
import torch
import torch.distributed as dist
from deltazoo.ops import ContextParallel, delta_rule

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=20))
x = torch.randn(1, 256, 2, 128, device=device, dtype=torch.bfloat16)
beta = torch.rand(1, 256, 2, device=device)
context = ContextParallel(dist.group.WORLD)

def call():
    delta_rule(x, x, x, beta, context=context)
    torch.cuda.synchronize()

call()
dist.barrier()
torch.cuda.synchronize()
if dist.get_rank() == 1:
    os._exit(0)

def give_up():
    print("hangs", flush=True)
    os._exit(0)

watch = threading.Timer(150, give_up)
watch.daemon = True
watch.start()
try:
    call()
except Exception:
    traceback.print_exc()
    os._exit(1)
print("went on", flush=True)
os._exit(0)
"""

COMPILED = """
import torch
import torch.distributed as dist
from deltazoo.ops import ContextParallel, delta_rule
from one_thread_gloo import ONE_THREAD_GLOO

dist.init_process_group(ONE_THREAD_GLOO)
context = ContextParallel(dist.group.WORLD, lengths=(128, 192), segment_length=64)
tokens = context.lengths[dist.get_rank()]
inputs = [torch.randn(1, tokens, 2, 8).div_(4).requires_grad_() for _ in range(3)]
beta = torch.rand(1, tokens, 2)

def rule(q, k, v):
    return delta_rule(q, k, v, beta, -beta, context=context).output

expected = rule(*inputs)
gradients = torch.autograd.grad(expected.cos().sum(), inputs)
output = torch.compile(rule, fullgraph=True, backend="aot_eager")(*inputs)
assert torch.equal(output, expected)
for compiled, eager in zip(torch.autograd.grad(output.cos().sum(), inputs), gradients, strict=True):
    assert torch.equal(compiled, eager)
dist.destroy_process_group()  # its threads can abort the process at exit
"""


COMPILING = 900
"""Seconds in which every rank compiles the kernels of every case of the worker, on a machine that does more."""


def launched(count: int, *command: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    return subprocess.run([*torchrun, *command], capture_output=True, text=True, timeout=timeout, check=False)


def found_by(folder: Path, count: int, check: str, timeout: float = 300) -> dict[str, Any]:
    """What the worker finds in so many processes."""
    done = launched(count, str(WORKER), str(folder), check, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "results.json").read_text())[check.partition(":")[0]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What four processes found, by check and case."""
    folder = tmp_path_factory.mktemp("context")
    checks = ("operators", "rounding", "attention", "models", "recomputation", "prefill", "errors")
    run_script(4, WORKER, str(folder), *checks)
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize(
    ("check", "cases"),
    [
        ("operators", 42),  # equal bits of outputs, final states and all gradients, for pieces of uneven lengths
        ("rounding", 28),  # with a context as without one
        ("attention", 8),  # three ranks share two heads of keys, and one of them has two tokens
        ("models", 22),  # a piece of two tokens is shorter than the convolution reaches back
    ],
)
def test_ranks_compute_what_one_computes(check: str, cases: int, results: dict[str, dict[str, Any]]) -> None:
    assert len(results[check]) == cases
    assert {case: wrong for case, wrong in results[check].items() if wrong} == {}


def test_recomputation_exchanges_nothing_again(results: dict[str, dict[str, Any]]) -> None:
    counts = results["recomputation"]
    assert set(counts) == set(RECOMPUTE_LEVELS) and len(set(counts.values())) == 1 and counts["none"] > 0


def test_a_prompt_that_ranks_share_fills_a_cache_on_each(results: dict[str, dict[str, Any]]) -> None:
    assert len(results["prefill"]) == 12
    for case, (same_tokens, again) in results["prefill"].items():
        assert same_tokens, case
        assert "fill an empty cache" in again, case


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("boundaries", "cu_seqlens must end at the number of tokens, 128, got 100"),
        ("other boundaries", "must be called alike"),
        ("empty piece", "every rank needs at least one token of the sequence, got pieces of [0, 64] tokens"),
        ("shapes", "must be called alike"),
        ("dtypes", "must be called alike"),
        ("rules", "must be called alike"),
        ("one rank's error", "unknown precision 'high'"),
        ("no step size on one rank", "beta must be a tensor, got None"),
        ("another read on one rank", "unknown erase_reads 'later'"),
        ("packed rows", "packed sequences (cu_seqlens) need batch size 1, got 2"),
        ("documents in the mask", "attention_mask must hold only 0 and 1, got values from 1 to 2"),
        ("mask on one rank", "rows that several ranks share take no attention_mask"),
    ],
)
def test_every_rank_raises(case: str, expected: str, results: dict[str, dict[str, Any]]) -> None:
    messages = results["errors"][case]
    assert len(messages) == 2 and all(expected in message for message in messages), messages


def test_a_rank_that_dies_ends_the_others() -> None:
    done = launched(2, "--no-python", sys.executable, "-c", DEAD_RANK, timeout=120)
    assert "ended with an error" in done.stdout, done.stdout + done.stderr


def test_compiled_code_exchanges_too(tmp_path: Path) -> None:
    (tmp_path / "compiled.py").write_text(COMPILED)
    run_script(2, tmp_path / "compiled.py")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_gpus_give_the_bits_of_one(tmp_path: Path) -> None:
    """As on CPUs, of two, three and four as far as there are so many: a context of one rank takes the same kernels."""
    count = min(torch.cuda.device_count(), 4)
    found = found_by(tmp_path, count, "operators", COMPILING)
    assert len(found) == 16 * (count - 1)
    assert {case: names for case, names in found.items() if names} == {}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_softmax_layers_of_two_gpus_attend_to_the_whole_row(tmp_path: Path) -> None:
    """By kernels that CPUs do not have."""
    found = found_by(tmp_path, 2, "attention")
    assert len(found) == 4
    assert {case: wrong for case, wrong in found.items() if wrong} == {}


@pytest.mark.gpu
@pytest.mark.parametrize("quarter", range(4))
def test_a_gpu_computes_with_a_context_what_it_computes_without_one(tmp_path: Path, quarter: int) -> None:
    """Without a context it takes other kernels, fused ones among them, and the bits are others."""
    found = found_by(tmp_path, 1, f"rounding:{quarter}:4", COMPILING)
    assert len(found) == 8
    assert {case: missed for case, missed in found.items() if missed} == {}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_a_gpu_that_dies_ends_the_others() -> None:
    """NCCL raises nothing in Python: its watchdog ends the process some time after the limit of the exchange."""
    done = launched(2, "--no-python", sys.executable, "-c", DEAD_GPU, timeout=240)
    assert done.returncode != 0 and "hangs" not in done.stdout and "went on" not in done.stdout, (
        done.stdout + done.stderr
    )
