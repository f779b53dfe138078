"""What each part needs to be imported and to run, seen in fresh interpreters that lack the rest."""

from __future__ import annotations

import textwrap

import pytest
from helpers import run_python

WITHOUT = """
import sys

class Missing:
    def __init__(self, *names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r} (blocked by the test)", name=name)

sys.meta_path.insert(0, Missing(*sys.argv[1].split(",")))
"""

RUN_THE_OPERATOR = """
import torch
from deltazoo.ops import delta_rule, delta_rule_step

q, k = torch.nn.functional.normalize(torch.randn(2, 1, 70, 2, 8), dim=-1).unbind()
v, beta = torch.randn(1, 70, 2, 8, requires_grad=True), torch.rand(1, 70, 2)
output, state = delta_rule(q, k, v, beta, -torch.rand(1, 70, 2, 8))
output.sum().backward()
assert v.grad.isfinite().all()
delta_rule_step(q[:, :1], k[:, :1], v[:, :1], beta[:, :1], state=state)
"""

RUN_A_LAYER = """
import torch
from deltazoo.layers import DeltaRuleAttention

layer = DeltaRuleAttention(rule="gated_deltanet", hidden_size=32, num_heads=2, head_dim=16)
layer(torch.randn(2, 10, 32)).sum().backward()
"""

ASK_FOR_TRITON = """
from deltazoo.ops import resolve_backend

call = dict(device="cuda", dtype=torch.float32, head_k_dim=64, head_v_dim=64)
name, reason = resolve_backend(None, **call)
assert name == "chunkwise" and "triton" in reason.lower(), (name, reason)
try:
    resolve_backend("triton", **call)
except NotImplementedError as error:
    print(error)
"""


def run_without(missing: str, code: str) -> str:
    return run_python(WITHOUT + textwrap.dedent(code), missing)


def test_blocking_a_module_works() -> None:
    with pytest.raises(AssertionError, match="No module named 'triton'"):
        run_without("triton", "import triton")


def test_operators_and_layers_need_torch_and_einops_alone() -> None:
    """Asking for Triton where there is none says so."""
    others = "triton,transformers,datasets,tokenizers,accelerate,safetensors,matplotlib,yaml,rich,typer"
    said = run_without(others, "import deltazoo" + RUN_THE_OPERATOR + RUN_A_LAYER + ASK_FOR_TRITON)
    assert "triton" in said


def test_the_package_and_its_registry_need_neither_torch_nor_transformers() -> None:
    run_without("torch,transformers,einops", "import deltazoo\nassert 'kda' in deltazoo.list_rules()")


def test_what_the_root_offers_is_imported_when_asked_for() -> None:
    """Also by a subpackage's name alone, and inside a compiled function."""
    code = """
    import sys
    import deltazoo
    assert not {"torch", "transformers"} & {*sys.modules}
    assert {"models", "layers", "GatedDeltaNet", "DeltaRuleConfig"} <= {*dir(deltazoo)}
    assert deltazoo.RuleSpec is type(deltazoo.get_rule("kda"))
    assert callable(deltazoo.ops.step_size.exact)
    assert "transformers" not in sys.modules
    assert deltazoo.models.export_remote_code
    assert deltazoo.layers.GatedDeltaNet is deltazoo.GatedDeltaNet
    import torch
    x = torch.ones(1, 3, 2, 4)
    call = torch.compile(lambda x: deltazoo.delta_rule(x, x, x, x[..., 0]).output, fullgraph=True, backend="eager")
    assert call(x).shape == x.shape
    """
    run_python(textwrap.dedent(code))


def test_importing_loads_neither_triton_nor_the_training_side_and_a_first_call_no_compiler() -> None:
    """torch itself loads Triton once it compiles or calls a custom operator, and takes seconds for torch._dynamo."""
    code = """
    import sys, deltazoo.ops, deltazoo.layers
    loaded = {"triton", "datasets", "matplotlib", "deltazoo.training", "deltazoo.cli"} & {*sys.modules}
    assert not loaded, loaded
    """
    first_call = RUN_THE_OPERATOR + RUN_A_LAYER + "assert 'torch._dynamo' not in sys.modules"
    run_python(textwrap.dedent(code) + first_call)
