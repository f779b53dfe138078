"""Where the time of a decoding step of an accelerated model goes: on the host in eager mode, in kernels when captured.

    python scripts/profile_decoding.py qwen3_5_text kimi_linear

For the models of scripts/bench_accelerate.py, on a GPU: milliseconds of an eager step before and after
`deltazoo.accelerate`, the functions in which the host spends them, and the number of kernels; then milliseconds per
token of `deltazoo.generation.Decoder`, and the kernels of its captured step.
"""

import argparse
import cProfile
import io
import pstats
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from bench_accelerate import FAMILIES, PROMPT, make_model
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import deltazoo
from deltazoo.generation import Decoder
from deltazoo.workbench.bench.timing import now

STEPS = 50
"""Steps of each measurement."""
LINES = 24
"""Functions and kernels shown."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="+", choices=list(FAMILIES), metavar="FAMILY")
    for family in parser.parse_args().families:
        model = make_model(family, False, torch.device("cuda"), torch.bfloat16).eval()
        prompt = torch.randint(3, model.config.get_text_config().vocab_size, (1, PROMPT), device="cuda")
        with torch.no_grad():
            show_eager_step(f"{family} before", model, prompt)
            deltazoo.accelerate(model)
            show_eager_step(f"{family} after", model, prompt)
        try:
            decoder = Decoder(model, max_length=PROMPT + 4 * STEPS, eos_token_id=[])
        except ValueError as error:
            print(f"{family}: {error}")
        else:
            show_captured_step(family, decoder, prompt)


def show_eager_step(name: str, model: Any, prompt: torch.Tensor) -> None:
    """One token after the prompt, without a graph."""
    cache = model(input_ids=prompt, use_cache=True, logits_to_keep=1).past_key_values
    step = partial(model, input_ids=prompt[:, :1], past_key_values=cache)
    repeat(step)  # kernels are compiled
    milliseconds, kernels = repeat(step), kernels_of(step)
    total = sum(us for us, _, _ in kernels)
    print(f"{name}: {milliseconds:.2f} ms, {sum(n for _, n, _ in kernels)} kernels in {total / 1e3:.2f} ms")
    profiler, text = cProfile.Profile(), io.StringIO()
    profiler.runcall(repeat, step)
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(LINES)
    print("\n".join(line[:130] for line in text.getvalue().splitlines()[6:] if line))


def show_captured_step(name: str, decoder: Decoder, prompt: torch.Tensor) -> None:
    """One token of the decoder's loop, sampling included."""

    def loop(new_tokens: int) -> float:
        began = now("cuda")
        for _ in decoder.stream(prompt, max_new_tokens=new_tokens):
            pass
        return 1e3 * (now("cuda") - began)

    loop(2)
    milliseconds = (loop(3 * STEPS) - loop(2 * STEPS)) / STEPS
    kernels = kernels_of(partial(decoder._advance, first=False))
    print(f"{name} captured: {milliseconds:.3f} ms per token, {sum(n for _, n, _ in kernels)} kernels")
    for us, count, kernel in kernels[:LINES]:
        print(f"{us:9.1f} us {count:4d} x {kernel[:100]}")


def repeat(step: Callable[[], object]) -> float:
    """Milliseconds per step."""
    began = now("cuda")
    for _ in range(STEPS):
        step()
    return 1e3 * (now("cuda") - began) / STEPS


def kernels_of(step: Callable[[], object]) -> list[tuple[float, int, str]]:
    """Microseconds, launches and name of every kernel of a step, longest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    events = [event for event in profiler.key_averages() if event.device_type == DeviceType.CUDA]
    return sorted(((event.self_device_time_total, event.count, event.key) for event in events), reverse=True)


if __name__ == "__main__":
    main()
