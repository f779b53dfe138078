"""Real graphs: losses and gradients of captured training steps are those of eager ones, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from captured_training import assert_same, reasons, replayed, train
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import deltazoo
from deltazoo.models import DeltaRuleConfig, DeltaRuleForCausalLM

pytestmark = pytest.mark.gpu
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "head_dim": 128,
    "intermediate_size": 512,
    "vocab_size": 512,
}
SOFTMAX = {"num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["linear_attention", "full_attention"]}
STEPS = 6
KINDS = ("padded", "packed")


def own(mixer: str = "gated_deltanet", dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    runtime = {name: options.pop(name) for name in ("recompute",) if name in options}
    with torch.device("cuda"):
        return DeltaRuleForCausalLM(DeltaRuleConfig(mixer=mixer, **{**SIZES, **options}), **runtime).to(dtype)


def swapped(layers: str = "all") -> Any:
    sizes = {name: value for name, value in SIZES.items() if name not in ("num_heads", "head_dim")}
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, pad_token_id=0, **sizes))
        deltazoo.swap_attention(model, "gated_deltanet", layers=layers)
    return model.bfloat16()


def checkpointed(make: Callable[[], Any]) -> Any:
    model = make()
    model.gradient_checkpointing_enable()
    return model


def adapted(make: Callable[[], Any], dropout: float) -> Any:
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(r=4, lora_dropout=dropout, target_modules=["q_proj", "o_proj"])
    return peft.get_peft_model(make(), options)


def accelerated() -> Any:
    transformers = pytest.importorskip("transformers.models.qwen3_next")
    config = transformers.Qwen3NextConfig(
        hidden_size=256, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=128,
        intermediate_size=512, vocab_size=512, layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=128, linear_value_head_dim=128,
        mlp_only_layers=[0, 1],
    )  # fmt: skip
    with torch.device("cuda"):
        model = transformers.Qwen3NextForCausalLM(config).bfloat16()
    deltazoo.accelerate(model)
    return model


def batches(kind: str, shape: tuple[int, int]) -> list[dict[str, Tensor]]:
    generator, made = torch.Generator().manual_seed(1), []
    for step in range(STEPS):
        ids = torch.randint(1, 512, shape, generator=generator)
        batch = {"input_ids": ids, "labels": ids}
        if kind == "padded":
            mask = torch.ones(shape, dtype=torch.long)
            mask[0, shape[1] - 5 - step :] = 0
            batch |= {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
        if kind == "packed":
            cuts = torch.randperm(shape[1] - 1, generator=generator)[: 9 + step].sort().values + 1
            batch["cu_seqlens"] = torch.cat([torch.tensor([0]), cuts, torch.tensor([shape[1]])]).int()
        made.append({name: x.cuda() for name, x in batch.items()})
    return made


def both(make: Callable[[], Any]) -> tuple[Any, Any]:
    models = []
    for option in (False, "auto"):
        torch.manual_seed(0)
        model = make().train()
        owner = model.get_base_model() if hasattr(model, "get_base_model") else model
        if hasattr(owner, "set_runtime"):
            owner.set_runtime(captured_training=option)
        else:
            deltazoo.accelerate(owner, captured_training=option)
        models.append(model)
    return models[0], models[1]


MODELS: dict[str, Callable[[], Any]] = {
    **{rule: lambda rule=rule: own(rule) for rule in ("gated_deltanet", "delta_net", "kda", "gated_deltaproduct")},
    **{level: lambda level=level: own(recompute=level) for level in ("elementwise", "states", "nested")},
    "hybrid": lambda: own(**SOFTMAX),
    "checkpointed": lambda: checkpointed(own),
    "adapters": lambda: adapted(own, 0.0),
    "adapters with dropout": lambda: adapted(own, 0.2),
    "swapped": swapped,
    "swapped half": lambda: swapped("1:1"),
    "swapped, checkpointed": lambda: checkpointed(swapped),
    "accelerated": accelerated,
}


CASES = [(case, "plain") for case in MODELS]
CASES += [(case, kind) for case in ("gated_deltanet", "hybrid", "swapped half", "accelerated") for kind in KINDS]


@pytest.mark.parametrize(("case", "kind"), CASES)
def test_bits(case, kind):
    shape = (1, 512) if kind == "packed" else (2, 256)
    eager, captured = both(MODELS[case])
    assert_same(train(eager, batches(kind, shape)), train(captured, batches(kind, shape)))
    assert replayed(captured) >= STEPS - 3, reasons(captured)


def test_autocast():
    for make in (lambda: own(dtype=torch.float32), lambda: checkpointed(lambda: own(dtype=torch.float32))):
        eager, captured = both(make)
        assert_same(*(train(model, batches("plain", (2, 256)), autocast="cuda") for model in (eager, captured)))
        assert replayed(captured) == STEPS - 2, reasons(captured)


def test_parameters_that_fsdp2_gathers():
    from deltazoo.distributed import fully_shard_model

    torch.distributed.init_process_group("nccl", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        eager, captured = map(fully_shard_model, both(own))
        found = [train(model, batches("plain", (2, 256))) for model in (eager, captured)]
        assert_same(*[[[loss, *[d.to_local() for d in gradients]] for loss, *gradients in steps] for steps in found])
    finally:
        torch.distributed.destroy_process_group()
    assert replayed(captured) == STEPS - 2, reasons(captured)


def test_empty_sequences_at_the_end_change_no_bit():
    from deltazoo.layers.sequences import PackedSequences

    with torch.device("cuda"):
        layer = deltazoo.layers.make_layer("gated_deltanet", hidden_size=256, num_heads=2, head_dim=128).bfloat16()
        x = torch.randn(1, 300, 256, dtype=torch.bfloat16)
        plain = PackedSequences.from_cu_seqlens(torch.tensor([0, 70, 71, 300], dtype=torch.int32), 300)
    found = []
    for sequences in (plain, plain.padded()):
        y = layer(x, sequences=sequences)
        found.append([y, *torch.autograd.grad(y.float().square().sum(), list(layer.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_generation_between_steps():
    found = []
    for model in both(own):
        seen = []
        for batch in batches("plain", (2, 256)):
            seen += train(model, [batch])
            model.eval()
            prompt = batch["input_ids"][:, :16]
            seen.append([model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)])
            model.train()
        found.append(seen)
    assert_same(*found)


def test_interleaved_shapes_of_one_pool_and_evaluation_between():
    found = []
    for model in both(own):
        seen = []
        for one, two in zip(batches("plain", (2, 256)), batches("plain", (1, 384)), strict=True):
            seen += train(model, [one, two])
            with torch.no_grad():
                seen.append([model(**two, use_cache=False).loss])
        found.append(seen)
    assert_same(*found)


def test_a_block_that_waits_for_the_device_runs_eagerly(monkeypatch):
    _, model = both(own)
    kind = type(model.model.layers[1].mlp)
    original = kind.forward

    def waits(self: Any, x: Tensor) -> Tensor:
        assert float(x.detach().sum()) == float(x.detach().sum())
        return original(self, x)

    monkeypatch.setattr(kind, "forward", waits)
    train(model, batches("plain", (2, 256)))
    assert replayed(model) == 0
    assert "waits for the device" in reasons(model)


def test_a_failed_capture_leaves_the_device_usable(monkeypatch):
    from deltazoo.models.captured_training import graphs

    eager, captured = both(own)
    original = graphs.CapturedStack._backward

    def failing(self: Any) -> Any:
        original(self)
        raise RuntimeError("no graph today")

    monkeypatch.setattr(graphs.CapturedStack, "_backward", failing)
    stream = torch.cuda.current_stream()
    assert_same(train(eager, batches("plain", (2, 256))), train(captured, batches("plain", (2, 256))))
    assert torch.cuda.current_stream() == stream
    assert "no graph today" in reasons(captured)
    monkeypatch.undo()
    _, again = both(own)
    train(again, batches("plain", (2, 256)))
    assert replayed(again) == STEPS - 2


def test_a_graph_of_the_whole_step_can_be_captured_by_hand():
    _, model = both(own)
    batch = batches("plain", (2, 256))[0]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            model(**batch, use_cache=False).loss.backward()
            model.zero_grad()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
    graph.replay()
    model.set_runtime(captured_training=False)
    assert torch.equal(loss, model(**batch, use_cache=False).loss)


def test_memory():
    peaks = []
    for model in both(own):
        train(model, batches("plain", (4, 2048))[:3])
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        train(model, batches("plain", (4, 2048)))
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] <= 1.05 * peaks[0]
