"""Norms and MLPs of transformers in our kernels give what their own forward passes give: interpreted, and on a GPU.

The interpreter has to be chosen before Triton is imported, so a child process runs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import foreign_models
import pytest
import tiny_families
import torch
from foreign_models import foreign_model
from helpers import run_python
from tiny_families import tiny_original
from torch import nn
from transformers.models.phi.modeling_phi import PhiMLP

import deltazoo
from deltazoo.generation import library_modules
from deltazoo.generation.step import StepModules

OF_EACH_FORM = ("llama", "olmo2", "gemma3_text")
"""Families with norms whose weight comes after rounding, before it, and as its difference from one."""
LAYER_NORMS = ("gpt2", "gpt_neox")
CHILD = """
import sys; sys.path[:0] = sys.argv[1:3]
import test_library_modules as tests
from unittest import mock
with mock.patch.object(tests.library_modules, "takes_kernel", lambda *_, **__: True):
    for family in tests.OF_EACH_FORM:
        for dtype in (tests.torch.float32, tests.torch.bfloat16):
            tests.check_modules(family, "cpu", dtype)
"""


def modules_of(model: nn.Module) -> list[Any]:
    return [part.module for part in library_modules.library_modules(model)]


def replaced(model: nn.Module) -> Any:
    return StepModules(library_modules.library_modules(model)).replaced()


def fused(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), replaced(module):
        assert "forward" in vars(module)
        return module(x)


def check_modules(family: str, device: str, dtype: torch.dtype) -> None:
    """In our kernels a module errs at most about as much as by its own forward pass."""
    chosen = {type(module): module for module in modules_of(tiny_original(family))}
    assert len(chosen) == 2
    for module in chosen.values():
        module = module.to(device, dtype)
        width = module.hidden_size if hasattr(module, "down_proj") else len(module.weight)
        x = (3 * torch.randn(2, 1, width, generator=torch.Generator().manual_seed(0))).to(device, dtype)
        with torch.no_grad():
            own, found = module(x), fused(module, x)
            exact = module.double()(x.double())
        assert found.dtype == own.dtype == dtype
        allowed = torch.finfo(dtype).eps * exact.norm()
        assert (found - exact).norm() <= (own - exact).norm() + allowed, type(module).__name__


def test_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    here = Path(__file__).parent
    run_python(CHILD, str(here), str(here.parent))


@pytest.mark.parametrize("family", tiny_families.OWN)
def test_norms_of_the_families_that_can_be_swapped(family: str) -> None:
    model = tiny_original(family)
    norms = {module for module in model.modules() if type(module).__name__.endswith("RMSNorm")}
    known = {module for module in modules_of(model) if not hasattr(module, "down_proj")}
    assert known == norms and bool(norms) == (family not in LAYER_NORMS)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "kimi_linear"])
def test_norms_of_accelerated_models(family: str) -> None:
    """The gated ones are `accelerate`'s."""
    if family not in foreign_models.FUSED:
        pytest.skip("the installed transformers lacks it")
    names = {type(module).__name__ for module in modules_of(foreign_model(family))}
    assert any(name.endswith("RMSNorm") for name in names) and not any("Gated" in name for name in names)


def test_other_code_is_no_known_module() -> None:
    norm = type(modules_of(tiny_original("llama"))[0])
    assert not modules_of(nn.ModuleList([nn.RMSNorm(4), deltazoo.layers.RMSNorm(4)]))
    assert library_modules._kernel_of(norm) is not None
    assert library_modules._kernel_of(type("Own", (norm,), {"__module__": __name__})) is None
    assert library_modules._kernel_of(PhiMLP) is None  # of transformers, and another forward pass


def test_what_keeps_its_own_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where gradients are recorded, on a CPU, for a weight of another dtype, and with a hook or a replaced method."""
    model, x = tiny_original("llama"), torch.randn(2, 1, 64)
    norm = next(module for module in modules_of(model) if not hasattr(module, "down_proj"))
    expected = norm(x[..., : len(norm.weight)])
    x = x[..., : len(norm.weight)]
    assert torch.equal(fused(norm, x), expected)
    monkeypatch.setattr(library_modules, "takes_kernel", lambda *_, **__: True)
    monkeypatch.setattr(library_modules.fused, "rms_norm", lambda x, *_, fused: torch.zeros_like(x))
    assert not fused(norm, x).any()
    with replaced(model):
        assert torch.equal(norm(x), expected)
    half = x.bfloat16()
    assert torch.equal(fused(norm, half), norm(half))
    handle = norm.register_forward_hook(lambda module, args, output: 2 * output)
    with torch.no_grad(), replaced(model):
        assert torch.equal(norm(x), 2 * expected)
    handle.remove()
    norm.forward = lambda x: 3 * x
    with torch.no_grad(), replaced(model):
        assert torch.equal(norm(x), 3 * x)
    assert "forward" in vars(norm)


@pytest.mark.gpu
@pytest.mark.parametrize("family", OF_EACH_FORM)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(family: str, dtype: torch.dtype) -> None:
    check_modules(family, "cuda", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("family", OF_EACH_FORM)
def test_tokens_of_a_swapped_model_on_a_gpu(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_original(family), tiny_families.tokens(2, 7).cuda()
    deltazoo.swap_attention(model, "gated_deltanet", "1:1")
    model.cuda()
    expected = model.generate(ids, max_new_tokens=9, do_sample=False, capture_step=False, eos_token_id=-1)
    calls = []
    norm = library_modules.fused.rms_norm
    counted = lambda *args, **options: (calls.append(1), norm(*args, **options))[1]  # noqa: E731
    monkeypatch.setattr(library_modules.fused, "rms_norm", counted)
    assert torch.equal(deltazoo.generate(model, ids, max_new_tokens=9, eos_token_id=[]), expected)
    assert calls
