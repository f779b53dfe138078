import inspect

import pytest
import torch
from tiny_models import TYPES, tiny_config, tiny_model, tiny_named, tokens
from transformers import AutoModelForCausalLM
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from deltazoo.generation.cache import CACHE
from deltazoo.models import DeltaRuleForCausalLM

peft = pytest.importorskip("peft")


def adapted_modules(model):
    return {name for name, module in model.named_modules() if isinstance(module, peft.tuners.lora.LoraLayer)}


@pytest.mark.parametrize("model_type", TYPES)
def test_lora_has_default_targets(model_type):
    model = peft.get_peft_model(tiny_named(model_type), peft.LoraConfig())
    names = {name.rpartition(".")[2] for name in adapted_modules(model)}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize("case", ["gated_deltanet", "kda", "hybrid"])
def test_all_linear_reaches_every_projection_with_gradients(case):
    model = tiny_model(case).train()
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)} - {"lm_head"}
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", init_lora_weights="gaussian"))
    assert {name.removeprefix("base_model.model.") for name in adapted_modules(model)} == linear
    ids = tokens(2, 8)
    model(input_ids=ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            assert parameter.grad.abs().max() > 0, name


def test_adapted_model_generates_and_comes_back(tmp_path):
    tiny_model("gated_deltanet").save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    torch.manual_seed(0)
    model = peft.get_peft_model(base, peft.LoraConfig(init_lora_weights=False)).eval()
    model.save_pretrained(tmp_path / "adapter")
    ids = tokens(2, 6)
    expected = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert torch.equal(loaded.generate(input_ids=ids, max_new_tokens=6, do_sample=False), expected)
    merged = loaded.merge_and_unload()
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["gated_deltanet", "kda", "hybrid_kda", "efla", "gla", "eda", "q_delta", "pgdn"])
def test_quantisers_leave_gate_projections_alone(case):
    """bitsandbytes and quanto call transformers' rule with names of modules, torchao with parameters."""
    config = tiny_config(case)
    config.quantization_config = {"quant_method": "torchao"}  # set by from_pretrained before the model is made
    model = DeltaRuleForCausalLM(config)
    left_alone = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    kept = ("q_proj", "k_proj", "v_proj", "g_proj", "o_proj", "erase_proj")
    gates = {name for name in linear if ".attn." in name and name.split(".attn.")[1].split(".")[0] not in kept}
    assert gates
    for name in linear:
        for asked in (name, f"{name}.weight"):
            if name != "lm_head":  # whose parameter torchao leaves alone by other means
                assert should_convert_module(asked, left_alone) == (name not in gates), asked
    assert not should_convert_module("lm_head", left_alone)
    loaded_as = model._get_dtype_plan(torch.float16)
    assert not any("_proj" in name for name in loaded_as), "only quantisers are to treat them differently"


@pytest.mark.parametrize("case", ["gated_deltanet", "hybrid_kda"])
def test_prompt_tuning(case):
    """Prompt tuning passes virtual tokens as embeddings, and masks as floats."""
    options = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model, ids = peft.get_peft_model(tiny_model(case), options).eval(), tokens(2, 6)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    virtual = model.get_prompt(batch_size=2)
    embeds = torch.cat([virtual, model.get_input_embeddings()(ids)], dim=1)
    alone = model.base_model(inputs_embeds=torch.cat([embeds[:1, :3], embeds[:1, 5:]], dim=1)).logits
    padded = model(input_ids=ids, attention_mask=mask, labels=ids)
    torch.testing.assert_close(padded.logits[:1, 5:], alone[:, 3:], rtol=1e-4, atol=1e-5)
    padded.loss.backward()
    assert next(p for p in model.parameters() if p.requires_grad).grad.abs().max() > 0
    generate = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    without_cache = model.generate(**generate, use_cache=False)
    if CACHE not in inspect.getsource(peft.PeftModelForCausalLM.prepare_inputs_for_generation).split('"'):
        # PEFT does not find the cache under its new name, and runs the virtual tokens again with every token.
        with pytest.raises(ValueError, match="attention_mask must have shape"):
            model.generate(**generate)
        return
    assert torch.equal(model.generate(**generate), without_cache)
