"""``deltazoo export``, a model as a checkpoint that other programs read."""

import json
from pathlib import Path
from typing import Annotated

import typer

from deltazoo.cli.options import CheckpointArgument, LoadOption, print_facts
from deltazoo.compat.native.formats import FORMATS, TARGETS
from deltazoo.names import unknown
from deltazoo.training.console import console as errors
from deltazoo.training.console import no_transformers_bars, say
from deltazoo.training.loading import resolve_checkpoint


def export(
    path: CheckpointArgument,
    to: Annotated[str, typer.Option(help=f"The format: {', '.join(TARGETS)}; deltazoo show says which a rule has.")],
    out: Annotated[Path, typer.Option(help="Folder to write: a new one or an empty one.")],
    check: Annotated[
        bool, typer.Option(help="Load it with transformers alone, and compare logits and greedy text in float32.")
    ] = True,
    load: LoadOption = None,
) -> None:
    """Write a model as a checkpoint that transformers, vLLM, MLX and others read without deltazoo.

    Tokenizer and generation config go with it. --to fla makes such a checkpoint one of ours.
    """
    if to not in TARGETS:
        raise ValueError(unknown("target", to, TARGETS))
    path = resolve_checkpoint(path)

    import transformers
    from transformers import AutoTokenizer

    from deltazoo.compat.native import export as write
    from deltazoo.compat.native import load_native_checkpoint
    from deltazoo.training.loading import load_model

    written = Path(path) / "config.json"
    is_native = written.is_file() and json.loads(written.read_text(encoding="utf-8")).get("model_type") in FORMATS
    with errors.status(f"exporting {path}"), no_transformers_bars():
        model = load_native_checkpoint(path) if is_native else load_model(path, "cpu")
        try:
            tokenizer = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError):
            tokenizer = None
        try:
            found = write(model, to, out, tokenizer=tokenizer, check=check)
        except TypeError as error:  # a swapped model, or one without a head for tokens
            raise ValueError(str(error)) from error
    if tokenizer is None:
        say(f"{path} holds no tokenizer that transformers can load, so none was written")
    alone = "our reader of its format" if to == "fla" else f"transformers {transformers.__version__} alone"
    compared = "not checked"
    if found is not None:
        compared = (
            f"with {alone}: logits of two rows differ by at most {found.difference:.1e}, the largest is "
            f"{found.largest:.3g}; {found.new_tokens} greedy tokens of each are equal"
        )
    print_facts({"written": str(out), "format": to, "checked": compared})
