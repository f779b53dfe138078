"""``deltazoo generate PATH --prompt ...``: sample from a checkpoint."""

from typing import Annotated

import typer
from rich.console import Console

_EXAMPLE = 'Example: [bold]deltazoo generate runs/quickstart --prompt "def read(self, size=-1):"[/]'


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("generate", epilog=_EXAMPLE)(generate)


def generate(
    path: Annotated[str, typer.Argument(help="Folder of a model or of a training run, or a Hub name.")],
    prompt: Annotated[str, typer.Option(help="Text to go on from.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add at most.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = 0.8,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Keep the likeliest tokens of this mass.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; default: a GPU if there is one.")] = None,
) -> None:
    """Continue a prompt; the text appears as it is made."""
    import time

    from transformers import TextStreamer, set_seed

    from deltazoo.evaluation.loading import load_checkpoint

    errors = Console(stderr=True)
    with errors.status(f"loading {path}"):
        model, tokenizer = load_checkpoint(path, device)
    set_seed(seed)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_p": top_p} if temperature > 0 else {"do_sample": False}
    )
    began = time.perf_counter()
    output = model.generate(  # type: ignore[operator]
        **inputs,
        **sampling,
        max_new_tokens=max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_special_tokens=True),
    )
    seconds = time.perf_counter() - began
    made = output.shape[1] - inputs["input_ids"].shape[1]
    errors.print(f"{made} tokens in {seconds:.1f} s: {made / seconds:.0f} tokens/s", style="dim", highlight=False)
