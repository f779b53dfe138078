import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import CASES, CONFIGS, tiny_config, tiny_model, tiny_named, tokens
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Trainer, TrainingArguments

from deltazoo import DeltaRuleAttention
from deltazoo.models import DeltaRuleForCausalLM
from deltazoo.models.softmax_attention import RotaryEmbedding

CONVOLVED = ["q_proj", "k_proj", "v_proj", "b_proj", "q_conv1d", "k_conv1d", "v_conv1d", "o_norm", "o_proj"]
FLA_HUB_KEYS = {
    "delta_net": CONVOLVED,
    "gated_deltanet": [*CONVOLVED, "a_proj", "g_proj"],
    "kda": [*CONVOLVED, "f_proj.0", "f_proj.1", "g_proj.0", "g_proj.1"],
}


def same_state(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a)


@pytest.mark.parametrize(
    ("case", "max_shard_size"), [*((case, "8KB") for case in CASES), ("hybrid", "5GB"), ("tied", "5GB")]
)
def test_comes_back_through_the_auto_class(case, max_shard_size, tmp_path):
    model, ids = tiny_model(case), tokens(2, 6)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert (len([name for name in files if name.endswith(".safetensors")]) > 1) == (max_shard_size == "8KB")
    assert not [name for name in files if name.endswith((".bin", ".pt", ".pkl"))]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert same_state(loaded, model)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_named_types_come_back_as_themselves(model_type, tmp_path):
    model = tiny_named(model_type)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == (model_type, [type(model).__name__])
    assert type(AutoConfig.from_pretrained(tmp_path)) is CONFIGS[model_type]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model) and same_state(loaded, model)
    base = AutoModel.from_pretrained(tmp_path)
    assert same_state(base, model.model)


def test_weight_files_of_a_rule(tmp_path):
    """`variant` is transformers' word for a suffix of the weight files; the configuration must not use it."""
    model = tiny_model("gated_deltanet")
    model.save_pretrained(tmp_path, variant="fp16")
    assert (tmp_path / "model.fp16.safetensors").is_file()
    assert same_state(AutoModelForCausalLM.from_pretrained(tmp_path, variant="fp16"), model)


@pytest.mark.parametrize("model_type", FLA_HUB_KEYS)
def test_parameter_names_are_those_of_fla_hub(model_type):
    keys = set(tiny_named(model_type).state_dict())
    mixer = {f"attn.{name}.weight" for name in FLA_HUB_KEYS[model_type]}
    if model_type != "delta_net":
        mixer |= {"attn.A_log", "attn.dt_bias"}
    if model_type == "kda":
        mixer |= {"attn.g_proj.1.bias"}
    block = mixer | {"attn_norm.weight", "mlp_norm.weight"} | {f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
    expected = {f"model.layers.{i}.{name}" for i in range(2) for name in block}
    assert keys == expected | {"model.embeddings.weight", "model.norm.weight", "lm_head.weight"}


@pytest.mark.parametrize("case", ["gated_deltanet", "kda", "hybrid"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gate_parameters_load_in_float32(case, dtype, tmp_path):
    model = tiny_model(case)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    for name, parameter in loaded.named_parameters():
        is_gate = name.endswith(("A_log", "dt_bias"))
        assert parameter.dtype == (torch.float32 if is_gate else dtype), name
        if is_gate:
            assert torch.equal(parameter, model.get_parameter(name))
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto")
    assert same_state(again, loaded)


@pytest.mark.parametrize("case", ["delta_net", "gated_deltanet", "kda", "hybrid"])
def test_what_stays_float32_is_listed_for_transformers(case):
    model = tiny_model(case)
    wide = {name.rsplit(".", 1)[1] for name, p in model.bfloat16().named_parameters() if p.dtype == torch.float32}
    assert wide == ({"A_log", "dt_bias"} if model.config.spec.decay != "none" else set())
    assert wide <= set(model._keep_in_fp32_modules_strict)


def evaluated_in_bfloat16(model):
    arguments = TrainingArguments("runs/unused", bf16_full_eval=True, report_to="none", use_cpu=True)
    data = [{"input_ids": x, "labels": x} for x in tokens(2, 6)]
    Trainer(model, arguments, eval_dataset=data).evaluate()
    return model


CASTS = {
    "bfloat16": lambda m: m.bfloat16(),
    "half": lambda m: m.half(),
    "to dtype": lambda m: m.to(torch.bfloat16),
    "to device and dtype": lambda m: m.to("cpu", torch.float16),
    "type": lambda m: m.type(torch.bfloat16),
    "there and back": lambda m: m.bfloat16().float().bfloat16(),
    "by way of float64": lambda m: m.double().half(),
    "a copy": lambda m: copy.deepcopy(m.bfloat16()),
    "full evaluation": evaluated_in_bfloat16,
}
LONGROPE = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 32}
ROPES = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "longrope", "factor": 4.0, **LONGROPE},
]


class TestRotaryFrequencies:
    """A model that is cast has the frequencies of one that is loaded in that dtype: those of float32."""

    @pytest.mark.parametrize("cast", CASTS)
    def test_a_cast_leaves_them_as_they_are(self, cast, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        model, ids = tiny_model("hybrid"), tokens(1, 600)
        model.save_pretrained("saved")
        before = {name: x.clone() for name, x in model.named_buffers()}
        assert [name.rpartition(".")[2] for name in before] == ["inv_freq", "original_inv_freq"]
        model = CASTS[cast](model)
        assert model.dtype in (torch.bfloat16, torch.float16)
        for name, x in model.named_buffers():
            assert x.dtype == torch.float32 and torch.equal(x, before[name])
        loaded = AutoModelForCausalLM.from_pretrained("saved", dtype=model.dtype)
        with torch.no_grad():
            assert torch.equal(model(ids).logits, loaded(ids).logits)
        model.save_pretrained("again")
        again = AutoModelForCausalLM.from_pretrained("again")
        assert again.dtype == model.dtype and dict(again.named_buffers()).keys() == before.keys()
        assert all(torch.equal(x, before[name]) for name, x in again.named_buffers())

    @pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
    def test_scaled_ones_too_at_any_length(self, rope):
        """Longer than the trained length, where some are made anew, and back."""
        config = tiny_config("hybrid", max_position_embeddings=32, rope_parameters={"rope_theta": 1e4, **rope})
        exact, cast = RotaryEmbedding(config), RotaryEmbedding(config).bfloat16()
        for length in (20, 90, 20):
            positions, x = torch.arange(length)[None], torch.zeros(1)
            for wanted, got in zip(exact(x, positions), cast(x, positions), strict=True):
                assert torch.equal(got, wanted)

    def test_float64_widens_them(self):
        rotary = RotaryEmbedding(tiny_config("hybrid"))
        before = rotary.inv_freq.clone()
        assert rotary.double().inv_freq.dtype == torch.float64
        assert torch.equal(rotary.bfloat16().inv_freq, before)


def test_a_layers_own_buffer_stays_float32(tmp_path, monkeypatch):
    """A buffer that a rule declares, cast and loaded."""
    slopes = torch.linspace(0.1, 0.3, 3)
    monkeypatch.setattr(
        DeltaRuleAttention, "make_parameters", lambda self: self.register_buffer("slopes", slopes.clone())
    )
    monkeypatch.setattr(DeltaRuleAttention, "float32_buffers", ("slopes",))
    model = tiny_model("gated_deltanet")
    model.save_pretrained(tmp_path)
    for narrow in (model.bfloat16(), AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)):
        assert narrow.model.layers[0].attn.q_proj.weight.dtype == torch.bfloat16
        assert torch.equal(narrow.model.layers[0].attn.slopes, slopes)


def test_tied_embeddings_stay_tied(tmp_path):
    model = tiny_model("tied")
    assert model.lm_head.weight is model.model.embeddings.weight
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embeddings.weight


@pytest.mark.parametrize("case", ["tied", "gated_deltanet"])
def test_resized_embeddings(case, tmp_path):
    model, ids = tiny_model(case), tokens(1, 5)
    before = model(ids).logits
    model.resize_token_embeddings(80)
    assert model.config.vocab_size == model.lm_head.out_features == model.get_input_embeddings().num_embeddings == 80
    torch.testing.assert_close(model(ids).logits[..., :61], before)
    assert model(ids, labels=torch.full_like(ids, 79)).loss.isfinite()
    model.save_pretrained(tmp_path)
    assert same_state(AutoModelForCausalLM.from_pretrained(tmp_path), model)


class TestInitialisation:
    def test_missing_parameters_start_as_in_a_new_model(self, tmp_path):
        model = tiny_model("gated_deltanet")
        model.save_pretrained(tmp_path)
        state = load_file(tmp_path / "model.safetensors")
        dropped = ["model.layers.0.attn.A_log", "model.layers.0.attn.dt_bias", "model.layers.1.attn.q_conv1d.weight"]
        save_file({key: x for key, x in state.items() if key not in dropped}, tmp_path / "model.safetensors")
        loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert set(info["missing_keys"]) == set(dropped)
        for key, x in loaded.state_dict().items():
            if key not in dropped:
                assert torch.equal(x, model.state_dict()[key]), key
        rate = loaded.model.layers[0].attn.A_log.exp()
        low, high = loaded.model.layers[0].attn.spec.decay_rate_range
        assert ((low <= rate) & (rate <= high)).all()
        step = torch.nn.functional.softplus(loaded.model.layers[0].attn.dt_bias)
        assert ((step > 0.9e-3) & (step < 0.11)).all()
        assert loaded.model.layers[1].attn.q_conv1d.weight.abs().max() <= 0.5

    @pytest.mark.parametrize("case", ["gated_deltanet", "kda", "hybrid_softmax_first"])
    def test_each_missing_parameter_starts_afresh(self, case, tmp_path):
        model = tiny_model(case)
        model.save_pretrained(tmp_path)
        state = load_file(tmp_path / "model.safetensors")
        for dropped in [key for key in state if ".layers.0." in key]:
            save_file({key: x for key, x in state.items() if key != dropped}, tmp_path / "model.safetensors")
            loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
            # Another draw of the same distribution; never what happened to be in memory.
            assert loaded[dropped].abs().max() <= 3 * state[dropped].abs().max(), dropped
            assert loaded[dropped].abs().sum() > 0 or state[dropped].abs().sum() == 0, dropped
            assert all(torch.equal(loaded[key], x) for key, x in state.items() if key != dropped)

    def test_unexpected_and_misfitting_parameters_are_named(self, tmp_path):
        tiny_model("gated_deltanet").save_pretrained(tmp_path)
        state = load_file(tmp_path / "model.safetensors")
        save_file({**state, "model.layers.0.attn.w_proj.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
        _, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert set(info["unexpected_keys"]) == {"model.layers.0.attn.w_proj.weight"}
        save_file({**state, "lm_head.weight": torch.ones(3, 32)}, tmp_path / "model.safetensors")
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            AutoModelForCausalLM.from_pretrained(tmp_path)
        options = {"ignore_mismatched_sizes": True, "output_loading_info": True}
        _, info = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
        assert [key for key, *_ in info["mismatched_keys"]] == ["lm_head.weight"]

    @pytest.mark.parametrize("case", CASES)
    def test_meta_device_then_real(self, case):
        config = tiny_config(case)
        with torch.device("meta"):
            model = DeltaRuleForCausalLM(config)
        assert {p.device.type for p in model.parameters()} == {"meta"}
        expected = sum(p.numel() for p in tiny_model(case).parameters())
        assert sum(p.numel() for p in model.parameters()) == expected

    def test_initialising_again_leaves_loaded_weights(self, tmp_path):
        model = tiny_model("gated_deltanet")
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        loaded.init_weights()
        assert same_state(loaded, model)

    def test_linear_weights_follow_initializer_range(self):
        for std in (0.02, 0.1):
            model = tiny_model("gated_deltanet", initializer_range=std, hidden_size=128)
            weights = torch.cat(
                [m.weight.detach().flatten() for m in model.modules() if isinstance(m, torch.nn.Linear)]
            )
            assert weights.std().item() == pytest.approx(std, rel=0.02)


def test_disk_offload_and_device_map(tmp_path):
    model, ids = tiny_model("hybrid"), tokens(2, 6)
    model.save_pretrained(tmp_path)
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    device_map = {"model.embeddings": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu", "model.norm": "cpu"}
    device_map |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map, offload_folder=tmp_path / "offload")
    assert torch.equal(loaded.generate(ids, max_new_tokens=4, do_sample=False), expected)
