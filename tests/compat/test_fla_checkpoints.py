"""fla-hub checkpoints, old and new, load with equal logits; ours have the names and keys of fla's classes."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_families import swapped
from tiny_models import HYBRID, SIZES, tiny_model, tiny_named, tokens
from transformers import AutoConfig, AutoModelForCausalLM

from deltazoo.compat import load_fla_checkpoint
from deltazoo.compat.fla.checkpoints import missing_weights, whole_model
from deltazoo.training.loading import load_model
from deltazoo.training.trainer import PackedTrainer

# What fla's configuration classes write into config.json, at the sizes of the tiny models.
COMMON = {
    "attn_mode": "chunk",
    "attnres_block_size": None,
    "bos_token_id": 1,
    "conv_size": 4,
    "eos_token_id": 2,
    "fuse_cross_entropy": True,
    "fuse_norm": True,
    "fuse_swiglu": True,
    "hidden_act": "swish",
    "hidden_ratio": 4,
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "max_position_embeddings": 2048,
    "norm_eps": 1e-06,
    "num_heads": 2,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.51.3",
    "use_cache": True,
    "use_l2warp": False,
    "use_short_conv": True,
    "vocab_size": SIZES["vocab_size"],
}
FLA_CONFIGS = {
    "delta_net": {"expand_k": 0.5, "expand_v": 0.75, "qk_activation": "silu", "qk_norm": "l2", "use_beta": True,
                  "use_gate": False, "use_output_norm": True},
    "gated_deltanet": {"expand_v": 2.0, "head_dim": 8, "num_v_heads": 4, "use_gate": True, "allow_neg_eigval": False,
                       "output_gate_activation": "swish"},
    "kda": {"expand_v": 1.0, "head_dim": 8, "num_v_heads": None, "allow_neg_eigval": True, "safe_gate": True,
            "lower_bound": -5.0},
}  # fmt: skip
OURS = {
    "delta_net": {"head_dim": 8, "expand_v": 1.5},
    "gated_deltanet": {"num_v_heads": 4, "expand_v": 2.0},
    "kda": {"allow_neg_eigval": True, "decay_lower_bound": -5.0},
}
HYBRID_ATTN = {
    "layers": [1],
    "num_heads": 4,
    "num_kv_heads": 2,
    "qkv_bias": False,
    "rope_theta": 1e4,
    "window_size": None,
}


@pytest.fixture(params=[(name, hybrid) for name in FLA_CONFIGS for hybrid in (False, True)], ids=str)
def checkpoint(request, tmp_path):
    """A model of ours and a directory as fla would have written it."""
    model_type, hybrid = request.param
    model = tiny_named(model_type, **OURS[model_type], **(HYBRID if hybrid else {}))
    values = {**COMMON, **FLA_CONFIGS[model_type], "model_type": model_type, "attn": HYBRID_ATTN if hybrid else None}
    (tmp_path / "config.json").write_text(json.dumps(values | {"architectures": [type(model).__name__]}))
    save_file({k: x.contiguous() for k, x in model.state_dict().items()}, tmp_path / "model.safetensors")
    return model, tmp_path


def same_logits(a, b, given=None):
    given = tokens(2, 9) if given is None else given
    with torch.no_grad():
        return torch.equal(a(given).logits, b(given).logits)


def test_current_names_need_no_conversion(checkpoint):
    model, path = checkpoint
    loaded, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert type(loaded) is type(model) and same_logits(loaded, model)
    assert same_logits(load_fla_checkpoint(path), model)


def test_old_names(checkpoint):
    model, path = checkpoint
    current = load_file(path / "model.safetensors")
    old = {}
    for name, x in current.items():
        if name.endswith("attn.o_norm.weight"):
            old[name.replace("o_norm", "norm")] = x
        elif name.endswith("mlp.gate_proj.weight"):
            old[name] = torch.cat([x, current[name.replace("gate_proj", "up_proj")]])
        elif name.endswith("attn.A_log"):
            old[name] = x.reshape(1, 1, -1, 1)
            old[name.replace("A_log", "D")] = torch.ones_like(x)
        elif "_proj.0." in name or "_proj.1." in name:
            old[name.replace("_proj.0", "_a_proj").replace("_proj.1", "_b_proj")] = x
        elif not name.endswith("mlp.up_proj.weight"):
            old[name] = x
    assert old.keys() != current.keys()
    save_file(old, path / "model.safetensors")
    loaded = load_fla_checkpoint(path)
    assert same_logits(loaded, model)
    loaded.save_pretrained(path / "again")
    saved = load_file(path / "again" / "model.safetensors")
    assert saved.keys() == current.keys() and all(torch.equal(saved[name], x) for name, x in current.items())


def test_saved_configuration_means_the_same_to_fla(checkpoint):
    """fla's formulas for the widths of a layer, applied to what we save, give the shapes of the weights we save."""
    model, path = checkpoint
    model.save_pretrained(path / "ours")
    values = json.loads((path / "ours" / "config.json").read_text())
    weights = load_file(path / "ours" / "model.safetensors")
    prefix = "model.layers.0.attn."
    if values["model_type"] == "delta_net":
        key_dim = int(values["hidden_size"] * values["expand_k"])
        value_dim = int(values["hidden_size"] * values["expand_v"])
    else:
        key_dim = values["num_heads"] * values["head_dim"]
        value_dim = int(values["num_v_heads"] * values["head_dim"] * values["expand_v"])
    assert weights[prefix + "k_proj.weight"].shape == (key_dim, 32)
    assert weights[prefix + "v_proj.weight"].shape == (value_dim, 32)
    assert values["use_gate"] == any(prefix + "g_proj" in name for name in weights)
    fla = FLA_CONFIGS[values["model_type"]]
    for key in ("allow_neg_eigval", "expand_k", "use_short_conv", "num_heads", "safe_gate", "lower_bound"):
        assert key not in fla or values[key] == fla[key]
    if model.config.num_attention_heads is not None:
        assert values["attn"] == HYBRID_ATTN
    loaded = AutoConfig.from_pretrained(path / "ours").to_dict()
    later = ("_name_or_path", "architectures", "dtype", "transformers_version")  # written on saving
    assert {k: v for k, v in loaded.items() if k not in later} == {
        k: v for k, v in model.config.to_dict().items() if k not in later
    }


def test_strangers_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="model type 'llama'"):
        load_fla_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**COMMON, "model_type": "kda", "head_dim": 8}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ValueError, match="no safetensors files"):
        load_fla_checkpoint(tmp_path)


def test_what_is_missing_is_named(checkpoint):
    model, path = checkpoint
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    halves = [dict(list(weights.items())[half::2]) for half in (0, 1)]
    files = [f"model-0000{half}-of-00002.safetensors" for half in (1, 2)]
    for file, half in zip(files, halves, strict=True):
        save_file(half, path / file)
    named = {name: file for file, half in zip(files, halves, strict=True) for name in half}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    assert same_logits(load_fla_checkpoint(path), model)
    del halves[1][min(halves[1])]
    save_file(halves[1], path / files[1])
    [gone] = weights.keys() - halves[0].keys() - halves[1].keys()
    with pytest.raises(ValueError, match=f"lacks weights of its model: {gone}$"):
        load_fla_checkpoint(path)
    (path / files[1]).unlink()
    with pytest.raises(ValueError, match=f"lacks {files[1]}, which model.safetensors.index.json names"):
        load_fla_checkpoint(path)


def test_tied_weights_are_not_missing(tmp_path):
    model = tiny_named("kda", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert same_logits(load_fla_checkpoint(tmp_path), model)


def test_contradicting_layers_are_refused():
    with pytest.raises(ValueError, match="place the softmax layers differently"):
        tiny_named("kda", attn=HYBRID_ATTN, layer_types=["full_attention", "linear_attention"])


# scripts/make_fla_fixtures.py wrote them.
WRITTEN_BY_FLA = sorted((Path(__file__).parent / "fla_checkpoints").iterdir())
# Keys of theirs that are not given back: they choose kernels, say how training starts, or act on nothing there either.
NOT_GIVEN_BACK = {
    "a_log_init_lower",
    "architectures",
    "attn",
    "attn_mode",
    "attnres_block_size",
    "clamp_min",
    "correction_factor",
    "elementwise_affine",
    "feature_map",
    "fuse_cross_entropy",
    "fuse_linear_cross_entropy",
    "fuse_norm",
    "fuse_swiglu",
    "hidden_act",
    "log_atk_scale_init",
    "lower_bound",
    "num_kv_heads",
    "num_v_heads",
    "output_gate_activation",
    "safe_gate",
    "squash_eps",
    "squash_x",
    "transformers_version",
    "use_gk",
    "use_gv",
    "use_inner_decay",
    "use_l2warp",
    "use_output_correction",
}


@pytest.mark.parametrize("path", WRITTEN_BY_FLA, ids=lambda path: path.name)
def test_written_by_fla(path, tmp_path):
    """The logits are equal to rounding; the parameters come back under the same names, bit for bit."""
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    model.save_pretrained(tmp_path)
    theirs, ours = load_file(path / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], x) for name, x in theirs.items())
    keys, saved = (json.loads((folder / "config.json").read_text()) for folder in (path, tmp_path))
    assert {key: value for key, value in keys.items() if key not in NOT_GIVEN_BACK and saved.get(key) != value} == {}

    expected = load_file(path / "expected.safetensors")
    assert same_logits(model, load_fla_checkpoint(path), expected["tokens"])
    with torch.no_grad():
        logits = model(expected["tokens"]).logits
        exact = model.double()(expected["tokens"]).logits
    rounding = (logits - exact).abs().max()
    assert (expected["logits"] - exact).abs().max() < 4 * rounding < 1e-4


def test_norm_and_gate_of_gla_in_two_modules(tmp_path):
    """With `fuse_norm=False` the output norm has another name."""
    path = Path(__file__).parent / "fla_checkpoints" / "gla"
    values = json.loads((path / "config.json").read_text()) | {"fuse_norm": False}
    (tmp_path / "config.json").write_text(json.dumps(values))
    weights = load_file(path / "model.safetensors")
    renamed = {name.replace("g_norm_swish_gate", "g_norm"): x for name, x in weights.items()}
    assert renamed.keys() != weights.keys()
    save_file(renamed, tmp_path / "model.safetensors")
    expected = load_file(path / "expected.safetensors")
    loaded = load_fla_checkpoint(tmp_path)
    assert same_logits(loaded, AutoModelForCausalLM.from_pretrained(path), expected["tokens"])
    loaded.save_pretrained(tmp_path / "again")
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == weights.keys()


class TestMissingWeights:
    """What vLLM's plugin asks; no kind of parameter may be left as it was drawn."""

    @pytest.mark.parametrize("kind", ["hybrid_kda", "comba", "pgdn", "without_conv", "swapped"])
    def test_each_parameter_is_missed(self, kind):
        if kind == "swapped":
            model = swapped("llama", [1], "kda")
        else:
            model = tiny_model(kind, beta_bias=True, tie_word_embeddings=kind == "comba")
        names = {name for name, _ in model.named_parameters()}
        assert not missing_weights(model.config, names) and not missing_weights(model.config, model.state_dict())
        for name in names:
            assert missing_weights(model.config, names - {name}) == {name}

    @pytest.mark.parametrize(
        "gone", ["model.layers.1.attn.A_log", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"]
    )
    def test_our_doors_refuse_a_checkpoint_without_them(self, gone, tmp_path):
        model = tiny_model("gated_deltanet")
        model.save_pretrained(tmp_path)
        state = load_file(tmp_path / "model.safetensors")
        del state[gone]
        save_file(state, tmp_path / "model.safetensors")
        doors = (
            whole_model,
            lambda path: load_model(str(path)),
            lambda path: PackedTrainer._load_from_checkpoint(SimpleNamespace(_model=model), str(path)),
        )
        for door in doors:
            with pytest.raises(ValueError, match=f"lacks weights of its model: {gone}"):
                door(tmp_path)

    def test_packed_weights_are_not_missed(self):
        model = tiny_model("gated_deltanet")
        config, names = model.config, set(model.state_dict())
        config.quantization_config = {"quant_method": "gptq", "bits": 4}
        packed = {f"{name.removesuffix('weight')}qweight" if "_proj." in name else name for name in names}
        assert packed != names and not missing_weights(config, packed)
        assert missing_weights(config, packed - {"model.layers.0.attn.q_proj.qweight"}) == {
            "model.layers.0.attn.q_proj.weight"
        }
