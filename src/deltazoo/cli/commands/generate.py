"""``deltazoo generate PATH --prompt ...``: sample from a checkpoint."""

from typing import Annotated, Any

import typer
from rich.console import Console

from deltazoo.cli.options import CheckpointArgument, DeviceOption
from deltazoo.cli.rule_files import LoadOption

_EXAMPLE = 'Example: [bold]deltazoo generate runs/quickstart --prompt "def read(self, size=-1):"[/]'
_DRAWN_OTHERWISE = {"min_p": 0, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "top_h": None}
"""Of a generation config: ways to draw tokens that only `model.generate` knows, and the value that changes nothing, as
None does."""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("generate", epilog=_EXAMPLE)(generate)


def generate(
    path: CheckpointArgument,
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Upper limit of generated tokens.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from this many of the likeliest tokens.")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=1.0,
            help="Sample from the likeliest tokens of this total probability; 0.95 unless given.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    prefill_chunk: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the prompt per forward pass; by default all.")
    ] = None,
    compile_step: Annotated[
        bool, typer.Option("--compile", help="Compile the decoding step: up to a minute first, then faster.")
    ] = False,
    load: LoadOption = None,
    device: DeviceOption = None,
) -> None:
    """Continue a prompt, and print the text while it is generated."""
    import time

    from deltazoo.training.checkpoint_path import resolve_checkpoint

    if temperature == 0 and (top_k is not None or top_p is not None):
        raise ValueError("--top-k and --top-p act on sampling, and with --temperature 0 there is none: leave them out")
    path = resolve_checkpoint(path)

    from transformers import TextStreamer, set_seed

    from deltazoo.generation import generate as continue_prompt
    from deltazoo.generation.position_limit import check_positions
    from deltazoo.models import DeltaRuleForCausalLM
    from deltazoo.training.loading import load_checkpoint

    errors = Console(stderr=True)
    with errors.status(f"loading {path}"):
        model, tokenizer = load_checkpoint(path, device)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    length = inputs["input_ids"].shape[1]
    check_positions(
        model, length + max_new_tokens, f"{length} prompt tokens and --max-new-tokens {max_new_tokens} together"
    )
    streamer = TextStreamer(tokenizer, skip_special_tokens=True)
    sampling: dict[str, Any] = {}
    if temperature > 0:
        sampling = {"temperature": temperature, "top_p": 0.95 if top_p is None else top_p, "top_k": top_k}
    ours = _runs_in_our_loop(model, draws=temperature > 0)
    if compile_step and not isinstance(model, DeltaRuleForCausalLM):
        raise ValueError(f"--compile acts on delta-rule models, not on {type(model).__name__}")
    if compile_step and not ours:
        raise ValueError("--compile acts on deltazoo.generate, and the model's generation_config.json asks for more")
    options: dict[str, Any]
    began = time.perf_counter()
    if ours:
        options = {"seed": seed, "prefill_chunk": prefill_chunk, "compile": compile_step}
        output = continue_prompt(
            model, **inputs, **sampling, **options, max_new_tokens=max_new_tokens, streamer=streamer
        )
    else:
        set_seed(seed)
        options = {"do_sample": temperature > 0, "prefill_chunk_size": prefill_chunk, "max_new_tokens": max_new_tokens}
        output = model.generate(**inputs, **sampling, **options, streamer=streamer)  # type: ignore[operator]
    seconds = time.perf_counter() - began
    made = output.shape[1] - length
    errors.print(f"{made} tokens in {seconds:.1f} s: {made / seconds:.0f} tokens/s", style="dim", highlight=False)


def _runs_in_our_loop(model: Any, *, draws: bool) -> bool:
    """Whether `deltazoo.generate` serves a model, and draws its tokens as the model's generation config asks for."""
    from deltazoo.generation import Decoder

    config = model.generation_config
    if draws and any(getattr(config, name, None) not in (None, unused) for name, unused in _DRAWN_OTHERWISE.items()):
        return False
    try:
        Decoder(model, max_length=1)
    except ValueError:
        return False
    return True
