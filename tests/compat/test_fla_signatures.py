"""Our functions and modules have flash-linear-attention's signatures: a table of them, and the library where it is.

`python tests/compat/test_fla_signatures.py` writes the table from the installed library.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deltazoo
from deltazoo.compat import fla as ours

TABLE = Path(__file__).with_name("fla_signatures.json")
HOMES = {
    "fla.ops.delta_rule": ["chunk_delta_rule", "fused_recurrent_delta_rule"],
    "fla.ops.gated_delta_rule": [
        "chunk_gated_delta_rule",
        "chunk_gdn",
        "fused_recurrent_gated_delta_rule",
        "fused_recurrent_gdn",
    ],
    "fla.ops.kda": ["chunk_kda", "fused_recurrent_kda"],
    "fla.modules.convolution": ["causal_conv1d"],
    "fla.modules.l2norm": ["l2norm"],
    "fla.modules": ["FusedRMSNormGated", "RMSNorm", "ShortConvolution"],
}
METHODS = {"ShortConvolution": ["forward", "step"], "RMSNorm": ["forward"], "FusedRMSNormGated": ["forward"]}


def parameters(function: Callable[..., Any]) -> str:
    """`name`, `name=default` or `**name` of each parameter, in order."""
    return ", ".join(
        f"**{p.name}" if p.kind is p.VAR_KEYWORD else p.name if p.default is p.empty else f"{p.name}={p.default!r}"
        for p in inspect.signature(function).parameters.values()
    )


def signatures(find: Callable[[str, str], Any]) -> Iterator[tuple[str, str]]:
    for module, names in HOMES.items():
        for name in names:
            found = find(module, name)
            yield name, parameters(found)
            yield from ((f"{name}.{method}", parameters(getattr(found, method))) for method in METHODS.get(name, []))


def of_the_library(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


def test_ours_are_those_of_the_table() -> None:
    table = json.loads(TABLE.read_text(encoding="utf-8"))["signatures"]
    assert dict(signatures(lambda module, name: getattr(ours, name))) == table


def test_every_name_is_in_the_table() -> None:
    assert {*ours.__all__} == {name for names in HOMES.values() for name in names}


@pytest.fixture
def layers() -> Iterator[dict[str, type[nn.Module]]]:
    """Its layer classes, with our functions and modules in place of its own in their modules."""
    pytest.importorskip("fla.layers")
    homes = {"delta_net": "DeltaNet", "gated_deltanet": "GatedDeltaNet", "kda": "KimiDeltaAttention"}
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for rule, name in homes.items():
            module = import_module(f"fla.layers.{rule}")
            for ours_name in ours.__all__:
                if hasattr(module, ours_name):
                    patch.setattr(module, ours_name, getattr(ours, ours_name))
            found[rule] = getattr(module, name)
        yield found


def test_the_table_is_that_of_the_library() -> None:
    pytest.importorskip("fla.ops")
    assert dict(signatures(of_the_library)) == json.loads(TABLE.read_text(encoding="utf-8"))["signatures"]


@pytest.mark.parametrize("rule", ["delta_net", "gated_deltanet", "kda"])
def test_the_library_s_layers_on_our_functions_are_our_layers(rule: str, layers: dict[str, type[nn.Module]]) -> None:
    """Their code, their weights, our functions: our layer with the same weights, for padded, packed, cached calls."""
    torch.manual_seed(0)
    options = {} if rule == "delta_net" else {"head_dim": 8}
    theirs = layers[rule](hidden_size=16, num_heads=2, layer_idx=0, **options)
    mine = deltazoo.layers.make_layer(rule, 16, 2, 8)
    mine.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 70, 16)
    mask = torch.ones(2, 70, dtype=torch.long)
    mask[0, :5] = 0
    boundaries = torch.tensor([0, 3, 70])
    calls = [
        (theirs(x)[0], mine(x)),
        (theirs(x, attention_mask=mask)[0] * mask[..., None], mine(x, attention_mask=mask)),
        (theirs(x[:1], cu_seqlens=boundaries)[0], mine(x[:1], cu_seqlens=boundaries)),
    ]
    for actual, expected in calls:
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)

    from fla.models.utils import Cache

    theirs.eval()
    with torch.no_grad():
        cache = Cache()
        pieces = [theirs(x[:, :65], past_key_values=cache, use_cache=True)[0]]
        for t in range(65, 70):
            pieces.append(theirs(x[:, t : t + 1], past_key_values=cache, use_cache=True)[0])
        torch.testing.assert_close(torch.cat(pieces, dim=1), mine(x), rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    from importlib.metadata import version

    content = {"version": version("fla-core"), "signatures": dict(signatures(of_the_library))}
    TABLE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
