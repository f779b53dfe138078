"""Sizes, operators and random inputs of the timed calls; norms and gates that a layer computes before are not timed."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, order=True)
class Shape:
    """`B` sequences of `T` tokens, `H` heads, keys of `K` and values of `V` channels.

    `groups` value heads share a query and key head; written `BxTxH/HVxKxV` if there are several.
    """

    B: int
    T: int
    H: int
    K: int
    V: int
    groups: int = 1

    def __str__(self) -> str:
        heads = str(self.H) if self.groups == 1 else f"{self.H}/{self.HV}"
        return f"{self.B}x{self.T}x{heads}x{self.K}x{self.V}"

    @property
    def HV(self) -> int:
        """Value heads."""
        return self.H * self.groups

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Reads `BxTxHxKxV` or `BxTxH/HVxKxV`; ValueError for anything else."""
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*(/[1-9]\d*)?(x[1-9]\d*){2}", text):
            raise ValueError(
                "a shape reads BxTxHxKxV with positive integers, such as 8x4096x16x128x128, or BxTxH/HVxKxV with HV "
                f"value heads; got {text!r}"
            )
        B, T, heads, K, V = text.split("x")
        H, _, value_heads = heads.partition("/")
        groups, rest = divmod(int(value_heads or H), int(H))
        if rest or not groups:
            raise ValueError(f"value heads are a multiple of key heads, got {heads} in {text!r}")
        return cls(int(B), int(T), int(H), int(K), int(V), groups)


TABLE = {
    "train": Shape(8, 4096, 16, 128, 128),
    "long": Shape(1, 32768, 16, 128, 128),
    "small": Shape(4, 2048, 8, 128, 128),
    "narrow": Shape(8, 4096, 32, 64, 64),
    "wide": Shape(4, 4096, 6, 256, 512),
    "grouped": Shape(8, 4096, 4, 128, 128, groups=4),
}
SWEEP = [Shape(1, T, 16, 128, 128) for T in (512 * 2**i for i in range(9))]


NAMED = {**{name: [shape] for name, shape in TABLE.items()}, "table": list(TABLE.values()), "sweep": SWEEP}


def shapes_named(names: list[str]) -> list[Shape]:
    """Shapes of names in `NAMED` and of `BxTxHxKxV`, each once."""
    return list(dict.fromkeys(shape for name in names for shape in NAMED.get(name) or [Shape.parse(name)]))


@dataclass(frozen=True)
class Operator:
    """The inputs of an operator.

    `gated`: the erase key is k times a gate and the value v times another, both multiplied by the operator.
    """

    decay: str = "none"  # or scalar, channel, or fixed: one per head that needs no gradient
    corrects: bool = True  # with step sizes
    erase_key: bool = False
    undecayed: bool = False
    num_micro_steps: int = 1
    gated: bool = False


OPERATORS = {
    "delta": Operator(),
    "gdn": Operator("scalar"),
    "kda": Operator("channel"),
    "gdn-erase": Operator("scalar", erase_key=True),
    "kda-erase": Operator("channel", erase_key=True),
    "comba": Operator("scalar", erase_key=True, undecayed=True),
    "gdn2": Operator("channel", gated=True),
    **{f"delta-n{n}": Operator(num_micro_steps=n) for n in (2, 4)},
    **{f"gdn-n{n}": Operator("scalar", num_micro_steps=n) for n in (2, 4)},
    **{f"kda-n{n}": Operator("channel", num_micro_steps=n) for n in (2, 4)},
    "gla": Operator("channel", corrects=False),
    "lightning": Operator("fixed", corrects=False),
}
"""All operators but softmax. `-erase`: a separate erase key. `-n2`, `-n4`: micro-steps per token (Gated DeltaProduct,
EDA). comba: its erase reads before the decay. gdn2: Gated DeltaNet-2. gla and lightning: linear attention."""

GATES = {"weak": -1e-3, "medium": -0.05, "strong": -1.0}
"""Mean log-decay per token. Each gate is uniform between 0 and twice its mean, so strong stays above -2."""

UNEVEN = (-1e-3, -5.0)
"""Of `uneven` gates: means from the first to the second, evenly in their logarithm, from channel to channel or from
head to head. Trained models have such gates: a few channels forget within tokens, and most remember."""

GATE_KINDS = (*GATES, "uneven")


def gates_of(op: str) -> list[str]:
    """The gate strengths an operator can be timed with: `none` where there is no gate."""
    return list(GATE_KINDS) if op in OPERATORS and OPERATORS[op].decay in ("scalar", "channel") else ["none"]


@dataclass(frozen=True)
class Inputs:
    """Arguments of one call and the gradient of its output; see `delta_rule` for the shapes.

    `erase_gate` `[B, T, H, K]` and `write_gate` `[B, T, H, V]` are those of Gated DeltaNet-2.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    log_decay: Tensor | None
    d_output: Tensor
    erase_key: Tensor | None = None
    erase_gate: Tensor | None = None
    write_gate: Tensor | None = None

    def leaves(self, op: str) -> list[Tensor]:
        """The tensors that need a gradient."""
        if op == "softmax":
            return [self.q, self.k, self.v]
        others = (self.beta, self.log_decay, self.erase_key, self.erase_gate, self.write_gate)
        return [self.q, self.k, self.v, *(x for x in others if x is not None and x.requires_grad)]


def gate_means(gates: str, count: int) -> Tensor:
    """Mean log-decays `[count]` per token of neighbouring channels or heads."""
    if gates in GATES:
        return torch.full((count,), GATES[gates])
    first, last = (math.log(-mean) for mean in UNEVEN)
    return -torch.linspace(first, last, count).exp()


def make_inputs(shape: Shape, op: str, gates: str, *, device: str, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """Unit-length q and k, normal v, float32 beta = sigmoid(normal) and float32 gates of the wanted strength.

    An erase key is the key times numbers uniform in [0, 1]; the gates of Gated DeltaNet-2 are such numbers.
    """
    B, T, H, HV, K, V = shape.B, shape.T, shape.H, shape.HV, shape.K, shape.V
    operator = OPERATORS.get(op, Operator())
    S = T * operator.num_micro_steps
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    def uniform(*size: int) -> Tensor:
        return torch.rand(size, generator=generator, device=device)

    def unit_rows(rows: int) -> Tensor:
        return F.normalize(normal(B, rows, H, K), dim=-1).to(dtype).requires_grad_()

    log_decay = None
    if gates != "none":
        size = (B, T, HV, K) if operator.decay == "channel" else (B, T, HV)
        log_decay = (2 * gate_means(gates, size[-1]).to(device) * uniform(*size)).requires_grad_()
    elif operator.decay == "fixed":
        log_decay = (-8 / HV * torch.arange(HV, device=device)).expand(B, T, HV).contiguous()
    inputs = Inputs(
        q=unit_rows(T),
        k=unit_rows(S),
        v=normal(B, S, HV, V).to(dtype).requires_grad_(),
        beta=normal(B, S, HV).sigmoid().requires_grad_(),
        log_decay=log_decay,
        d_output=normal(B, T, HV, V).to(dtype),
    )
    if not operator.corrects:
        return replace(inputs, beta=None)
    if operator.erase_key:
        return replace(inputs, erase_key=(inputs.k.detach() * uniform(B, S, H, K)).to(dtype).requires_grad_())
    if operator.gated:
        b, w = (uniform(B, T, H, size).to(dtype).requires_grad_() for size in (K, V))
        return replace(inputs, beta=torch.ones(B, T, H, device=device), erase_gate=b, write_gate=w)
    return inputs
