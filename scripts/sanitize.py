"""Run the kernels under compute-sanitizer: memcheck and racecheck over a small grid of shapes, one line each.

`python scripts/sanitize.py --out sanitize.json`. Every shape runs forward and backward once without the sanitizer, so
that nothing is compiled under it, then once per tool. torch's allocator caches nothing meanwhile: each tensor is an
allocation of its own, and an access past its end is seen. Exit status 1 if any tool complains, 2 if it is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

TOOLS = ("memcheck", "racecheck")
COMPLAINT = 9
"""Exit status that compute-sanitizer is asked to use."""


@dataclass(frozen=True)
class Call:
    """One call of `delta_rule`; `lengths` packs sequences into one row, only a `recorded` call has a backward pass."""

    decay: str
    K: int = 128
    V: int = 128
    T: int = 150
    HV: int = 2
    dtype: str = "bfloat16"
    precision: str | None = None
    lengths: tuple[int, ...] = ()
    B: int = 1
    recorded: bool = True

    def __str__(self) -> str:
        packed = f" packed {self.lengths}" if self.lengths else f" T{self.T}"
        more = ("" if self.B == 1 else f" B{self.B}") + ("" if self.recorded else " forward")
        return f"{self.decay} {self.K}x{self.V}{packed} HV{self.HV} {self.dtype} {self.precision or ''}".strip() + more

    def run(self) -> None:
        """Forward and backward with an initial state, two key heads."""
        from deltazoo.ops import delta_rule

        T = sum(self.lengths) or self.T
        dtype = getattr(torch, self.dtype)

        def normal(*size: int, of: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.randn(size, device="cuda").to(of).requires_grad_(self.recorded)

        q, k = (torch.nn.functional.normalize(normal(self.B, T, 2, self.K), dim=-1).to(dtype) for _ in range(2))
        v, beta = normal(self.B, T, self.HV, self.V, of=dtype), normal(self.B, T, self.HV).sigmoid()
        gate = {"none": None, "scalar": (self.B, T, self.HV), "channel": (self.B, T, self.HV, self.K)}[self.decay]
        log_decay = None if gate is None else -0.1 * normal(*gate).abs()
        state = normal(len(self.lengths) or self.B, self.HV, self.K, self.V)
        bounds = torch.tensor([0, *self.lengths], device="cuda").cumsum(0) if self.lengths else None
        output, final = delta_rule(
            q, k, v, beta, log_decay, initial_state=state, cu_seqlens=bounds, backend="triton", precision=self.precision
        )
        if self.recorded:
            (output.float().sum() + final.sum()).backward()
        torch.cuda.synchronize()


CALLS = (
    *(Call(decay) for decay in ("none", "scalar", "channel")),
    *(Call(decay, precision="strict") for decay in ("none", "channel")),
    *(Call(decay, 96, 97, T=70, HV=4) for decay in ("scalar", "channel")),
    Call("scalar", 20, 33, lengths=(70, 0, 1, 20)),
    Call("channel", lengths=(70, 0, 1, 20)),
    Call("none", 64, 64, T=4160),
    Call("scalar", 256, 256, T=70),
    *(Call(decay, 64, 64, T=70, dtype="float32") for decay in ("scalar", "channel")),
    Call("channel", dtype="float16"),
    *(Call(decay, B=40, recorded=False) for decay in ("none", "scalar", "channel")),  # heads that fill a large GPU
    Call("scalar", B=40, precision="fast"),
)


def check(index: int, sanitizer: str, timeout: float) -> dict[str, object]:
    """The verdict of every tool on one call: `clean`, or the last lines it printed."""
    command = [sys.executable, __file__, "--one", str(index)]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    verdicts: dict[str, object] = asdict(CALLS[index])
    for tool in ("none", *TOOLS):
        prefix = [] if tool == "none" else [sanitizer, "--tool", tool, "--error-exitcode", str(COMPLAINT)]
        try:
            done = subprocess.run(
                [*prefix, *command], env=environment, capture_output=True, text=True, timeout=timeout, check=False
            )
            last_lines = "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])
            verdicts[tool] = "clean" if done.returncode == 0 else f"exit status {done.returncode}\n{last_lines}"
        except subprocess.TimeoutExpired:
            verdicts[tool] = f"not finished in {timeout:.0f} s"
    first = {tool: str(verdicts[tool]).splitlines()[0] for tool in ("none", *TOOLS)}
    print(f"{CALLS[index]}: " + ", ".join(f"{tool} {text}" for tool, text in first.items()), flush=True)
    return verdicts


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file for the verdicts")
    parser.add_argument("--jobs", type=int, default=6, help="calls at a time")
    parser.add_argument("--timeout", type=float, default=150, help="seconds per call and tool")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        CALLS[arguments.one].run()
        return 0
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        print("compute-sanitizer is not on the PATH (it comes with the CUDA toolkit)", file=sys.stderr)
        return 2
    with ThreadPoolExecutor(arguments.jobs) as pool:
        verdicts = list(pool.map(lambda i: check(i, sanitizer, arguments.timeout), range(len(CALLS))))
    clean = all(verdict[tool] == "clean" for verdict in verdicts for tool in ("none", *TOOLS))
    if arguments.out is not None:
        about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        arguments.out.write_text(json.dumps({"about": about, "calls": verdicts}, indent=1) + "\n")
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
