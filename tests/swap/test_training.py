"""Training swapped models: gradients, checkpointing, transformers' Trainer, LoRA, half precision."""

import pytest
import torch
from tiny_families import VOCAB, precise, swapped, tokens
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import deltazoo
from deltazoo.layers import parameters_without_decay
from deltazoo.swap import swapped_layers


def gradients(model, ids, **kwargs):
    model.train().zero_grad()
    model(ids, labels=ids, use_cache=False, **kwargs).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("rule", deltazoo.list_rules())
def test_every_new_parameter_learns_at_once(rule):
    """Every parameter gets a gradient, although gates start nearly constant and their matrices nearly zero."""
    model = swapped("qwen3", [1], rule, keep_teacher=True)
    model.config._attn_implementation = "eager"
    found = gradients(model, tokens(2, 20))
    for name, _ in model.named_parameters():
        assert found[name].isfinite().all() and found[name].abs().max() > 0, name


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "gpt_neox", "gpt2", "mixtral"])
def test_gradient_checkpointing(family):
    model, ids = precise(family, swapped(family)), tokens(2, 12)
    options = {"attention_mask": (torch.arange(12) >= torch.tensor([[0], [3]])).long()}
    expected = gradients(model, ids, **options)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    actual = gradients(model, ids, **options)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(actual[name], gradient), name


def test_trainer_learns_a_sequence_and_resumes(tmp_path):
    model = swapped("gpt_neox", "all", "kda", keep_teacher=True)
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in tokens(4, 12)]
    arguments = {
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "max_steps": 12,
        "save_steps": 6,
        "gradient_checkpointing": True,
        "report_to": [],
        "logging_steps": 1,
        "use_cpu": True,
        "disable_tqdm": True,
    }
    trainer = Trainer(model, TrainingArguments(**arguments), train_dataset=rows)
    decayed = set(trainer.get_decay_parameter_names(model))
    assert not decayed & {name for name in parameters_without_decay(model) if name.endswith(("A_log", "dt_bias"))}
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.5 * losses[0]

    resumed = Trainer(swapped("gpt_neox", "all", "kda"), TrainingArguments(**arguments), train_dataset=rows)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    for (name, parameter), (_, other) in zip(model.named_parameters(), resumed.model.named_parameters(), strict=True):
        assert torch.equal(parameter, other), name


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_lora(family, tmp_path):
    peft = pytest.importorskip("peft")
    model = swapped(family, [0, 2]).train()
    adapted = peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False))
    names = {name for name, m in adapted.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer)}
    delta = {name.rsplit(".", 1)[1] for name in names if ".delta." in name}
    assert delta == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert any(".delta." not in name for name in names)  # the original model's own targets in the layers between
    adapted.eval()
    ids = tokens(2, 6)
    with torch.no_grad():
        expected = adapted(ids).logits
        adapted.save_pretrained(tmp_path)
        merged = adapted.merge_and_unload()
        torch.testing.assert_close(merged(ids).logits, expected, rtol=1e-4, atol=1e-4)
        fresh = swapped(family, [0, 2])
        assert torch.equal(peft.PeftModel.from_pretrained(fresh, tmp_path)(ids).logits, expected)


@pytest.mark.parametrize("rule", ["gated_deltanet", "kda"])
def test_dora(rule):
    """It divides by the length of each row of a weight: rows of zeros at the start would give NaN."""
    peft = pytest.importorskip("peft")
    model, ids = swapped("llama", [0, 2], rule).train(), tokens(2, 6)
    with torch.no_grad():
        expected = model(ids).logits
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", use_dora=True)).train()
    torch.testing.assert_close(adapted(ids).logits, expected, rtol=1e-4, atol=1e-5)
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(3):
        loss = adapted(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]


def test_autocast_keeps_states_float32():
    model = swapped("llama", "all")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        cache = model(tokens(1, 8), use_cache=True).past_key_values
    assert {layer.state.recurrent.dtype for layer in cache.layers} == {torch.float32}


def test_loaded_models_train(tmp_path):
    swapped("olmo2").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).train()
    assert all(p.requires_grad for layer in swapped_layers(model).values() for p in layer.parameters())
    ids = torch.randint(2, VOCAB, (1, 9))
    assert gradients(model, ids).keys() == dict(model.named_parameters()).keys()
