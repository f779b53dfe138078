"""The kernels of fused decoding steps against plain torch in float64: interpreted on a CPU, and compiled on a GPU.

The interpreter must be chosen before Triton is imported. So one child process, `python test_decoding_kernels.py FILE`,
computes every case, and the tests check its results. Triton's interpreter multiplies bfloat16 wrongly: half precision
is float16 there.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fresh_process import run_interpreted
from helpers import Missed
from torch import Tensor

pytest.importorskip("triton")

from deltazoo.generation.sampling import uniform_numbers  # noqa: E402
from deltazoo.layers.rule import EffectiveStep, bounded_step  # noqa: E402
from deltazoo.ops.decay import DECAY_GATES  # noqa: E402
from deltazoo.ops.decoding.between_products import HeadNorm, add_parts, norm_heads, swiglu_parts  # noqa: E402
from deltazoo.ops.decoding.convolution import Convolution, convolve_parts  # noqa: E402
from deltazoo.ops.decoding.greedy_token import greedy_token  # noqa: E402
from deltazoo.ops.decoding.gumbel_scores import gumbel_scores  # noqa: E402
from deltazoo.ops.decoding.low_rank_maps import LowRankGate, low_rank_gates  # noqa: E402
from deltazoo.ops.decoding.product import token_product  # noqa: E402
from deltazoo.ops.decoding.row_product import row_product  # noqa: E402
from deltazoo.ops.decoding.rule import token_rule  # noqa: E402
from deltazoo.ops.decoding.step_form import RuleShape  # noqa: E402
from deltazoo.spec import get_rule  # noqa: E402

Results = dict[str, Tensor]
WIDE = torch.float64
PER_CHANNEL = ("gated", "gated_query", "roots")
KEY_PARAMETERS = {"gated_query": ("p0",), "feedback": ("p0", "p1"), "unit_feedback": ("p0", "p1")}


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def rms(x: Tensor, eps: float = 1e-5) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


@dataclass
class Norm:
    weight: Tensor
    eps: float = 1e-5


@dataclass(frozen=True)
class Product:
    """A linear map of a few rows with what stands before and after it."""

    name: str
    R: int = 1
    N: int = 40
    K: int = 24
    before: str = ""  # "norm" of the row, or of "heads"
    after: str = ""  # "residual", "glu" or "convolution"
    taps: int = 4
    silu: bool = True
    bias: bool = False
    dtype: torch.dtype = torch.float32
    in_parts: bool = False  # as for several rows: a product in parts, with launches of their own around it

    def inputs(self, device: str) -> Results:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        N, K, channels = self.N, self.K, 3 * (self.N // 4)
        return {
            "x": draw(self.R, K, dtype=torch.float32 if self.before == "heads" else self.dtype),
            "weight": draw(2 * N if self.after == "glu" else N, K) / K**0.5,
            "norm_weight": draw(K),
            "squares": draw(self.R, K // 8, 3, dtype=torch.float32).abs(),
            "residual": draw(self.R, N),
            "row_weight": draw(N),
            "bias": draw(N),
            "taps": draw(channels, self.taps),
            "window": draw(self.R, channels, self.taps - 1),
        }

    def run(self, device: str) -> Results:
        x = self.inputs(device)
        if self.in_parts:
            return self._run_in_parts(x)
        options: dict[str, object] = {}
        if self.before == "norm":
            options = {"norm_weight": x["norm_weight"], "norm_eps": 1e-5}
        elif self.before == "heads":
            options = {"head_norm": HeadNorm(x["squares"], 8, 1e-5)}
        if self.after == "residual":
            options["residual"] = x["residual"]
        elif self.after == "glu":
            options["glu"] = True
        elif self.after == "convolution":
            options["convolution"] = Convolution(x["taps"].chunk(3), x["window"], self.silu)
            options["dtype"] = torch.float32
        if self.bias:
            options["bias"] = x["bias"]
        y = token_product(x["x"], x["weight"], **options)  # type: ignore[arg-type]
        return {"y": y, "window": x["window"]}

    def _run_in_parts(self, x: Results) -> Results:
        value = x["x"]
        if self.before == "norm":
            same, value = add_parts(None, value, Norm(x["norm_weight"]))
            assert same is x["x"]
        elif self.before == "heads":
            value = norm_heads(value, HeadNorm(x["squares"], 8, 1e-5), self.dtype)
        parts = row_product(value, x["weight"])
        y = parts.sum(0)
        if self.after == "residual":
            y, normed = add_parts(parts, x["residual"], Norm(x["row_weight"]))
            summed, same = add_parts(parts, x["residual"], None)
            assert same is summed and torch.equal(summed, y)
            return {"y": y, "normed": normed}
        if self.after == "glu":
            y = swiglu_parts(parts, self.dtype)
        elif self.after == "convolution":
            convolution = Convolution(x["taps"].chunk(3), x["window"], self.silu)
            y, _ = convolve_parts(parts, convolution, x["bias"] if self.bias else None)
        return {"y": y, "window": x["window"]}

    def plain(self, device: str, dtype: torch.dtype) -> Results:
        """By torch, every operation in `dtype`, from the same inputs."""
        x = {name: tensor.to(dtype) for name, tensor in self.inputs(device).items()}
        value, window = x["x"], x["window"]
        if self.before == "norm":
            value = rms(value) * x["norm_weight"]
        elif self.before == "heads":
            scale = torch.rsqrt(x["squares"].sum(-1) / 8 + 1e-5)
            value = (value.unflatten(1, (-1, 8)) * scale[..., None]).flatten(1)
        y = value @ x["weight"].T
        if self.bias:
            y = y + x["bias"]
        if self.after == "residual":
            y = y + x["residual"]
            return {"y": y, "normed": rms(y) * x["row_weight"], "window": window}
        elif self.after == "glu":
            gate, up = y.chunk(2, dim=1)
            y = F.silu(gate) * up
        elif self.after == "convolution":
            C = window.shape[1]
            history = torch.cat([window, y[:, :C, None]], dim=2)
            z = (history * x["taps"]).sum(-1)
            y = torch.cat([F.silu(z) if self.silu else z, y[:, C:]], dim=1)
            window = history[..., 1:]
        return {"y": y, "window": window}


@dataclass(frozen=True)
class Rule:
    """One token of a rule from the products before it."""

    name: str
    shape: RuleShape
    B: int = 2
    key_size: float = 1.0
    angles: int = 1
    """Rows of angles."""
    dtype: torch.dtype = torch.float32

    def inputs(self, device: str) -> Results:
        generator = torch.Generator().manual_seed(0)
        s = self.shape
        shapes = {
            "mixed": (self.B, sum(self.sizes.values())),
            "gates": (self.B, sum(self.low_rank_sizes)),
            "state": (self.B, s.HV, s.K, s.V),
            "A_log": (s.HV,),
            "dt_bias": (s.HV * s.K if s.decay == "channel" else s.HV,),
            "p0": (s.H,),
            "p1": (s.H,),
            "norm_weight": (s.V,),
            "angles": (self.angles, s.turned // 2),
        }
        drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        drawn["mixed"][:, s.H * s.K : 2 * s.H * s.K] *= self.key_size
        if s.decay_form == "fixed":
            drawn["A_log"] = -drawn["A_log"].abs()  # the log-decay itself
        return {name: x.to(device) for name, x in drawn.items()}

    @property
    def sizes(self) -> dict[str, int]:
        """Columns of `mixed`; of low rank, 3 or 5 that the rule does not read."""
        s, n = self.shape, self.shape.micro_steps
        per_channel = s.keys in PER_CHANNEL
        b = 0 if s.step == "none" else s.H * s.K if per_channel else n * s.HV
        further = {"query_share": s.H, "erase_first": s.HV}.get(s.keys, s.HV * s.V if per_channel else 0)
        gate = 0 if s.gate == "none" else 3 if s.low_rank_gate else s.HV * s.V
        a = 0 if s.decay_form == "fixed" else {"none": 0, "scalar": s.HV, "channel": 5}[s.decay]
        return {"q": s.H * s.K, "k": n * s.H * s.K, "v": n * s.HV * s.V, "g": gate, "a": a, "b": b, "keys": further}

    @property
    def low_rank_sizes(self) -> tuple[int, int, int]:
        """Columns of `gates`."""
        s = self.shape
        first_key = s.H * s.K * (s.keys == "erase_first")
        return s.HV * s.V * s.low_rank_gate, s.HV * s.K * (s.decay == "channel"), first_key

    def run(self, device: str) -> Results:
        x = self.inputs(device)
        first = dict(zip(self.sizes, itertools.accumulate(self.sizes.values(), initial=0), strict=False))
        shape = self.shape._replace(gate_at=first["g"], decay_at=first["a"], step_at=first["b"], keys_at=first["keys"])
        form = self.shape.decay_form if self.shape.decay != "none" else "none"
        A_log = x["A_log"] if form in ("softplus", "saturating", "fixed") else None
        dt_bias = x["dt_bias"] if form in ("softplus", "saturating") else None
        gates = x["gates"] if sum(self.low_rank_sizes) else None
        angles = torch.cat([x["angles"]] * 2, 1)
        z, squares = token_rule(
            x["mixed"], gates, x["state"], A_log, dt_bias, x["norm_weight"], shape,
            [x[name] for name in KEY_PARAMETERS.get(self.shape.keys, ())],
            angles=(angles.cos(), angles.sin()) if self.shape.turned else None,
        )  # fmt: skip
        return {"z": z, "squares": squares.sum(-1), "state": x["state"]}

    def log_decay(self, x: Results, a: Tensor) -> Tensor:
        """`[B, HV, K]`, or with ones in place of B and K."""
        s = self.shape
        if s.decay_form == "fixed":
            return x["A_log"][None, :, None]
        a = a.unflatten(1, (1, s.HV, s.K) if s.decay == "channel" else (1, s.HV))
        if s.decay_form == "log_sigmoid":
            result = F.logsigmoid(a) / 16
        else:
            result = DECAY_GATES[s.decay_form](a, x["A_log"], x["dt_bias"])
        return result[:, 0] if s.decay == "channel" else result[:, 0, :, None]

    def plain(self, device: str, dtype: torch.dtype) -> Results:
        s, x = self.shape, {name: tensor.to(dtype) for name, tensor in self.inputs(device).items()}
        raw_q, ks, vs, g, a, b, further = x["mixed"].split(list(self.sizes.values()), dim=1)
        low_rank_g, low_rank_a, first_key = x["gates"].split(self.low_rank_sizes, dim=1)
        g = low_rank_g if s.low_rank_gate else g
        state, group = x["state"], s.HV // s.H

        def per_head(y: Tensor, size: int) -> Tensor:
            return y.unflatten(1, (-1, size))

        def erase(state: Tensor, key: Tensor, value: Tensor, beta: Tensor, erase_key: Tensor) -> Tensor:
            """The state after one step; keys per key head."""
            key, erase_key = (y.repeat_interleave(group, dim=1) for y in (key, erase_key))
            u = beta[..., None] * (value - torch.einsum("bhkv,bhk->bhv", read, erase_key))
            return state + key[..., None] * u[..., None, :]

        decayed = state
        if s.decay != "none":
            decayed = state * self.log_decay(x, low_rank_a if s.decay == "channel" else a).exp()[..., None]
        read, state = state if s.undecayed else decayed, decayed
        if s.keys == "erase_first":
            key = unit(per_head(first_key, s.K))
            state = read = erase(state, key, torch.zeros_like(state[:, :, 0]), further.sigmoid(), key)
        for k, v, b_step in zip(*(y.chunk(s.micro_steps, dim=1) for y in (ks, vs, b)), strict=True):
            turned_q, turned_k = (self.turned(per_head(y, s.K), x["angles"]) for y in (raw_q, k))
            q, k, e, w = self.keys(turned_q, turned_k, b, further, x)
            v = per_head(v, s.V) * w
            if s.step == "none":
                state = state + k.repeat_interleave(group, dim=1)[..., None] * v[..., None, :]
                continue
            if s.keys in PER_CHANNEL:
                beta = torch.ones_like(v[..., 0])
            else:
                spec = replace(get_rule("delta_net"), step_size=s.step, normalize_k=s.normalize_k)
                gate = b_step.sigmoid()[:, None]
                beta = EffectiveStep(spec, allow_neg_eigval=s.doubled_step)(gate, k[:, None])[:, 0]
            if s.largest_gain:
                beta = bounded_step(beta[:, None], k[:, None], e[:, None], largest_gain=s.largest_gain)[:, 0]
            state = read = erase(state, k, v, beta, e)
        o = s.K**-0.5 * torch.einsum("bhkv,bhk->bhv", state, q.repeat_interleave(group, dim=1))
        z = o * x["norm_weight"]
        if s.gate != "none":
            g = per_head(g, s.V)
            z = z * (F.silu(g) if s.gate == "silu" else g.sigmoid())
        return {"z": z.flatten(1), "squares": o.square().sum(-1), "state": state}

    def turned(self, y: Tensor, angles: Tensor) -> Tensor:
        """Heads with channels i and i + d/2 turned by angle i."""
        d = self.shape.turned
        first, second, rest = y.split([d // 2, d // 2, y.shape[-1] - d], dim=-1)
        cos, sin = angles[:, None].cos(), angles[:, None].sin()
        return torch.cat([cos * first - sin * second, cos * second + sin * first, rest], dim=-1)

    def keys(self, q: Tensor, k: Tensor, b: Tensor, further: Tensor, x: Results) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Query, write key and erase key per key head, and what values are multiplied by."""
        s = self.shape
        largest = 2 if s.doubled_step else 1
        p0, p1 = (x[name][:, None] for name in ("p0", "p1"))
        if s.keys == "unit_feedback":
            c = p0.sigmoid()
            return unit(q - p1 * c * k), unit(k), unit(c * k), 1
        q, k = unit(q) if s.normalize_q else q, unit(k) if s.normalize_k else k
        if s.keys == "feedback":
            return q - p1 * k, k, p0.sigmoid() * k, 1
        if s.keys == "query_share":
            return q, k, k + (further - 0.9).sigmoid()[..., None] * q, 1
        if s.keys not in PER_CHANNEL:
            return q, k, k, 1
        b, w = largest * b.unflatten(1, (s.H, s.K)).sigmoid(), further.unflatten(1, (s.HV, s.V)).sigmoid()
        if s.keys == "roots":
            return q, b.sqrt() * k, b.sqrt() * k, (largest * w).sqrt()
        share = p0.sigmoid() / 4 if s.keys == "gated_query" else 0 * p0
        return q, k, b * k + share * (b * q - (b * q * k).sum(-1, keepdim=True) * k), w


@dataclass(frozen=True)
class Gates:
    """The second maps of low-rank gates beside convolutions, which they leave as they are; for one row also alone."""

    name: str
    R: int
    N_G: int = 40
    N_A: int = 24
    rank_g: int = 20
    rank_a: int = 12
    decay_bias: bool = False
    again: bool = False  # the first map once more, as the third
    dtype: torch.dtype = torch.float32

    def inputs(self, device: str) -> Results:
        generator = torch.Generator().manual_seed(0)
        shapes = {
            "mixed": (self.R, 7 + self.rank_g + self.rank_a + 3),
            "gate": (self.N_G, self.rank_g),
            "bias": (self.N_G,),
            "decay": (self.N_A, self.rank_a),
            "decay_bias": (self.N_A,),
            "product_bias": (7 + self.rank_g + self.rank_a + 3,),
        }
        drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        return {name: x.to(device, torch.float32 if name == "mixed" else self.dtype) for name, x in drawn.items()}

    def run(self, device: str) -> Results:
        x = self.inputs(device)
        gate = LowRankGate(7, x["gate"], x["bias"])
        decay = LowRankGate(7 + self.rank_g, x["decay"], x["decay_bias"] if self.decay_bias else None)
        maps = [gate] * (self.N_G > 0) + [decay] * (self.N_A > 0)
        maps += maps[:1] * self.again
        taps, windows = x["decay"].new_ones(3, 2, 4).unbind(), x["decay"].new_ones(2, self.R, 6, 3)
        parts, bias = torch.stack([x["mixed"] / 2 - x["product_bias"], x["mixed"] / 2]), x["product_bias"]
        mixed, gates = convolve_parts(parts, Convolution(taps, windows[0]), bias, gates=maps)
        alone, none = convolve_parts(parts, Convolution(taps, windows[1]), bias)
        assert none is None and torch.equal(mixed, alone) and torch.equal(*windows)
        return {"gates": gates} | ({"alone": low_rank_gates(x["mixed"], maps)} if self.R == 1 else {})

    def plain(self, device: str, dtype: torch.dtype) -> Results:
        x = {name: tensor.to(dtype) for name, tensor in self.inputs(device).items()}
        first, second = x["mixed"][:, 7:-3].split([self.rank_g, self.rank_a], dim=1)
        bias = x["decay_bias"] if self.decay_bias else None
        parts = [F.linear(first, x["gate"], x["bias"]), F.linear(second, x["decay"], bias)]
        gates = torch.cat(parts + parts[:1] * self.again, 1)
        return {"gates": gates, "alone": gates}


HALF = torch.float16
"""Of a shape whose case says what `mixed` holds."""
ENDS = [("", "residual"), ("norm", "convolution"), ("norm", "glu"), ("heads", "residual")]
CASES: list[Product | Rule | Gates] = [
    *(
        Product(f"{before}-{after}-{R}-{str(dtype)[6:]}", R, before=before, after=after, dtype=dtype, in_parts=R > 2)
        for (before, after), R, dtype in itertools.product(ENDS, (1, 2, 3, 33, 65), (torch.float32, HALF))
    ),
    Product("plain-odd", N=37, K=72),
    Product("several-blocks", 2, N=9, K=5000, before="norm", after="glu"),
    *(
        Product(f"{after}-parts-{R}", R, N=48, K=1100, after=after, dtype=HALF, in_parts=True)
        for after in ("residual", "glu", "convolution")
        for R in (5, 40)
    ),
    *(
        Product(f"taps-{taps}-{R}", R, before="norm", after="convolution", taps=taps, in_parts=R > 1)
        for taps in (2, 3, 5)
        for R in (1, 4)
    ),
    *(
        Rule(
            f"rule-{gate}{'-low-rank' * low_rank}-{decay}-{int(doubled)}",
            RuleShape(2, 4, 12, 20, True, doubled, decay, gate, low_rank),
        )
        for gate, low_rank in (("none", False), ("silu", False), ("sigmoid", False), ("sigmoid", True))
        for decay in ("none", "scalar", "channel")
        for doubled in (False, True)
    ),
    *(
        Rule(
            f"rule-step-{step}{'-unit-keys' * unit_keys}-{decay}-{int(doubled)}",
            RuleShape(2, 4, 12, 20, False, doubled, decay, "silu", False, unit_keys, step),
        )
        for step, unit_keys, decay, doubled in (
            ("none", False, "none", False),
            ("none", True, "scalar", False),
            ("none", False, "channel", False),
            ("exact", False, "none", False),
            ("exact", False, "scalar", True),
            ("exact", True, "none", False),
            ("implicit", False, "scalar", False),
            ("kaczmarz", False, "channel", False),
            ("euler", False, "scalar", False),
        )
    ),
    *(
        Rule(f"rule-exact-keys-{size:g}", RuleShape(2, 4, 12, 20, False, False, "none", "none", step="exact",
             normalize_k=False), key_size=size)
        for size in (0.1, 1e-3, 1e-6, 0.0)
    ),
    *(
        Rule(
            f"rule-{form}-{decay}-{step}",
            RuleShape(2, 4, 12, 20, False, False, decay, "sigmoid", False, False, step, form),
        )
        for form, decay in (("log_sigmoid", "scalar"), ("log_sigmoid", "channel"), ("fixed", "scalar"))
        for step in ("none", "implicit")
    ),
    *(
        Rule(
            f"rule-saturating-{decay}",
            RuleShape(2, 4, 12, 20, False, False, decay, "sigmoid", decay_form="saturating"),
        )
        for decay in ("scalar", "channel")
    ),
    *(
        Rule(
            f"rule-keys-{keys}-{decay}-{int(doubled)}-{int(undecayed)}",
            RuleShape(2, 4, 12, 20, True, doubled, decay, "silu", low_rank, keys=keys, undecayed=undecayed),
        )
        for keys, decay, doubled, low_rank, undecayed in (
            ("gated", "channel", False, True, False),
            ("gated", "scalar", True, False, False),
            ("gated_query", "channel", False, True, False),
            ("gated_query", "none", True, True, False),
            ("roots", "channel", False, True, False),
            ("roots", "scalar", True, False, False),
            ("query_share", "scalar", False, False, False),
            ("query_share", "channel", False, True, False),
            ("feedback", "scalar", False, False, True),
            ("feedback", "channel", False, True, False),
            ("unit_feedback", "scalar", False, False, True),
            ("erase_first", "channel", False, True, False),
            ("erase_first", "scalar", True, False, False),
            ("tied", "scalar", False, False, True),
        )
    ),
    *(
        Rule(
            f"rule-{steps}-steps-{decay}-{step}-{int(undecayed)}",
            RuleShape(2, 4, 12, 20, True, doubled, decay, "silu", step=step, micro_steps=steps,
                      undecayed=undecayed),
        )
        for steps, decay, step, doubled, undecayed in (
            (2, "scalar", "euler", True, False),
            (3, "none", "exact", False, False),
            (2, "channel", "euler", False, True),
            (2, "scalar", "none", False, False),
        )
    ),
    *(
        Product(f"bias-{int(silu)}-{R}", R, before="norm", after="convolution", silu=silu, bias=True, in_parts=R > 1)
        for silu in (False, True)
        for R in (1, 4, 65)
    ),
    Product("bias-half", dtype=HALF, bias=True, after="residual"),
    *(
        Rule(f"rule-turned-{turned}-{rows}-{keys}-{decay}", RuleShape(2, 4, 12, 20, True, False, decay, "silu",
             low_rank, keys=keys, micro_steps=steps, turned=turned), B=3, angles=rows)
        for turned, rows, keys, decay, low_rank, steps in (
            (12, 1, "tied", "scalar", False, 1),
            (12, 3, "tied", "channel", True, 1),
            (8, 3, "tied", "none", False, 2),
            (2, 1, "gated_query", "channel", True, 1),
            (12, 3, "unit_feedback", "scalar", False, 1),
        )
    ),
    Rule("rule-wide", RuleShape(1, 1, 128, 128, True, False, "none", "none"), B=1),
    Rule("rule-one-channel", RuleShape(1, 2, 1, 1, False, False, "scalar", "none")),
    *(
        Gates(f"gates-{R}-{str(dtype)[6:]}", R, dtype=dtype)
        for R, dtype in itertools.product((1, 2, 33, 65), (torch.float32, HALF))
    ),
    Gates("gates-decay-alone", 3, N_G=0, rank_g=0),
    *(
        Gates(f"gates-decay-bias-{R}-{N_G}", R, N_G=N_G, rank_g=N_G // 2, decay_bias=True)
        for R, N_G in itertools.product((1, 3), (0, 40))
    ),
    Gates("gates-output-alone", 1, N_A=0, rank_a=0),
    *(Gates(f"gates-three-{R}", R, again=True) for R in (1, 3)),
    Gates("gates-wide", 2, N_G=130, N_A=100, rank_g=512, rank_a=1),
]  # fmt: skip


def is_interpreted(case: Product | Rule | Gates) -> bool:
    """Numbers of rows are crossed with what stands around a product, and with half precision, on a GPU alone."""
    rows = {Product: (1, 2, 3, 4, 5) if case.dtype == HALF else (1, 2, 3, 4, 65), Gates: (1, 2, 3, 65)}
    return isinstance(case, Rule) or case.R in rows[type(case)]


INTERPRETED = [case for case in CASES if is_interpreted(case)]


def judge(case: Product | Rule | Gates, results: Results, device: str) -> None:
    """Every result errs at most twice as much as plain torch in the same dtype, plus its rounding."""
    exact, plain = case.plain("cpu", WIDE), case.plain(device, case.dtype)
    for name, actual in results.items():
        expected = exact[name]
        assert actual.shape == expected.shape
        assert actual.isfinite().all(), name
        error = (actual.cpu().to(WIDE) - expected).norm()
        allowed = 2 * (plain[name].cpu().to(WIDE) - expected).norm()
        allowed += 2 * torch.finfo(case.dtype).eps * expected.norm()
        if not error <= allowed:
            raise Missed(f"{case.name}, {name}: {error:.2e} above {allowed:.2e}", float(error))


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    path = tmp_path_factory.mktemp("interpreted") / "results.pt"
    run_interpreted(Path(__file__), path)
    return torch.load(path)


@pytest.mark.parametrize("case", INTERPRETED, ids=lambda case: case.name)
def test_interpreted(case: Product | Rule | Gates, interpreted: dict[str, Results]) -> None:
    judge(case, interpreted[case.name], "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_on_the_gpu(case: Product | Rule | Gates) -> None:
    judge(case, case.run("cuda"), "cuda")


def greedy_tokens(device: str) -> Results:
    """Tokens and finished rows of logits with ties, with a row that has ended and one that ends now, and with rows that
    have no likeliest token: NaN (the second of them has ended), +inf, nothing but -inf."""
    logits = torch.randn(10, 9001, generator=torch.Generator().manual_seed(0)).to(HALF)
    logits[0, [17, 8999]] = 40
    logits[2, 9000] = 40
    logits[3, 3] = 40
    logits[5, 8999] = logits[6, 0] = logits[1, 4] = float("nan")
    logits[7, 9000] = float("inf")
    logits[8] = float("-inf")
    logits[9, 1:] = float("-inf")
    token, finished = torch.full((10, 1), -7), torch.tensor([False, True, *[False] * 8])[:, None]
    ends = torch.tensor([5, 3])
    logits, token, finished, ends = (x.to(device) for x in (logits, token, finished, ends))
    greedy_token(logits, ends, finished, 7, token)
    none_end = finished.clone()
    greedy_token(logits, ends[:0], none_end, 7, token.clone())
    return {"logits": logits, "token": token, "finished": finished, "none_end": none_end}


def check_greedy_tokens(found: Results) -> None:
    found = {name: x.cpu() for name, x in found.items()}
    likeliest = found["logits"].float().argmax(-1).tolist()
    assert found["token"].flatten().tolist() == [17, 7, 9000, 3, likeliest[4], -1, -1, -1, -1, 0]
    assert found["finished"].flatten().tolist() == [False, True, False, True, *[False] * 6]
    assert torch.equal(found["none_end"], found["finished"])


def test_greedy_tokens_interpreted(interpreted: dict[str, Results]) -> None:
    check_greedy_tokens(interpreted["greedy"])


@pytest.mark.gpu
def test_greedy_tokens_on_the_gpu() -> None:
    check_greedy_tokens(greedy_tokens("cuda"))


def gumbel(device: str) -> Results:
    """Scores of rows with seeds of 64 bits: greedy, cold, warm and hot ones, and one each with NaN, +inf and -inf."""
    logits = torch.randn(6, 2051, generator=torch.Generator().manual_seed(0)).to(HALF)
    logits[3, 7], logits[4, 8], logits[5, 9] = float("nan"), float("inf"), float("-inf")
    seed = torch.tensor([[0], [1], [2**40 + 5], [-1], [-(2**63)], [7]])
    position = torch.tensor([[0], [3], [2**20], [1], [2], [70_000]])
    temperature = torch.tensor([[0.0], [1e-30], [0.7], [1.0], [1.0], [30.0]])
    given = [x.to(device) for x in (logits, logits.amax(-1, keepdim=True), temperature, seed, position)]
    logits, largest, temperature, seed, position = (x.cpu() for x in given)
    noise = -torch.log(-torch.log1p(-uniform_numbers(seed, position, 2051)))
    warm = (logits.float() - largest.float()) / temperature.masked_fill(temperature == 0, 1) + noise
    return {"scores": gumbel_scores(*given), "expected": torch.where(temperature == 0, logits.float(), warm)}


def check_gumbel(found: Results) -> None:
    scores, expected = found["scores"].cpu(), found["expected"]
    torch.testing.assert_close(scores, expected, rtol=1e-6, atol=2e-6, equal_nan=True)
    assert torch.equal(scores.argmax(-1), expected.argmax(-1))


def test_gumbel_scores_interpreted(interpreted: dict[str, Results]) -> None:
    check_gumbel(interpreted["gumbel"])


@pytest.mark.gpu
def test_gumbel_scores_on_the_gpu() -> None:
    check_gumbel(gumbel("cuda"))


if __name__ == "__main__":
    computed = {case.name: case.run("cpu") for case in INTERPRETED}
    torch.save(computed | {"greedy": greedy_tokens("cpu"), "gumbel": gumbel("cpu")}, sys.argv[1])
