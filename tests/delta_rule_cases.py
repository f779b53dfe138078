"""Inputs of the delta rule, easy and hard, as named cases that give the same numbers on any device and in any dtype.

A test takes a list of cases and asks each for its tensors:

    @pytest.mark.parametrize("case", HARD_CASES, ids=str)
    def test_something(case):
        inputs = case.make(device="cuda", dtype=torch.bfloat16)
        output, final_state = delta_rule(**inputs.arguments())

q, k, v and erase_key are rounded to ``dtype``; beta, log_decay and the state stay float32 (float64 when ``dtype`` is
float64), as the operators want them. The numbers are drawn on the CPU in float64, so they do not depend on the device.
"""

from __future__ import annotations

import random
from dataclasses import MISSING, dataclass, field, fields, replace
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

INF = float("inf")
DIFFERENTIABLE = ("q", "k", "v", "beta", "log_decay", "initial_state", "erase_key")
TENSORS = (*DIFFERENTIABLE, "cu_seqlens", "d_output", "d_final_state")
PER_TOKEN = ("q", "log_decay", "d_output")
PER_MICRO_STEP = ("k", "v", "beta", "erase_key")


@dataclass(frozen=True)
class DeltaRuleInputs:
    """Arguments of ``delta_rule`` and the gradients that flow into its two results."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T * n, H, K] with n micro-steps per token
    v: Tensor  # [B, T * n, HV, V]
    beta: Tensor  # [B, T * n, HV]
    log_decay: Tensor | None  # [B, T, HV] or [B, T, HV, K]
    initial_state: Tensor | None  # [N, HV, K, V]
    cu_seqlens: Tensor | None  # [N + 1]
    d_output: Tensor = field(repr=False)  # [B, T, HV, V]
    d_final_state: Tensor = field(repr=False)  # [N, HV, K, V]
    erase_key: Tensor | None = None  # [B, T * n, H, K]
    erase_reads: str = "decayed"
    num_micro_steps: int = 1

    def arguments(self) -> dict[str, Any]:
        """By name, those with a default only where they differ from it, since not every function takes them."""
        plain = {f.name: f.default for f in fields(self) if f.default is not MISSING}
        given = {f.name: getattr(self, f.name) for f in fields(self) if not f.name.startswith("d_")}
        return {n: x for n, x in given.items() if isinstance(x, Tensor) or n not in plain or x != plain[n]}

    def leaves(self) -> dict[str, Tensor]:
        """The differentiable arguments that are present."""
        return {name: getattr(self, name) for name in DIFFERENTIABLE if getattr(self, name) is not None}

    def double(self) -> DeltaRuleInputs:
        """The same numbers, already rounded, in float64: what an exact answer is computed from."""
        tensors = {name: getattr(self, name) for name in TENSORS}
        return replace(
            self, **{n: t.double() if t is not None and t.is_floating_point() else t for n, t in tensors.items()}
        )

    def tokens(self, start: int, stop: int) -> DeltaRuleInputs:
        """The tokens ``start:stop`` of an unpacked batch, with no state before them."""
        if self.cu_seqlens is not None:
            raise ValueError("only an unpacked batch can be cut along time")
        n = self.num_micro_steps
        spans = dict.fromkeys(PER_TOKEN, slice(start, stop)) | dict.fromkeys(PER_MICRO_STEP, slice(start * n, stop * n))
        cut = {name: getattr(self, name)[:, span] for name, span in spans.items() if getattr(self, name) is not None}
        return replace(self, initial_state=None, **cut)

    def flat(self) -> DeltaRuleInputs:
        """Micro-steps as tokens of their own: decay at the first of each token, q and the output at the last."""
        n = self.num_micro_steps

        def spread(x: Tensor | None, at: int) -> Tensor | None:
            if x is None:
                return None
            out = x.new_zeros(x.shape[0], x.shape[1] * n, *x.shape[2:])
            out[:, at::n] = x
            return out

        cu_seqlens = None if self.cu_seqlens is None else self.cu_seqlens * n
        q, d_output = (spread(x, n - 1) for x in (self.q, self.d_output))
        changes = {"q": q, "log_decay": spread(self.log_decay, 0), "d_output": d_output, "cu_seqlens": cu_seqlens}
        return replace(self, num_micro_steps=1, **changes)


@dataclass(frozen=True)
class DeltaRuleCase:
    """One kind of input. ``str(case)`` is its name; two cases with one seed share their random numbers."""

    name: str
    B: int = 2
    T: int = 80
    H: int = 2
    groups: int = 1  # value heads per key head, HV / H
    K: int = 16
    V: int = 24
    decay: Literal["none", "scalar", "channel"] = "none"
    # A number g: every token decays by between g and g/2. "mixed": log-uniform from -1e-4 to -50, and some exact zeros.
    # "reset": mild, with -inf at the first token of the batch's last row and at one token in eight. "uneven": from
    # channel to channel between -1e-3 and -20, log-uniform, as channels of a trained model may.
    log_decay: float | Literal["mixed", "reset", "uneven"] = -0.1
    beta: float | Literal["uniform"] = "uniform"  # a constant, or uniform in [0, 2]
    keys: Literal["unit", "short", "long", "same", "alternating", "correlated", "zero", "some_zero"] = "unit"
    # The erase key: none of its own; a copy of k; b o k with b uniform in [0, 1]; a unit vector at 15 degrees from k,
    # at 90, or anywhere; -k; the key before; zero; zero at every third micro-step, else anywhere.
    erase: Literal[
        "tied", "equal", "gated", "near", "orthogonal", "free", "opposite", "previous", "zero", "some_zero"
    ] = "tied"
    erase_reads: Literal["decayed", "undecayed"] = "decayed"
    num_micro_steps: int = 1
    lengths: tuple[int, ...] | None = None  # packed sequences; then B = 1 and T is their sum
    initial_state: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.lengths is not None:
            object.__setattr__(self, "B", 1)
            object.__setattr__(self, "T", sum(self.lengths))

    def __str__(self) -> str:
        return self.name

    @property
    def HV(self) -> int:
        return self.H * self.groups

    @property
    def repeats_keys(self) -> bool:
        """Whether beta above 1 and keys close to each other make a chunk's triangular system ill-conditioned."""
        large_beta = self.beta == "uniform" or self.beta > 1
        return self.keys in ("same", "alternating", "correlated") and large_beta

    @property
    def num_sequences(self) -> int:
        return self.B if self.lengths is None else len(self.lengths)

    def make(self, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float64) -> DeltaRuleInputs:
        """Draws the tensors. q and k are unit vectors (before rounding) unless ``keys`` says otherwise."""
        generator = torch.Generator().manual_seed(self.seed)
        wide = torch.float64 if dtype == torch.float64 else torch.float32

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        def place(tensor: Tensor | None, to: torch.dtype) -> Tensor | None:
            return None if tensor is None else tensor.to(to).to(device)

        B, T, HV = self.B, self.T, self.HV
        S = T * self.num_micro_steps
        q = torch.nn.functional.normalize(normal(B, T, self.H, self.K), dim=-1)
        k = self._make_keys(normal)
        v = normal(B, S, HV, self.V)
        beta = torch.rand(B, S, HV, generator=generator, dtype=torch.float64) * 2
        if self.beta != "uniform":
            beta = torch.full_like(beta, self.beta)
        log_decay = self._make_log_decay(generator)
        state_shape = (self.num_sequences, HV, self.K, self.V)
        state = normal(*state_shape) if self.initial_state else None
        cu_seqlens = None
        if self.lengths is not None:
            cu_seqlens = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, device=device)
        d_output, d_final_state = normal(B, T, HV, self.V), normal(*state_shape)
        return DeltaRuleInputs(
            q=place(q, dtype),
            k=place(k, dtype),
            v=place(v, dtype),
            beta=place(beta, wide),
            log_decay=place(log_decay, wide),
            initial_state=place(state, wide),
            cu_seqlens=cu_seqlens,
            d_output=place(d_output, dtype),
            d_final_state=place(d_final_state, wide),
            erase_key=place(self._make_erase_key(k, normal, generator), dtype),
            erase_reads=self.erase_reads,
            num_micro_steps=self.num_micro_steps,
        )

    def _make_keys(self, normal: Any) -> Tensor:
        S = self.T * self.num_micro_steps
        k = torch.nn.functional.normalize(normal(self.B, S, self.H, self.K), dim=-1)
        if self.keys == "short":
            return k / 3
        if self.keys == "long":
            return k * 3
        if self.keys == "same":
            return k[:, :1].expand_as(k).clone()
        if self.keys == "alternating":
            return k[:, torch.arange(S) % 2]
        if self.keys == "correlated":  # cosine 0.9 with one common direction
            common = k[:, :1]
            own = torch.nn.functional.normalize(k - (k * common).sum(-1, keepdim=True) * common, dim=-1)
            return 0.9 * common + 0.19**0.5 * own
        if self.keys == "zero":
            return torch.zeros_like(k)
        if self.keys == "some_zero":
            k[:, ::3] = 0
        return k

    def _make_erase_key(self, k: Tensor, normal: Any, generator: torch.Generator) -> Tensor | None:
        if self.erase in ("equal", "opposite"):
            return k.clone() if self.erase == "equal" else -k
        if self.erase == "previous":
            return k.roll(1, dims=1)
        if self.erase in ("tied", "zero"):
            return None if self.erase == "tied" else torch.zeros_like(k)
        if self.erase == "gated":
            return k * torch.rand(k.shape, generator=generator, dtype=torch.float64)
        e = torch.nn.functional.normalize(normal(*k.shape), dim=-1)
        if self.erase in ("near", "orthogonal"):
            direction = torch.nn.functional.normalize(k, dim=-1)
            e = torch.nn.functional.normalize(e - (e * direction).sum(-1, keepdim=True) * direction, dim=-1)
            return e if self.erase == "orthogonal" else 0.966 * direction + 0.259 * e
        if self.erase == "some_zero":
            e[:, ::3] = 0
        return e

    def _make_log_decay(self, generator: torch.Generator) -> Tensor | None:
        if self.decay == "none":
            return None
        shape = (self.B, self.T, self.HV) + ((self.K,) if self.decay == "channel" else ())
        uniform = torch.rand(*shape, generator=generator, dtype=torch.float64)
        if self.log_decay == "mixed":
            g = -(10 ** (-4 + uniform * 5.7))
            g[uniform < 0.05] = 0
            return g
        if self.log_decay == "reset":
            g = -0.2 * uniform
            whole_token = torch.rand(*shape[:3], generator=generator, dtype=torch.float64) < 0.125
            g[whole_token] = -INF
            g[-1, 0] = -INF
            if self.decay == "channel":  # and single channels forgotten while their neighbours remember
                g[uniform < 0.02] = -INF
            return g
        if self.log_decay == "uneven":
            return -0.001 * 20_000 ** torch.linspace(0, 1, shape[-1], dtype=torch.float64) * (0.5 + uniform / 2)
        return self.log_decay * (0.5 + uniform / 2)


SHAPE_CASES = [
    DeltaRuleCase("one_token", T=1, decay="scalar", initial_state=True),
    DeltaRuleCase("one_token_fresh", T=1, B=1, H=1, K=1, V=1),
    DeltaRuleCase("t15", T=15, H=1, K=8, V=8),
    DeltaRuleCase("t63_channel", T=63, H=3, K=20, V=33, decay="channel"),
    DeltaRuleCase("t64_scalar", T=64, H=3, K=32, V=16, decay="scalar", initial_state=True),
    DeltaRuleCase("t65_grouped2", T=65, H=1, groups=2, K=16, V=48, decay="scalar"),
    DeltaRuleCase("t65_grouped4_channel", T=65, H=3, groups=4, K=12, V=7, decay="channel", initial_state=True),
    DeltaRuleCase("t200_wide_keys", T=200, B=1, H=3, K=40, V=24, initial_state=True),
    DeltaRuleCase("t257_channel_grouped2", T=257, B=1, H=1, groups=2, K=24, V=17, decay="channel", initial_state=True),
    DeltaRuleCase("t257_scalar", T=257, B=1, H=3, K=16, V=16, decay="scalar"),
]

DECAY_CASES = [
    DeltaRuleCase(f"{decay}_decay_{label}", T=130, decay=decay, log_decay=g, initial_state=True)
    for decay in ("scalar", "channel")
    for label, g in [
        ("zero", 0.0),
        ("1e-4", -1e-4),
        ("1", -1.0),
        ("2", -2.0),  # per channel and in bfloat16 what the forward and the backward pass take different products for
        ("5", -5.0),
        ("10", -10.0),
        ("20", -20.0),
        ("50", -50.0),
        ("mixed", "mixed"),
        ("reset", "reset"),
    ]
] + [
    DeltaRuleCase(
        "channel_decay_uneven", T=150, K=128, groups=2, decay="channel", log_decay="uneven", initial_state=True
    ),
    DeltaRuleCase("channel_decay_uneven_packed", lengths=(70, 1, 66), K=96, decay="channel", log_decay="uneven"),
]

KEY_CASES = [
    *(
        DeltaRuleCase(f"{keys}_keys_beta_{beta:g}", T=130, B=1, keys=keys, beta=beta, initial_state=True)
        for keys in ("same", "alternating", "correlated")
        for beta in (1.0, 1.5, 1.9, 1.98, 2.0)
    ),
    DeltaRuleCase("same_keys_beta_uniform_scalar", T=130, keys="same", decay="scalar", initial_state=True),
    DeltaRuleCase("same_keys_beta_2_channel", T=130, keys="same", beta=2.0, decay="channel", log_decay=-0.01),
    DeltaRuleCase("alternating_keys_beta_2_mixed", keys="alternating", beta=2.0, decay="channel", log_decay="mixed"),
    DeltaRuleCase("beta_0", T=70, beta=0.0, decay="scalar", initial_state=True),
    DeltaRuleCase("beta_0_fresh", T=70, beta=0.0),
    DeltaRuleCase("zero_keys", T=70, keys="zero", decay="channel", initial_state=True),
    DeltaRuleCase("some_zero_keys", T=70, keys="some_zero", decay="scalar", initial_state=True),
    DeltaRuleCase("short_keys_beta_9", T=130, keys="short", beta=9.0, initial_state=True),
]

PACKED_CASES = [
    DeltaRuleCase("packed", lengths=(17, 64, 3), decay="scalar", initial_state=True),
    DeltaRuleCase("packed_one_sequence", lengths=(65,), decay="channel"),
    DeltaRuleCase("packed_around_the_chunk", lengths=(63, 64, 65, 1), groups=2, decay="channel", initial_state=True),
    DeltaRuleCase("packed_empty_and_one_token", lengths=(0, 1, 0, 0, 70, 1, 1, 0), decay="scalar", initial_state=True),
    DeltaRuleCase("packed_empty_fresh", lengths=(0, 5, 0, 67), decay="channel"),
    DeltaRuleCase("packed_resets", lengths=(30, 1, 90), decay="channel", log_decay="reset", initial_state=True),
    DeltaRuleCase("packed_same_keys_beta_2", lengths=(66, 2, 70), keys="same", beta=2.0, initial_state=True),
    DeltaRuleCase("packed_many_single_tokens", lengths=(1,) * 40, decay="scalar", initial_state=True),
]

# States stay bounded here, so that every dtype can hold them.
ERASE_CASES = [
    *(
        DeltaRuleCase(f"erase_{decay}_{reads}", T=130, decay=decay, erase="free", erase_reads=reads, beta=0.5, **more)
        for decay, more in [
            ("none", {"K": 40}),
            ("scalar", {"groups": 2, "initial_state": True}),
            ("channel", {"initial_state": True}),
        ]
        for reads in ("decayed", "undecayed")
    ),
    *(
        DeltaRuleCase(
            f"erase_{decay}_{reads}_{g}",
            T=130,
            decay=decay,
            log_decay=g,
            erase="gated",
            erase_reads=reads,
            initial_state=True,
        )
        for decay in ("scalar", "channel")
        for reads in ("decayed", "undecayed")
        for g in (-60.0, "mixed", "reset")
    ),
    DeltaRuleCase("tied_undecayed_scalar", T=130, decay="scalar", erase_reads="undecayed", beta=1.0),
    DeltaRuleCase("tied_undecayed_channel", T=130, groups=2, decay="channel", erase_reads="undecayed", beta=1.0),
    DeltaRuleCase("erase_equal", T=130, decay="scalar", erase="equal", initial_state=True),
    DeltaRuleCase("erase_equal_same_keys_beta_2", T=130, keys="same", beta=2.0, erase="equal", initial_state=True),
    DeltaRuleCase("erase_gated_same_keys", T=130, keys="same", beta=1.0, erase="gated", initial_state=True),
    DeltaRuleCase("erase_near_same_keys", T=130, keys="same", beta=1.0, erase="near", decay="channel", log_decay=-0.4),
    DeltaRuleCase("erase_orthogonal", T=130, erase="orthogonal", beta=0.3, decay="scalar", log_decay=-0.2),
    DeltaRuleCase("erase_opposite", T=130, erase="opposite", beta=0.5, decay="channel", log_decay=-1.0),
    DeltaRuleCase("erase_zero", T=70, erase="zero", decay="channel", initial_state=True),
    DeltaRuleCase("erase_some_zero", T=70, erase="some_zero", beta=0.3, decay="scalar", initial_state=True),
    DeltaRuleCase("erase_zero_keys", T=70, keys="zero", erase="free", decay="scalar", initial_state=True),
    DeltaRuleCase("erase_long_keys", T=70, keys="long", erase="gated", beta=0.1, decay="scalar", initial_state=True),
    DeltaRuleCase("erase_one_token", T=1, decay="channel", erase="free", erase_reads="undecayed", initial_state=True),
    DeltaRuleCase("erase_t15", T=15, decay="scalar", erase="free", beta=0.5, erase_reads="undecayed"),
    DeltaRuleCase(
        "erase_packed", lengths=(0, 17, 64, 1, 65), decay="scalar", erase="gated", erase_reads="undecayed", groups=2
    ),
    DeltaRuleCase("erase_packed_channel", lengths=(63, 0, 70), decay="channel", erase="gated", initial_state=True),
]

# The state grows by orders of magnitude: for float64.
GROWING_CASES = [
    DeltaRuleCase(f"{name}_{decay}_{reads}", T=70, decay=decay, erase_reads=reads, initial_state=True, **more)
    for decay, reads in (("none", "decayed"), ("scalar", "undecayed"), ("channel", "decayed"), ("channel", "undecayed"))
    for name, more in [
        ("free", {"erase": "free"}),
        ("opposite", {"erase": "opposite"}),
        ("opposite_same_keys", {"erase": "opposite", "keys": "same", "beta": 0.3}),
        ("previous_of_two_keys", {"erase": "previous", "keys": "alternating", "beta": 1.0}),
        ("orthogonal_long", {"erase": "orthogonal", "keys": "long", "beta": 0.2}),
    ]
]

MICRO_STEP_CASES = [
    *(
        DeltaRuleCase(f"micro_{n}_{decay}", T=70, num_micro_steps=n, decay=decay, initial_state=True)
        for n in (2, 3, 4)
        for decay in ("none", "scalar", "channel")
    ),
    *(
        DeltaRuleCase(
            f"micro_{n}_erase_{decay}_{reads}",
            T=70,
            num_micro_steps=n,
            decay=decay,
            erase="gated",
            erase_reads=reads,
            initial_state=True,
        )
        for n, decay, reads in [
            (2, "none", "decayed"),
            (2, "scalar", "decayed"),
            (2, "scalar", "undecayed"),
            (3, "channel", "decayed"),
            (3, "channel", "undecayed"),
        ]
    ),
    DeltaRuleCase("micro_2_undecayed", T=70, num_micro_steps=2, decay="scalar", erase_reads="undecayed", beta=1.0),
    DeltaRuleCase("micro_2_one_token", T=1, num_micro_steps=2, decay="scalar", initial_state=True),
    DeltaRuleCase("micro_3_t15_grouped", T=15, num_micro_steps=3, groups=2, K=12, V=20, decay="channel"),
    DeltaRuleCase("micro_2_t32", T=32, num_micro_steps=2, decay="scalar", initial_state=True),
    DeltaRuleCase("micro_3_t21", T=21, num_micro_steps=3, decay="channel", initial_state=True),
    DeltaRuleCase("micro_3_t22", T=22, num_micro_steps=3, decay="scalar"),
    DeltaRuleCase("micro_64_t3", T=3, num_micro_steps=64, decay="scalar", initial_state=True),
    DeltaRuleCase("micro_2_same_keys_beta_2", T=70, num_micro_steps=2, keys="same", beta=2.0, initial_state=True),
    DeltaRuleCase(
        "micro_2_reset", T=70, num_micro_steps=2, decay="channel", log_decay="reset", erase="gated", initial_state=True
    ),
    DeltaRuleCase(
        "micro_2_reset_undecayed",
        num_micro_steps=2,
        decay="scalar",
        log_decay="reset",
        erase="gated",
        erase_reads="undecayed",
    ),
    DeltaRuleCase("micro_3_strong", num_micro_steps=3, decay="channel", log_decay=-60.0, initial_state=True),
    DeltaRuleCase("micro_2_packed", num_micro_steps=2, lengths=(0, 17, 32, 1, 33), decay="scalar", initial_state=True),
    DeltaRuleCase(
        "micro_3_packed",
        num_micro_steps=3,
        lengths=(21, 0, 22, 1),
        groups=2,
        decay="channel",
        erase="gated",
        erase_reads="undecayed",
        initial_state=True,
    ),
]

HARD_CASES = [*DECAY_CASES, *KEY_CASES, *PACKED_CASES]
ALL_CASES = [*SHAPE_CASES, *HARD_CASES]


def random_cases(count: int, seed: int) -> list[DeltaRuleCase]:
    """``count`` cases drawn from the product of shapes, keys, betas, decays and packings, the same ones each time."""
    rng = random.Random(seed)

    def draw(i: int) -> DeltaRuleCase:
        lengths = None
        if rng.random() < 0.4:
            lengths = tuple(rng.choice((0, 1, 2, 15, 63, 64, 65, 100)) for _ in range(rng.randint(1, 4)))
            lengths = lengths if sum(lengths) else (*lengths, 1)
        return DeltaRuleCase(
            f"random{seed}_{i}",
            B=rng.choice((1, 2)),
            T=rng.choice((1, 15, 63, 64, 65, 200, 257)),
            H=rng.choice((1, 3)),
            groups=rng.choice((1, 2, 4)),
            K=rng.choice((2, 5, 16, 33)),
            V=rng.choice((1, 8, 21, 40)),
            decay=rng.choice(("none", "scalar", "channel")),
            log_decay=rng.choice((0.0, -1e-4, -0.1, -1.0, -5.0, -50.0, "mixed", "reset")),
            beta=rng.choice(("uniform", "uniform", 0.0, 1.0, 2.0)),
            keys=rng.choice(("unit", "unit", "short", "same", "alternating", "correlated", "zero", "some_zero")),
            lengths=lengths,
            initial_state=rng.random() < 0.6,
            seed=1000 * seed + i,
        )

    return [draw(i) for i in range(count)]


def random_update_cases(count: int, seed: int) -> list[DeltaRuleCase]:
    """Those of ``random_cases`` with erase keys, reads before the decay and micro-steps drawn besides."""
    rng = random.Random(seed)
    kinds = ("tied", "equal", "gated", "near", "free", "zero", "some_zero")
    return [
        replace(
            case,
            name=f"update_{case.name}",
            T=min(case.T, 130) if case.lengths is None else case.T,
            erase=rng.choice(kinds),
            erase_reads=rng.choice(("decayed", "undecayed")),
            num_micro_steps=rng.choice((1, 1, 2, 3, 4)),
        )
        for case in random_cases(count, seed)
    ]
