"""Comparison of a backend's kernels with the chunk form in float64, on this machine.

Compilers have produced wrong code for kernels of this kind, without an error and only on some GPUs. Such code is wrong
by much more than rounding, so the bounds here are generous: a few rounding errors of the input type, and 0.05 if one
key repeats with a step size near 2, which amplifies rounding in any chunk form. Every case also runs twice and must
give the same bits, since a race between threads shows as different bits. Groups of cases run in processes of their own:
they compile side by side, and a kernel that breaks its process does not stop the others.

A few tokens can make up nearly all of a gradient: the last ones with a strong decay or a repeated key. If their terms
happen to cancel, the gradient is several times smaller than usual, and rounding the operands of products costs any
chunk form more than these bounds. A tensor beyond its bound may therefore err by twice the error of plain torch with
operands rounded to the input type, plus two roundings. This does not hold for step sizes above 1: there kernels keep
more than one 16-bit term, so plain torch with one is no measure.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import distributions
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from deltazoo import __version__
from deltazoo.ops import delta_rule, delta_rule_step
from deltazoo.ops.call import RuleCall
from deltazoo.ops.chunkwise import form

_TOLERANCE = {torch.bfloat16: 4 * 2**-8, torch.float16: 8 * 2**-11, torch.float32: 1e-4}
_HARD_TOLERANCE = 0.05
_REPORTED = ("triton", "transformers")
_COMMAND = ["-m", "deltazoo.checks.kernel_check"]
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _TOLERANCE}


@dataclass(frozen=True)
class Case:
    """A case: one call. `beta` None draws step sizes in (0, 1); `lengths` packs sequences into a row, in tokens.

    `erase` is the erase key: the key ("tied"), the key times a number in [0, 1] per channel ("gated"), any unit vector
    ("free") or one at right angles to the key ("orthogonal"), or the negative of the key ("opposite"). A `step` is a
    call of `delta_rule_step`, with T = 1, a state and no gradients.
    """

    decay: str
    K: int
    V: int
    dtype: str = "bfloat16"
    B: int = 2
    T: int = 150
    H: int = 2
    HV: int = 2
    keys: str = "random"
    beta: float | None = None
    mean_log_decay: float = -0.05
    lengths: tuple[int, ...] = ()
    initial_state: bool = False
    step: bool = False
    erase: str = "tied"
    erase_reads: str = "decayed"
    num_micro_steps: int = 1

    @property
    def tolerance(self) -> float:
        """Largest relative error, in the root-mean-square sense, that passes."""
        return _TOLERANCE[DTYPES[self.dtype]] if self.keys == "random" else _HARD_TOLERANCE

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `delta_rule` and `plain_torch` besides tensors."""
        return {"erase_reads": self.erase_reads, "num_micro_steps": self.num_micro_steps}

    @property
    def group(self) -> tuple[Any, ...]:
        """The key of the case's group, whose cases need mostly the same kernels."""
        return self.decay, self.K, self.V, self.dtype, self.erase != "tied", self.erase_reads, self.num_micro_steps

    def __str__(self) -> str:
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return " ".join(f"{name}={value}" for name, value in changed.items())


@dataclass(frozen=True)
class Verdict:
    """The worst tensor of a case, with its relative error against float64, or the error that was raised."""

    case: str
    tensor: str
    error: float
    tolerance: float
    message: str | None = None

    @property
    def passed(self) -> bool:
        """Whether the error is within its bound; False for NaN."""
        return self.message is None and self.error <= self.tolerance

    def __str__(self) -> str:
        found = self.message or f"{self.error:.1e} of {self.tolerance:.1e} in {self.tensor}"
        return f"{'ok  ' if self.passed else 'FAIL'} {found:<38} {self.case}"


def cases() -> list[Case]:
    """Cases of every decay, head size, dtype and launch that has kernels of its own, on easy and hard inputs."""
    found: list[Case] = []
    for decay in ("none", "scalar", "channel"):
        plain = Case(decay, 128, 128)
        found += [
            plain,
            replace(plain, B=8, H=16, HV=16, T=130),  # so many programs as fill a GPU
            replace(plain, B=1, T=4160),  # few heads, long: split sequences
            replace(plain, HV=4, initial_state=True),
            replace(plain, B=1, T=300, lengths=(70, 0, 1, 229), initial_state=True),
            replace(plain, T=1, initial_state=True),  # without a state the decay has no gradient to compare
            Case(decay, 64, 64),
            Case(decay, 64, 64, B=8, H=16, HV=16),
            Case(decay, 16, 24, T=80),
            Case(decay, 96, 33, T=100),
            Case(decay, 96, 97, T=100),
            Case(decay, 256, 512, T=100),
            Case(decay, 128, 128, dtype="float16"),
            Case(decay, 64, 64, dtype="float32"),
        ]
        step = replace(plain, T=1, initial_state=True, step=True)
        found += [step, replace(step, B=1, HV=8), replace(step, B=64, K=64, V=64), replace(step, K=96, V=33)]
        if decay != "none":
            found += [replace(plain, mean_log_decay=mean) for mean in (-1e-4, -5.0, -25.0)]
        hard = replace(plain, T=600, mean_log_decay=-1e-3)
        found += [
            replace(hard, keys=keys, beta=beta)
            for keys, beta in (("repeated", 1.5), ("repeated", 2.0), ("alternating", 1.9), ("correlated", 2.0))
        ]
        found += _update_cases(decay)
    return found


def _update_cases(decay: str) -> list[Case]:
    """Cases of separate erase keys, reads before the decay, and micro-steps, each alone and all together."""
    gated, two = Case(decay, 128, 128, erase="gated", initial_state=True), Case(decay, 128, 128, num_micro_steps=2)
    together = replace(gated, erase_reads="undecayed" if decay == "scalar" else "decayed", num_micro_steps=3, T=70)
    step = replace(together, erase_reads="decayed" if decay == "none" else "undecayed", T=1, step=True)
    found = [
        gated,
        replace(gated, B=8, H=16, HV=16, T=130),  # so many programs as fill a GPU
        replace(gated, B=1, T=4160),  # few heads, long: split sequences
        replace(gated, erase="free", beta=0.3),
        replace(gated, erase="orthogonal", beta=0.3),
        replace(gated, erase="opposite", beta=0.05),
        replace(gated, T=600, keys="repeated", beta=1.0, mean_log_decay=-1e-3),
        two,
        replace(two, B=8, H=16, HV=16, T=66),
        replace(two, B=1, T=2080),
        replace(two, T=300, keys="repeated", beta=2.0, mean_log_decay=-1e-3),
        together,
        replace(together, B=1, T=100, HV=4, lengths=(20, 0, 1, 79)),
        replace(together, K=64, V=64),
        replace(together, K=96, V=33),
        replace(together, K=256, V=512),
        replace(together, dtype="float16"),
        replace(together, K=64, V=64, dtype="float32"),
        replace(gated, T=1, step=True),
        replace(step, B=1, HV=8),
    ]
    if decay == "scalar":
        undecayed = replace(gated, erase_reads="undecayed")
        found += [replace(undecayed, mean_log_decay=mean) for mean in (-1e-4, -0.05, -5.0, -25.0)]
        found += [replace(undecayed, erase="tied"), replace(together, mean_log_decay=-5.0)]
    return found


def run_selfcheck(*, backend: str, device: str, jobs: int, selected: list[Case] | None = None) -> Iterator[Verdict]:
    """The verdicts on all cases, group by group.

    Args:
        jobs: processes at a time; 0 runs everything in this process.
        selected: cases in place of `cases()`.
    """
    groups: dict[tuple[Any, ...], list[Case]] = {}
    for case in cases() if selected is None else selected:
        groups.setdefault(case.group, []).append(case)
    if jobs == 0:
        yield from (judge(case, backend, device) for group in groups.values() for case in group)
        return
    with ThreadPoolExecutor(jobs) as pool:
        for batch in pool.map(lambda group: _in_own_process(group, backend, device), groups.values()):
            yield from batch


def judge(case: Case, backend: str, device: str) -> Verdict:
    """The verdict on one case; an exception is a failure with its message."""
    try:
        errors = check_case(case, backend, device)
        bounds = dict.fromkeys(errors, case.tolerance)
        # A step, and step sizes above 1, are not what plain torch with rounded operands is a measure of.
        has_measure = not case.step and (case.beta is None or case.beta <= 1)
        if has_measure and any(case.tolerance < error < float("inf") for error in errors.values()):
            bounds |= plain_bounds(case, device)
    except Exception as error:  # a broken kernel may raise anything
        return Verdict(str(case), "-", float("inf"), case.tolerance, f"{type(error).__name__}: {error}")
    worst = max(errors, key=lambda name: (errors[name] != errors[name], errors[name] / bounds[name]))
    return Verdict(str(case), worst, errors[worst], bounds[worst])


def check_case(case: Case, backend: str, device: str) -> dict[str, float]:
    """Relative errors of the output, the final state and every gradient against float64 on the same rounded inputs.

    `repeat` is 0 if a second run gave the same bits, else infinity.
    """
    inputs, cu_seqlens, *gradients = case_inputs(case, device)
    options: dict[str, Any] = {"step": True} if case.step else {"cu_seqlens": cu_seqlens}
    options |= case.options
    actual, again = (case_results(inputs, *gradients, backend=backend, **options) for _ in range(2))
    same = all(torch.equal(actual[name], again[name]) for name in actual)
    return {**_errors(actual, inputs, *gradients, **options), "repeat": 0.0 if same else float("inf")}


def plain_bounds(case: Case, device: str) -> dict[str, float]:
    """Bounds from the errors of plain torch with rounded operands, at least the tolerance of the case."""
    inputs, cu_seqlens, *gradients = case_inputs(case, device)
    options = {"cu_seqlens": cu_seqlens, **case.options}
    errors = _errors(plain_torch(inputs, *gradients, **options), inputs, *gradients, **options)
    rounding = torch.finfo(DTYPES[case.dtype]).eps / 2
    return {name: max(case.tolerance, 2 * error + 2 * rounding) for name, error in errors.items()}


def _errors(
    found: dict[str, Tensor], inputs: dict[str, Tensor | None], *gradients: Tensor, **options: Any
) -> dict[str, float]:
    exact_inputs = {name: None if tensor is None else tensor.double() for name, tensor in inputs.items()}
    exact = case_results(exact_inputs, *(x.double() for x in gradients), backend="chunkwise", **options)
    return {name: relative_error(found[name], exact[name]) for name in exact}


def case_inputs(case: Case, device: str) -> tuple[dict[str, Tensor | None], Tensor | None, Tensor, Tensor]:
    """Tensors of a case by name, `cu_seqlens`, and gradients of the output and of the final state."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = DTYPES[case.dtype]
    B, T, H, HV, K, V = case.B, case.T, case.H, case.HV, case.K, case.V
    S = T * case.num_micro_steps

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    keys = normal(B, S, H, K)
    if case.keys == "repeated":
        keys = keys[:, :1].expand(B, S, H, K)
    elif case.keys == "alternating":
        keys = keys[:, torch.arange(S, device=device) % 2]
    elif case.keys == "correlated":
        keys = 0.9**0.5 * keys[:, :1] + 0.1**0.5 * keys
    elif case.keys != "random":
        raise ValueError(f"unknown kind of keys {case.keys!r}, expected random, repeated, alternating or correlated")
    log_decay = None
    if case.decay != "none":
        size = (B, T, HV, K) if case.decay == "channel" else (B, T, HV)
        log_decay = 2 * case.mean_log_decay * torch.rand(size, generator=generator, device=device)
        if case.keys == "random" and T > 1:
            log_decay[:, T // 2] = -torch.inf  # everything before is forgotten
    beta = normal(B, S, HV).sigmoid() if case.beta is None else torch.full((B, S, HV), case.beta, device=device)
    N = len(case.lengths) or B
    cu_seqlens = torch.tensor([0, *case.lengths], device=device).cumsum(0) if case.lengths else None
    k = F.normalize(keys, dim=-1)
    inputs = {
        "q": F.normalize(normal(B, T, H, K), dim=-1).to(dtype),
        "k": k.to(dtype),
        "v": normal(B, S, HV, V).to(dtype),
        "beta": beta,
        "log_decay": log_decay,
        "initial_state": normal(N, HV, K, V) if case.initial_state else None,
        "erase_key": None if case.erase == "tied" else _erase_key(case.erase, k, generator).to(dtype),
    }
    return inputs, cu_seqlens, normal(B, T, HV, V).to(dtype), normal(N, HV, K, V)


def _erase_key(kind: str, k: Tensor, generator: torch.Generator) -> Tensor:
    if kind == "opposite":
        return -k
    if kind == "gated":
        return k * torch.rand(k.shape, generator=generator, device=k.device)
    e = torch.randn(k.shape, generator=generator, device=k.device)
    if kind == "orthogonal":
        e = e - (e * k).sum(-1, keepdim=True) * k
    elif kind != "free":
        raise ValueError(f"unknown kind of erase key {kind!r}, expected tied, gated, free, orthogonal or opposite")
    return F.normalize(e, dim=-1)


def case_results(
    inputs: dict[str, Tensor | None], d_output: Tensor, d_state: Tensor, *, step: bool = False, **options: Any
) -> dict[str, Tensor]:
    """Output, final state, and, except for a `step`, the gradient `d_<name>` of every input of one call.

    `options` are further arguments of `delta_rule` or `delta_rule_step`.
    """
    if step:
        arguments: Any = {"state" if name == "initial_state" else name: tensor for name, tensor in inputs.items()}
        with torch.no_grad():
            output, state = delta_rule_step(**arguments, **options)
        return {"output": output, "final_state": state}
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in inputs.items() if tensor is not None}
    output, state = delta_rule(**{**inputs, **leaves}, **options)  # type: ignore[arg-type]
    gradients = torch.autograd.grad([output, state], list(leaves.values()), [d_output.to(output.dtype), d_state])
    named = zip((f"d_{name}" for name in leaves), gradients, strict=True)
    return {"output": output.detach(), "final_state": state.detach(), **dict(named)}


def _in_own_process(group: list[Case], backend: str, device: str) -> list[Verdict]:
    done = subprocess.run(
        [sys.executable, *_COMMAND, backend, device],
        input=json.dumps([asdict(case) for case in group]),
        capture_output=True,
        text=True,
    )
    verdicts = [Verdict(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]
    lost = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    missing = [Verdict(str(case), "-", float("inf"), case.tolerance, lost) for case in group[len(verdicts) :]]
    return verdicts + missing


class RoundedProducts(TorchFunctionMode):
    """A mode in which matrix products round their operands to a dtype, as a matrix unit does, and accumulate wider."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (Tensor.__matmul__, Tensor.matmul, torch.matmul):
            args = tuple(x.to(self.dtype).to(x.dtype) for x in args)
        return function(*args, **(kwargs or {}))


def plain_torch(
    inputs: Mapping[str, Tensor | None],
    d_output: Tensor,
    d_state: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    erase_reads: str = "decayed",
    num_micro_steps: int = 1,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Output, final state and every gradient of the chunk form in torch, with the operands of its products rounded.

    Args:
        inputs: q, k, v, beta, and log_decay, initial_state and erase_key where given, see `delta_rule`.
        d_output, d_state: gradients of the output and of the final state.
        cu_seqlens, erase_reads, num_micro_steps: see `delta_rule`.
        dtype: dtype to which operands are rounded; that of k unless given.

    Returns:
        `output`, `final_state`, and `d_<name>` of every input.
    """
    # The functions below the registered operators are called, since inside those a function mode has no effect.
    every = ("q", "k", "v", "beta", "log_decay", "initial_state", "erase_key")
    q, k, *others = (inputs.get(name) for name in every)
    assert q is not None and k is not None
    options = q.shape[-1] ** -0.5, None, erase_reads == "undecayed", num_micro_steps
    call = RuleCall.of((q, k, *others), cu_seqlens, options)
    with torch.no_grad(), RoundedProducts(dtype or k.dtype):
        output, state, *kept = form.forward.launch(*call)
        gradients = form.backward.launch(*call, *kept, d_output.to(output.dtype), d_state)
    names = [f"d_{name}" for name in every if inputs.get(name) is not None]
    return {"output": output, "final_state": state, **dict(zip(names, gradients, strict=True))}


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Norm of the error over the norm of the exact tensor, in float64; the absolute error if that is zero."""
    exact = exact.double()
    return float((found.double() - exact).norm()) / (float(exact.norm()) or 1.0)


def machine_report(backend: str, device: str, verdicts: Sequence[Verdict]) -> str:
    """A page in Markdown: versions, number of cases, and every case that failed."""
    wrong = [verdict for verdict in verdicts if not verdict.passed]
    hardware = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    if device.startswith("cuda"):
        found = torch.cuda.get_device_properties(device)
        hardware = f"{found.name}, {found.total_memory / 2**30:.0f} GiB, sm_{found.major}{found.minor}"
        hardware += f", CUDA {torch.version.cuda}"
    installed = {package.name: package.version for package in distributions() if package.name in _REPORTED}
    facts = {"deltazoo": __version__, "Python": platform.python_version(), "torch": torch.__version__}
    facts |= {name: installed.get(name, "not installed") for name in _REPORTED}
    facts |= {"system": platform.platform(), "device": hardware, "backend": backend}
    lines = ["## deltazoo check", "", "|  |  |", "| --- | --- |", *(f"| {x} | {y} |" for x, y in facts.items())]
    lines += ["", f"{len(verdicts) - len(wrong)} of {len(verdicts)} cases right."]
    return "\n".join([*lines, *(["", "```", *map(str, wrong), "```"] if wrong else [])]) + "\n"


def main() -> None:
    """Judge the cases given as JSON on standard input; print one JSON line per verdict."""
    backend, device = sys.argv[1:]
    for content in json.load(sys.stdin):
        case = Case(**{**content, "lengths": tuple(content["lengths"])})
        print(json.dumps(asdict(judge(case, backend, device))), flush=True)


if __name__ == "__main__":
    main()
