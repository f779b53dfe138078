"""Training transformers' own classes: plain checkpoints, packed documents kept apart, errors by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from foreign_models import DECAY_PARAMETERS
from fresh_process import run_well_after_transformers
from native_runs import INSTALLED, SECTIONS, native_config
from safetensors.torch import load_file
from tiny_runs import write_text_folder
from transformers import AutoModelForCausalLM

import deltazoo
from deltazoo.compat.transformers import new_model
from deltazoo.compat.transformers.new_model import architectures, refuse_unrunnable
from deltazoo.layers import parameters_without_decay
from deltazoo.runtime import RuntimeOptions
from deltazoo.training import RunConfig, TokenizerConfig, TrainingResult, train
from deltazoo.training.config import as_mapping
from deltazoo.training.evaluate import packs_documents, score_documents
from deltazoo.training.folder import checkpoints
from deltazoo.training.loading import load_checkpoint
from deltazoo.training.run import build_model
from deltazoo.training.tokens import build_tokenizer, collate_side_by_side
from deltazoo.training.trainer import PackedTrainer

TRAINED = [name for name in INSTALLED if name != "qwen3_5_moe_text"]
"""transformers 5.23 has a tokenizer of its own for that one."""
TOKENIZER = build_tokenizer(TokenizerConfig("byte"), [])
PLAIN = """
import json, sys
import torch
import transformers
from transformers import AutoModelForCausalLM

found = {}
for path in sys.argv[1:]:
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    with torch.no_grad():
        logits = model.eval()(torch.arange(3, 73)[None]).logits
    leftover = [str(key) for name in ("missing_keys", "unexpected_keys", "mismatched_keys") for key in info[name]]
    found[path] = [leftover, logits.double().tolist()]
assert not any(name.partition(".")[0] == "deltazoo" for name in sys.modules)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_folder(tmp_path_factory.mktemp("text") / "library", 3000)


@pytest.fixture(scope="module")
def runs(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[RunConfig, TrainingResult]]:
    """A finished run of every architecture: its configuration and result."""
    folder = tmp_path_factory.mktemp("runs")
    configs = {name: native_config(text, folder / name, name) for name in TRAINED}
    return {name: (config, train(config)) for name, config in configs.items()}


@pytest.fixture(params=TRAINED)
def run(request: pytest.FixtureRequest, runs: dict[str, Any]) -> tuple[RunConfig, TrainingResult]:
    return runs[request.param]


@pytest.fixture(scope="module")
def plain_results(runs: dict[str, Any]) -> dict[str, Any]:
    """By folder: what transformers alone could not load, and its logits."""
    paths = [str(result.model_path) for _, result in runs.values()]
    return json.loads(run_well_after_transformers(PLAIN, *paths))


def built(architecture: str, runtime: RuntimeOptions | None = None, **changes: Any) -> Any:
    """With large weights, so that what each layer computes shows in the loss."""
    torch.manual_seed(0)
    section = {"architecture": architecture, **SECTIONS[architecture], "initializer_range": 0.2, **changes}
    return build_model(section, TOKENIZER, runtime)


def losses(result: TrainingResult) -> dict[str, list[float]]:
    return {key: [entry[key] for entry in result.log_history if key in entry] for key in ("loss", "eval_loss")}


def test_the_list_is_of_models_with_text_alone() -> None:
    assert set(INSTALLED) <= set(architectures()) <= {*SECTIONS, "qwen4_exp_text"}


def test_a_run_leaves_a_checkpoint_for_transformers_alone(
    run: tuple[RunConfig, TrainingResult], plain_results: dict[str, Any]
) -> None:
    config, result = run
    trained = losses(result)["loss"]
    assert len(trained) == 4 and all(np.isfinite(trained)) and trained[-1] < trained[0]
    written = json.loads((result.model_path / "config.json").read_text())
    assert "deltazoo" not in json.dumps(written).lower()
    assert written["model_type"] == config.architecture and written["use_cache"]
    assert written["architectures"] == [type(built(str(config.architecture))).__name__]

    leftover, logits = plain_results[str(result.model_path)]
    assert not leftover
    model, tokenizer = load_checkpoint(str(result.model_path), "cpu")
    assert len(tokenizer) == model.config.vocab_size == 320
    with torch.no_grad():
        found = model(torch.arange(3, 73)[None]).logits.double()
    expected = torch.tensor(logits, dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5 * float(expected.abs().max()))


def test_a_resumed_run_has_the_losses_of_an_unbroken_one(run: tuple[RunConfig, TrainingResult], tmp_path: Path) -> None:
    config, unbroken = run
    shutil.copytree(config.output, tmp_path / "run")
    for later in (checkpoints(tmp_path / "run")[-1], tmp_path / "run" / "model"):
        shutil.rmtree(later)
    (tmp_path / "run" / "result.json").unlink()
    values = as_mapping(config)
    resumed = train(
        native_config(Path(values["data"]["text"]), tmp_path / "run", str(config.architecture)), resume=True
    )
    assert losses(resumed) == losses(unbroken)
    first, second = (load_file(result.model_path / "model.safetensors") for result in (unbroken, resumed))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_evaluation_packs_documents(run: tuple[RunConfig, TrainingResult]) -> None:
    """A document has the same score in a pack, alone, and in pieces with a cache."""
    model, tokenizer = load_checkpoint(str(run[1].model_path))
    assert packs_documents(model) and any("Accelerated" in type(layer).__name__ for layer in model.modules())
    texts = [f"{n} def read(self, size=-1):\n    return {n}\n" * (n + 1) for n in range(4)]
    together = score_documents(model, tokenizer, texts)
    alone = sum(score_documents(model, tokenizer, [text], tokens_at_once=9).nats for text in texts)
    assert together.nats == pytest.approx(alone, rel=1e-4)


def packed_and_one_by_one(model: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Loss and gradients of two packed rows, and of their documents one after another."""
    model.config.output_router_logits = False  # that loss is a mean over all tokens of a batch
    model.train()
    generator = np.random.default_rng(0)
    rows = [[generator.integers(3, 250, length) for length in row] for row in ([5, 1, 66, 24], [96])]
    batch = {name: x.to(model.device) for name, x in collate_side_by_side(rows).items()}
    loss = model(**batch).loss
    loss.backward()
    packed = {"loss": loss.detach(), **{name: parameter.grad.clone() for name, parameter in model.named_parameters()}}
    model.zero_grad()
    documents = [torch.from_numpy(document).to(model.device) for row in rows for document in row]
    targets, total = sum(len(document) - 1 for document in documents), torch.zeros_like(loss)
    for document in documents:
        if len(document) > 1:
            loss = model(document[None], labels=document[None], num_items_in_batch=targets).loss
            loss.backward()
            total += loss.detach()
    return packed, {"loss": total, **{name: parameter.grad for name, parameter in model.named_parameters()}}


@pytest.mark.parametrize("architecture", INSTALLED)
def test_packed_rows_have_the_loss_and_gradients_of_their_documents(architecture: str) -> None:
    model = built(architecture).double()
    model.set_experts_implementation("eager")  # the only one in float64
    packed, expected = packed_and_one_by_one(model)
    for name, found in packed.items():
        torch.testing.assert_close(found, expected[name].double(), rtol=1e-5, atol=1e-7, msg=name, check_dtype=False)


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", INSTALLED)
def test_packed_rows_on_a_gpu(architecture: str) -> None:
    """With the fused convolution and the operator's kernels, in float32."""
    packed, expected = packed_and_one_by_one(built(architecture).cuda())
    for name, found in packed.items():
        error, size = (found - expected[name]).norm(), expected[name].norm()
        allowed = 64e-3 if name.endswith(DECAY_PARAMETERS) else 1e-3  # sums over a chunk whose terms cancel
        assert error <= allowed * size + 1e-6, f"{name}: error {error:.1e}, size {size:.1e}"


def test_files_have_the_names_that_other_programs_read(runs: dict[str, Any], tmp_path: Path) -> None:
    """OLMo Hybrid's norms as vLLM and SGLang call them; transformers writes others."""
    if "olmo_hybrid" not in runs:
        pytest.skip("deltazoo cannot accelerate OLMo Hybrid of this version of transformers")
    for folder in (runs["olmo_hybrid"][1].model_path, *checkpoints(Path(runs["olmo_hybrid"][0].output))):
        names = set(load_file(folder / "model.safetensors"))
        norms = {name.removeprefix("model.layers.").removesuffix(".weight") for name in names if "layer" in name}
        assert {name for name in norms if "layernorm" in name or "layer_norm" in name} == {
            *("0.input_layernorm", "0.post_attention_layernorm"),
            *("1.post_attention_layernorm", "1.post_feedforward_layernorm"),
        }
        assert {f"0.linear_attn.{x}_conv1d" for x in "qkv"} < norms
    model = AutoModelForCausalLM.from_pretrained(runs["olmo_hybrid"][1].model_path)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    new_model.write_served_names(model, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("architecture", INSTALLED)
def test_decay_gates_norms_and_biases_do_not_decay(architecture: str) -> None:
    model = built(architecture)
    without = parameters_without_decay(model)
    for name, _ in model.named_parameters():
        spared = ("A_log", "dt_bias", "norm.weight", "layernorm.weight", ".bias")
        assert (name in without) == name.endswith(spared), name


@pytest.mark.parametrize(("accumulation", "processes"), [(1, 1), (4, 1), (2, 2)])
def test_the_load_balancing_loss_counts_once_per_step(
    accumulation: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built("qwen3_5_moe_text", router_aux_loss_coef=0.5)
    ids = torch.arange(3, 51)[None]
    plain = model(ids, labels=ids)
    monkeypatch.setattr(PackedTrainer, "__init__", lambda self: None)
    trainer: Any = PackedTrainer()
    trainer._model = model
    trainer.accelerator = type("Accelerator", (), {"num_processes": processes, "unwrap_model": lambda self, m: m})()
    arguments = {"average_tokens_across_devices": True, "n_gpu": 1, "gradient_accumulation_steps": accumulation}
    trainer.args = type("Arguments", (), arguments)
    trainer.model, trainer.model_accepts_loss_kwargs, trainer.get_tp_size = model, True, lambda: 1
    trainer.label_smoother = trainer.compute_loss_func = None
    counted = torch.tensor(47 * accumulation * processes)  # tokens of a step, over all processes
    found = trainer.compute_loss(model, {"input_ids": ids, "labels": ids}, num_items_in_batch=counted)
    cross_entropy = plain.loss - 0.5 * plain.aux_loss
    # Trainer adds up the passes; DDP takes the mean of the processes.
    torch.testing.assert_close(found * accumulation, cross_entropy + 0.5 * plain.aux_loss)


def test_runtime_options_reach_the_layers() -> None:
    model = built("qwen3_5_text", RuntimeOptions(backend="reference"))
    assert [layer.backend for layer in deltazoo.report(model).layers] == ["reference"]


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("qwen3", {}, "model.architecture: unknown model type 'qwen3'; did you mean 'qwen3_next'"),
        (
            "qwen3_5",
            {},
            "model.architecture=qwen3_5 is in transformers no language model of text alone; known: qwen3_n",
        ),
        ("qwen4_exp_text", {}, "its sparse softmax layers, which pool neighbouring tokens, would mix the documents"),
        (
            "olmo_hybrid",
            {"hiden_size": 8},
            "unknown field of olmo_hybrid 'model.hiden_size'; did you mean 'hidden_size'",
        ),
        ("olmo_hybrid", {"num_heads": 8}, "unknown field of olmo_hybrid 'model.num_heads'"),
        ("olmo_hybrid", {"hidden_size": "wide"}, "model: .*hidden_size.* expected int, got str"),
        ("qwen3_5_text", {"layer_types": ["linear_attention"]}, r"num_hidden_layers.* \(2\) must be equal"),
        ("qwen3_5_text", {"layer_types": ["full_attention"] * 2}, "has no linear_attention"),
        ("qwen3_5_text", {"layer_types": ["linear_attention"] * 2}, "the model could not generate"),
        ("qwen3_5_text", {"num_key_value_heads": 3}, "num_attention_heads=4 must be a multiple of .*=3"),
        ("qwen3_5_text", {"linear_num_key_heads": 3}, "linear_num_value_heads=4 must be a multiple of .*=3"),
        ("qwen3_5_text", {"hidden_act": "gelu"}, "our convolution uses SiLU"),
        ("qwen3_5_text", {"hidden_act": "sillu"}, "qwen3_5_text cannot be built with these fields: KeyError: 'sillu'"),
        ("qwen3_5_text", {"dtype": "bfloat16"}, "model.dtype has no effect on the training of qwen3_5_text"),
        ("qwen3_5_text", {"use_cache": False}, "model.use_cache has no effect"),
        ("qwen3_5_moe_text", {"num_experts_per_tok": 5}, "qwen3_5_moe_text cannot run with these fields"),
        ("qwen3_next", {"num_experts": 0}, "output_router_logits=true balances experts, and no layer has experts"),
        ("kimi_linear", {"moe_intermediate_size": 12}, "model.moe_intermediate_size=12 must be a multiple of 8"),
        ("olmo_hybrid", {"rms_norm_eps": -1.0}, "model.rms_norm_eps must not be negative"),
        ("kimi_linear", {"n_group": 3}, "kimi_linear cannot run with these fields"),
        ("bailing_hybrid", {"qk_rope_head_dim": 3}, "bailing_hybrid cannot run with these fields"),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 0}, "qwen3_5_text cannot run with these fields"),
        (
            "qwen3_5_moe_text",
            {"output_router_logits": False, "router_aux_loss_coef": 0.1},
            "acts only with model.output_router_logits=true",
        ),
        ("kimi_linear", {"output_router_logits": True}, "model.output_router_logits"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(architecture: str, changes: dict[str, Any], message: str) -> None:
    if architecture in (*SECTIONS, "qwen4_exp_text") and architecture not in architectures():
        pytest.skip(f"this version of transformers has no {architecture}")
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        section = {"architecture": architecture, **SECTIONS.get(architecture, {}), **changes}
        refuse_unrunnable(build_model(section, TOKENIZER))


@pytest.mark.parametrize("architecture", INSTALLED)
def test_what_can_run_is_not_refused(architecture: str) -> None:
    with torch.device("meta"):
        refuse_unrunnable(build_model({"architecture": architecture, **SECTIONS[architecture]}, TOKENIZER))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"mixer": "kda"}}, "model.mixer=kda and model.architecture=olmo_hybrid name two models"),
        ({"model": {"vocab_size": 99}}, "model.vocab_size is set by the tokenizer"),
        ({"model": {"backend": "reference"}}, "give runtime.backend instead"),
        ({"runtime": {"recompute": "block"}}, "runtime.recompute acts on our own models.*gradient_checkpointing"),
    ],
)
def test_sections_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    from deltazoo.training.config import from_mapping

    values = as_mapping(native_config(tmp_path, tmp_path, "olmo_hybrid"))
    for section, keys in changes.items():
        values[section] |= keys
    with pytest.raises(ValueError, match=message):
        from_mapping(RunConfig, values)


def test_a_tokenizer_that_would_not_come_back_is_refused(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for `qwen3_5_moe_text` in transformers 5.23, whose checkpoints get Qwen3.5's tokenizer whatever is saved."""
    byte = build_tokenizer(TokenizerConfig("byte"), [])
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda folder: byte)
    with pytest.raises(
        ValueError, match="with every checkpoint of qwen3_5_text, which would split text in another way"
    ):
        train(native_config(text, tmp_path / "run", "qwen3_5_text"))


def test_an_unknown_field_leaves_nothing_behind(text: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'hidden_size'"):
        train(native_config(text, tmp_path / "run", "olmo_hybrid", model={"hidden_sizes": 8}))
    assert not (tmp_path / "run").exists()


def test_gradient_checkpointing_and_bfloat16(text: Path, tmp_path: Path) -> None:
    """Recomputed blocks are told of packing again."""
    plain, recomputed, half = (
        losses(train(native_config(text, tmp_path / name, "qwen3_5_text", training={"steps": 2, **keys})))
        for name, keys in (
            ("plain", {}),
            ("recomputed", {"gradient_checkpointing": True}),
            ("half", {"precision": "bf16"}),
        )
    )
    assert recomputed == plain
    assert half["loss"] == pytest.approx(plain["loss"], rel=1e-2)


def test_transformers_generates_from_a_checkpoint(run: tuple[RunConfig, TrainingResult]) -> None:
    ours, tokenizer = load_checkpoint(run[0].output, "cpu")
    theirs = AutoModelForCausalLM.from_pretrained(run[1].model_path).eval()
    prompt = tokenizer("def read(self):", return_tensors="pt", return_token_type_ids=False)
    made = [model.generate(**prompt, max_new_tokens=6, do_sample=False) for model in (ours, theirs)]
    assert torch.equal(*made)
