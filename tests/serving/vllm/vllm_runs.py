"""Small models served by vLLM on the CPU, and the tokens that transformers finds for the same prompts in float32."""

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import deltazoo  # noqa: F401

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
VOCABULARY = 512


def prompts_of(*lengths: int, seed: int = 1) -> list[list[int]]:
    torch.manual_seed(seed)
    return [torch.randint(VOCABULARY, (length,)).tolist() for length in lengths]


def small_model(rule: str, *, hybrid: bool = False, num_layers: int = 3, **keys: Any) -> Any:
    """A model whose logits differ enough from token to token that greedy text is no accident of rounding."""
    torch.manual_seed(0)
    if hybrid:
        num_layers = 4
        keys = {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            **keys,
        }
    sizes = dict(hidden_size=128, num_heads=4, vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None)
    config = AutoConfig.for_model("delta_rule", mixer=rule, num_hidden_layers=num_layers, **{**sizes, **keys})
    return spread(AutoModelForCausalLM.from_config(config))


def spread(model: Any) -> Any:
    """The model with matrices four times as large."""
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(4)
    return model.eval()


def greedy(model: Any, prompts: Sequence[list[int]], num_tokens: int = 12) -> list[list[int]]:
    """What transformers generates for each prompt alone."""
    found = []
    for prompt in prompts:
        output: Tensor = model.generate(torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False)
        found.append(output[0, len(prompt) :].tolist())
    return found


@contextmanager
def served(model: Any, path: Path, **options: Any) -> Iterator[Any]:
    """The model, saved, in vLLM, which is taken down in the end."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    if model is not None:
        model.save_pretrained(path)
    defaults = dict(max_model_len=512, max_num_batched_tokens=64, max_num_seqs=4, enable_prefix_caching=False)
    fixed = dict(skip_tokenizer_init=True, enforce_eager=True, dtype="float32")
    try:
        engine = LLM(str(path), **{**fixed, **defaults, **options})
        yield engine
    finally:
        engine = None
        gc.collect()
        cleanup_dist_env_and_memory()


def generated(engine: Any, prompts: Sequence[list[int]], num_tokens: int = 12, **options: Any) -> list[list[int]]:
    """What vLLM generates for all prompts at once."""
    return [list(x.outputs[0].token_ids) for x in outputs(engine, prompts, num_tokens, **options)]


def outputs(engine: Any, prompts: Sequence[list[int]], num_tokens: int = 12, **options: Any) -> list[Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=num_tokens, detokenize=False, ignore_eos=True)
    return engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False, **options)


def log_probs(engine: Any, prompt: list[int]) -> Tensor:
    """Log-probability of every token of a prompt after the first."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    (output,) = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    found = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
    return torch.tensor([entries[token].logprob for entries, token in found])


def adapted(model: Any, path: Path, targets: list[str]) -> Any:
    """The model with an adapter of these maps, large enough to change its text; the adapter is saved."""
    torch.manual_seed(3)
    model = get_peft_model(model, LoraConfig(r=8, target_modules=targets, lora_alpha=64)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    model.save_pretrained(path)
    return model


def add_and_abort(engine: Any, prompts: Sequence[list[int]]) -> None:
    """Begin some requests, and abort them after two steps."""
    from vllm import SamplingParams

    names = [f"aborted-{number}" for number, _ in enumerate(prompts)]
    for name, prompt in zip(names, prompts, strict=True):
        sampling = SamplingParams(temperature=0, max_tokens=50, detokenize=False)
        engine.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    for _ in range(2):
        engine.llm_engine.step()
    engine.llm_engine.abort_request(names)
