"""The kernels of fused decoding steps against plain torch in float64: interpreted on a CPU, and compiled on a GPU.

The interpreter must be chosen before Triton is imported. So one child process, `python test_token_kernels.py FILE`,
computes every case, and the tests check its results. Triton's interpreter multiplies bfloat16 wrongly: half precision
is float16 there.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import Missed
from torch import Tensor

pytest.importorskip("triton")

from deltazoo.layers.rule import effective_step  # noqa: E402
from deltazoo.ops.decay import softplus_decay  # noqa: E402
from deltazoo.ops.fused.kernels import token_product, token_rule  # noqa: E402
from deltazoo.ops.fused.kernels.greedy_token import greedy_token  # noqa: E402
from deltazoo.ops.fused.kernels.row_product import row_product  # noqa: E402
from deltazoo.ops.fused.kernels.token_convolution import Convolution, convolve_parts  # noqa: E402
from deltazoo.ops.fused.kernels.token_gates import LowRankGate, low_rank_gates  # noqa: E402
from deltazoo.ops.fused.kernels.token_norms import HeadNorm, add_parts, norm_heads, swiglu_parts  # noqa: E402
from deltazoo.ops.fused.kernels.token_rule import RuleShape  # noqa: E402
from deltazoo.spec import get_variant  # noqa: E402

Results = dict[str, Tensor]
WIDE = torch.float64


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
            options["convolution"] = Convolution(x["taps"].chunk(3), x["window"])
            options["dtype"] = torch.float32
        y = token_product.token_product(x["x"], x["weight"], **options)  # type: ignore[arg-type]
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
            y = convolve_parts(parts, Convolution(x["taps"].chunk(3), x["window"]))
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
        if self.after == "residual":
            y = y + x["residual"]
            return {"y": y, "normed": rms(y) * x["row_weight"], "window": window}
        elif self.after == "glu":
            gate, up = y.chunk(2, dim=1)
            y = F.silu(gate) * up
        elif self.after == "convolution":
            C = window.shape[1]
            history = torch.cat([window, y[:, :C, None]], dim=2)
            y = torch.cat([F.silu((history * x["taps"]).sum(-1)), y[:, C:]], dim=1)
            window = history[..., 1:]
        return {"y": y, "window": window}


@dataclass(frozen=True)
class Rule:
    """One token of a rule from the products before it."""

    name: str
    shape: RuleShape
    B: int = 2
    key_size: float = 1.0
    dtype: torch.dtype = torch.float32

    def inputs(self, device: str) -> Results:
        generator = torch.Generator().manual_seed(0)
        s = self.shape
        channels = s.HV * s.K if s.decay == "channel" else s.HV
        shapes = {
            "mixed": (self.B, 2 * s.H * s.K + s.HV * s.V + sum(self.gate_sizes) + s.HV * (s.step != "none")),
            "gates": (self.B, sum(self.low_rank_sizes)),
            "state": (self.B, s.HV, s.K, s.V),
            "A_log": (s.HV,),
            "dt_bias": (channels,),
            "norm_weight": (s.V,),
        }
        drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        drawn["mixed"][:, s.H * s.K : 2 * s.H * s.K] *= self.key_size
        if s.decay_form == "fixed":
            drawn["A_log"] = -drawn["A_log"].abs()  # the log-decay itself
        return {name: x.to(device) for name, x in drawn.items()}

    @property
    def gate_sizes(self) -> tuple[int, int]:
        """Columns of `mixed` for output gate and decay gate; of low rank, 3 or 5 that the rule does not read."""
        s = self.shape
        gate = 0 if s.gate == "none" else 3 if s.low_rank_gate else s.HV * s.V
        return gate, 0 if s.decay_form == "fixed" else {"none": 0, "scalar": s.HV, "channel": 5}[s.decay]

    @property
    def low_rank_sizes(self) -> tuple[int, int]:
        """Columns of `gates`."""
        s = self.shape
        return s.HV * s.V * s.low_rank_gate, s.HV * s.K * (s.decay == "channel")

    def run(self, device: str) -> Results:
        x = self.inputs(device)
        form = self.shape.decay_form if self.shape.decay != "none" else "none"
        A_log = x["A_log"] if form in ("softplus", "fixed") else None
        dt_bias = x["dt_bias"] if form == "softplus" else None
        gates = x["gates"] if sum(self.low_rank_sizes) else None
        z, squares = token_rule.token_rule(x["mixed"], gates, x["state"], A_log, dt_bias, x["norm_weight"], self.shape)
        return {"z": z, "squares": squares.sum(-1), "state": x["state"]}

    def log_decay(self, x: Results, a: Tensor) -> Tensor:
        """`[B, HV, K]`, or with ones in place of B and K."""
        s = self.shape
        if s.decay_form == "fixed":
            return x["A_log"][None, :, None]
        a = a.unflatten(1, (1, s.HV, s.K) if s.decay == "channel" else (1, s.HV))
        softplus = s.decay_form == "softplus"
        result = softplus_decay(a, x["A_log"], x["dt_bias"]) if softplus else F.logsigmoid(a) / 16
        return result[:, 0] if s.decay == "channel" else result[:, 0, :, None]

    def plain(self, device: str, dtype: torch.dtype) -> Results:
        s, x = self.shape, {name: tensor.to(dtype) for name, tensor in self.inputs(device).items()}
        sizes = [s.H * s.K, s.H * s.K, s.HV * s.V, *self.gate_sizes, s.HV * (s.step != "none")]
        q, k, v, g, a, b = x["mixed"].split(sizes, dim=1)
        low_rank_g, low_rank_a = x["gates"].split(self.low_rank_sizes, dim=1)
        g = low_rank_g if s.low_rank_gate else g
        q, k = (y.unflatten(1, (s.H, s.K)) for y in (q, k))
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6) if s.normalize_k else k
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) if s.normalize_q else q
        q, k = (y.repeat_interleave(s.HV // s.H, dim=1) for y in (q, k))
        state, beta = x["state"], None
        if s.step != "none":
            spec = replace(get_variant("delta_net"), step_size=s.step, normalize_k=s.normalize_k)
            beta = effective_step(spec, b.sigmoid()[:, None], k[:, None], allow_neg_eigval=s.doubled_step)[:, 0]
        if s.decay != "none":
            state = state * self.log_decay(x, low_rank_a if s.decay == "channel" else a).exp()[..., None]
        u = v.unflatten(1, (s.HV, s.V))
        if beta is not None:
            u = beta[..., None] * (u - torch.einsum("bhkv,bhk->bhv", state, k))
        state = state + k[..., None] * u[..., None, :]
        o = s.K**-0.5 * torch.einsum("bhkv,bhk->bhv", state, q)
        z = o * x["norm_weight"]
        if s.gate != "none":
            g = g.unflatten(1, (s.HV, s.V))
            z = z * (F.silu(g) if s.gate == "silu" else g.sigmoid())
        return {"z": z.flatten(1), "squares": o.square().sum(-1), "state": state}


@dataclass(frozen=True)
class Gates:
    """The second maps of low-rank gates."""

    name: str
    R: int
    N_G: int = 40
    N_A: int = 24
    rank_g: int = 20
    rank_a: int = 12
    decay_bias: bool = False
    dtype: torch.dtype = torch.float32

    def inputs(self, device: str) -> Results:
        generator = torch.Generator().manual_seed(0)
        shapes = {
            "mixed": (self.R, 7 + self.rank_g + self.rank_a + 3),
            "gate": (self.N_G, self.rank_g),
            "bias": (self.N_G,),
            "decay": (self.N_A, self.rank_a),
            "decay_bias": (self.N_A,),
        }
        drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        return {name: x.to(device, torch.float32 if name == "mixed" else self.dtype) for name, x in drawn.items()}

    def run(self, device: str) -> Results:
        x = self.inputs(device)
        gate = LowRankGate(x["gate"], x["bias"]) if self.N_G else None
        decay = LowRankGate(x["decay"], x["decay_bias"] if self.decay_bias else None) if self.N_A else None
        return {"gates": low_rank_gates(x["mixed"], 7, gate, decay)}

    def plain(self, device: str, dtype: torch.dtype) -> Results:
        x = {name: tensor.to(dtype) for name, tensor in self.inputs(device).items()}
        first, second = x["mixed"][:, 7:-3].split([self.rank_g, self.rank_a], dim=1)
        bias = x["decay_bias"] if self.decay_bias else None
        return {"gates": torch.cat([F.linear(first, x["gate"], x["bias"]), F.linear(second, x["decay"], bias)], 1)}


HALF = torch.float16
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
    Gates("gates-wide", 2, N_G=130, N_A=100, rank_g=512, rank_a=1),
]  # fmt: skip


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
    here = Path(__file__).resolve()
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = os.pathsep.join([str(here.parents[2]), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, str(here), str(path)], env=environment, check=True, timeout=300)
    return torch.load(path)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_interpreted(case: Product | Rule | Gates, interpreted: dict[str, Results]) -> None:
    judge(case, interpreted[case.name], "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_on_the_gpu(case: Product | Rule | Gates) -> None:
    judge(case, case.run("cuda"), "cuda")


def greedy_tokens(device: str) -> Results:
    """Tokens and finished rows of logits with ties, with a row that has ended and one that ends now."""
    logits = torch.randn(5, 9001, generator=torch.Generator().manual_seed(0)).to(HALF)
    logits[0, [17, 8999]] = 40
    logits[2, 9000] = 40
    logits[3, 3] = 40
    token, finished = torch.full((5, 1), -1), torch.tensor([[False], [True], [False], [False], [False]])
    ends = torch.tensor([5, 3])
    logits, token, finished, ends = (x.to(device) for x in (logits, token, finished, ends))
    greedy_token(logits, ends, finished, 7, token)
    none_end = finished.clone()
    greedy_token(logits, ends[:0], none_end, 7, token.clone())
    return {"logits": logits, "token": token, "finished": finished, "none_end": none_end}


def check_greedy_tokens(found: Results) -> None:
    found = {name: x.cpu() for name, x in found.items()}
    likeliest = found["logits"].float().argmax(-1).tolist()
    assert found["token"].tolist() == [[17], [7], [9000], [3], [likeliest[4]]]
    assert found["finished"].tolist() == [[False], [True], [False], [True], [False]]
    assert torch.equal(found["none_end"], found["finished"])


def test_greedy_tokens_interpreted(interpreted: dict[str, Results]) -> None:
    check_greedy_tokens(interpreted["greedy"])


@pytest.mark.gpu
def test_greedy_tokens_on_the_gpu() -> None:
    check_greedy_tokens(greedy_tokens("cuda"))


if __name__ == "__main__":
    computed = {case.name: case.run("cpu") for case in CASES}
    torch.save(computed | {"greedy": greedy_tokens("cpu")}, sys.argv[1])
