"""Whole models on Liger's kernels against the same in plain torch: loss, logits, every gradient.

With stand-ins in plain torch where the package or the GPU is missing; interpreted on a CPU; compiled on a GPU. The
operator of the linear layers is plain torch throughout, so that what differs is Liger.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from liger_kernels import Results, interpreted_results, judge, needs_liger, save_interpreted
from tiny_models import tiny_model, tokens

import deltazoo.layers.mlp
import deltazoo.layers.norm
import deltazoo.models.loss
from deltazoo.layers.norm import RMSNorm
from deltazoo.ops.fused import linear_cross_entropy
from deltazoo.runtime import RECOMPUTE_LEVELS as LEVELS


@dataclass(frozen=True)
class Training:
    """One forward and backward pass of a model."""

    name: str
    case: str = "gated_deltanet"
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    checkpointing: bool | None = None
    """Reentrant or not; none at all unless given."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Options of the configuration of the model on Liger's kernels."""
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    shape: tuple[int, int] = (2, 20)

    def run(self, device: str, *, liger: bool, dtype: torch.dtype | None = None, shaken: int | None = None) -> Results:
        """`shaken` moves every weight by about half a unit in the last digit, each number in its own direction."""
        overrides = {"fused_kernels": False, **(self.overrides | {"liger": True} if liger else {})}
        model = tiny_model(self.case, backend="chunkwise", **overrides).to(self.dtype).to(device, dtype or self.dtype)
        if shaken is not None:
            generator = torch.Generator().manual_seed(shaken)
            with torch.no_grad():
                for parameter in model.parameters():
                    noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                    parameter.mul_(1 + torch.finfo(parameter.dtype).eps / 2 * noise)
        ids = tokens(*self.shape).to(device)
        inputs = {name: x.to(device) for name, x in self.inputs.items()}
        with torch.no_grad():
            logits = model(ids, **inputs).logits
        model.train()
        if self.checkpointing is not None and liger:
            model.gradient_checkpointing_enable({"use_reentrant": self.checkpointing})
        with torch.autocast(device, torch.bfloat16, enabled=self.autocast and dtype is None):
            loss = model(ids, labels=ids, use_cache=False, **inputs).loss
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        return {"logits": logits, "loss": loss.detach(), **gradients}


WITHOUT_LOGITS = {"fuse_linear_cross_entropy": True}
CASES = [
    Training("with_logits"),
    *(Training(f"without_logits_{case}", case, overrides=WITHOUT_LOGITS) for case in ("delta_net", "tied", "hybrid")),
    *(Training(f"recompute_{level}", overrides={**WITHOUT_LOGITS, "recompute": level}) for level in LEVELS),
    *(
        Training(f"checkpointing_reentrant_{kind}", overrides=WITHOUT_LOGITS, checkpointing=kind)
        for kind in (True, False)
    ),
    Training("packed", overrides=WITHOUT_LOGITS, shape=(1, 30), inputs={"cu_seqlens": torch.tensor([0, 7, 8, 30])}),
    Training(
        "padded",
        overrides=WITHOUT_LOGITS,
        inputs={"attention_mask": (torch.arange(20) >= torch.tensor([[0], [6]])).long()},
    ),
]
FAST = [
    Training(
        f"fast_{case}_recompute_{level}",
        case,
        overrides={**WITHOUT_LOGITS, "fused_kernels": True, "recompute": level},
        shape=(1, 8),
    )
    for case in ("delta_net", "hybrid")
    for level in ("none", "elementwise")
]
"""Every fusion there is."""
COMPILED = [
    *CASES,
    Training("bfloat16_with_logits", dtype=torch.bfloat16, shape=(4, 256)),
    Training("autocast", autocast=True, overrides=WITHOUT_LOGITS, shape=(4, 256)),
    *(
        Training(
            f"bfloat16_{case}_recompute_{level}",
            case,
            dtype=torch.bfloat16,
            overrides={**WITHOUT_LOGITS, "recompute": level},
            shape=(4, 256),
        )
        for case in ("gated_deltanet", "tied")
        for level in LEVELS
    ),
]


def check(case: Training, results: Results, device: str) -> None:
    """Plain torch also runs with moved weights: the effect of rounding on a sum that cancels."""
    plain = [case.run(device, liger=False, shaken=number) for number in (None, 0, 1, 2)]
    judge(results, plain, case.run(device, liger=False, dtype=torch.float64))


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    return interpreted_results(__file__, tmp_path_factory.mktemp("interpreted"))


@needs_liger
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_interpreted(case: Training, interpreted: dict[str, Results]) -> None:
    check(case, interpreted[case.name], "cpu")


@needs_liger
@pytest.mark.parametrize("name", ["", "fast_delta_net_", "fast_hybrid_"])
def test_recomputation_changes_no_bit(name: str, interpreted: dict[str, Results]) -> None:
    actual, expected = (interpreted[f"{name}recompute_{level}"] for level in ("elementwise", "none"))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.gpu
@needs_liger
@pytest.mark.parametrize("case", FAST[::2], ids=lambda case: case.case)
def test_recomputation_changes_no_bit_on_a_gpu(case: Training) -> None:
    again = replace(case, overrides={**case.overrides, "recompute": "elementwise"})
    torch.testing.assert_close(again.run("cuda", liger=True), case.run("cuda", liger=True), rtol=0, atol=0)


@pytest.mark.gpu
@needs_liger
@pytest.mark.parametrize("case", COMPILED, ids=lambda case: case.name)
def test_on_a_gpu(case: Training) -> None:
    check(case, case.run("cuda", liger=True), "cuda")


@pytest.mark.gpu
@needs_liger
def test_decoding_with_a_cache() -> None:
    model, ids = tiny_model("hybrid", liger=True, backend="chunkwise").cuda(), tokens(2, 12).cuda()
    with torch.no_grad():
        cache = model(ids[:, :8], use_cache=True).past_key_values
        steps = [model(token, past_key_values=cache, use_cache=True).logits for token in ids[:, 8:].split(1, dim=1)]
        torch.testing.assert_close(torch.cat(steps, dim=1), model(ids).logits[:, 8:], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@needs_liger
def test_less_memory_than_plain_torch() -> None:
    """Vocabulary 32,000 and 4,096 tokens: the logits alone would take 0.25 GiB, and their float32 copy twice that."""
    peaks = []
    for overrides in ({"fuse_linear_cross_entropy": False}, {"liger": True, "fuse_linear_cross_entropy": True}):
        model = tiny_model("gated_deltanet", vocab_size=32000, hidden_size=128, **overrides).cuda().bfloat16().train()
        ids = torch.randint(0, 32000, (4, 1024), device="cuda")
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(ids, labels=ids).loss.backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del model
    logits = 4096 * 32000 * 2
    assert peaks[1] < logits < 3 * logits < peaks[0], [f"{peak / 2**20:.0f} MiB" for peak in peaks]


@pytest.mark.gpu
@needs_liger
def test_recomputation_keeps_less_on_a_gpu() -> None:
    """Memory per layer; the difference removes what is kept outside the layers."""
    kept = {}
    for level in ("none", "elementwise"):
        bytes_of = []
        for layers in (1, 3):
            options = {**WITHOUT_LOGITS, "fused_kernels": True, "liger": True, "recompute": level}
            sizes = {"hidden_size": 256, "num_heads": 2, "head_dim": 128, "intermediate_size": 704}
            model = tiny_model("delta_net", num_hidden_layers=layers, **sizes, **options).cuda().bfloat16().train()
            ids = tokens(4, 1024).cuda()
            model(ids, labels=ids).loss.backward()
            before = torch.cuda.memory_allocated()
            loss = model(ids, labels=ids).loss
            bytes_of.append(torch.cuda.memory_allocated() - before)
            del loss, model
        kept[level] = bytes_of[1] - bytes_of[0]
    assert kept["elementwise"] < 0.65 * kept["none"], kept


def test_which_kernels_a_model_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins count the calls and compute in plain torch."""
    calls: Counter[str] = Counter()

    def stand_in(owner: Any, name: str, function: Any) -> None:
        def counted(*args: Any) -> Any:
            calls[name] += 1
            return function(*args)

        monkeypatch.setattr(owner, name, counted)

    def normalize(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, eps)

    def add(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
        return normalize(x + residual, weight, eps), x + residual

    stand_in(deltazoo.layers.norm, "liger_rms_norm", normalize)
    stand_in(deltazoo.layers.norm, "liger_add_rms_norm", add)
    stand_in(deltazoo.layers.mlp, "liger_swiglu", lambda gate, up: F.silu(gate) * up)
    stand_in(deltazoo.models.loss, "liger_linear_cross_entropy", linear_cross_entropy)
    in_blocks = {"liger_rms_norm": 3, "liger_add_rms_norm": 2, "liger_swiglu": 2}  # two blocks and the last norm
    case = Training("")
    expected = case.run("cpu", liger=False)
    for overrides, of_the_loss in (({}, {}), (WITHOUT_LOGITS, {"liger_linear_cross_entropy": 1})):
        calls.clear()
        actual = Training("", overrides=overrides).run("cpu", liger=True)
        assert calls == {name: 2 * count for name, count in in_blocks.items()} | of_the_loss  # in evaluation, too
        for name, x in expected.items():
            torch.testing.assert_close(actual[name], x, rtol=1e-5, atol=1e-5 * x.abs().max().item(), msg=name)


def test_parameters_keep_their_names() -> None:
    assert tiny_model("hybrid", liger=True).state_dict().keys() == tiny_model("hybrid").state_dict().keys()


def test_a_cpu_is_refused_and_the_option_can_be_taken_back() -> None:
    model = tiny_model("gated_deltanet", liger=True)
    with pytest.raises(NotImplementedError, match="run on GPUs, not on cpu: leave liger off"):
        model(tokens(1, 5))
    model.set_runtime(liger=False)
    assert torch.equal(model(tokens(1, 5)).logits, tiny_model("gated_deltanet")(tokens(1, 5)).logits)


def test_a_residual_in_plain_torch() -> None:
    norm, x, residual = RMSNorm(16), torch.randn(2, 3, 16), torch.randn(2, 3, 16)
    normalized, total = norm(x, residual=residual)
    assert torch.equal(total, residual + x) and torch.equal(normalized, norm(residual + x))
    assert norm(x.bfloat16(), residual=residual)[0].dtype == torch.float32


if __name__ == "__main__":
    save_interpreted([*CASES, *FAST], sys.argv[1])
