"""``deltazoo lm-eval ARGUMENTS``: the command of lm-evaluation-harness, which knows our models then."""

import importlib.util
from typing import Annotated

import typer

from deltazoo.cli.rule_files import LoadOption

_EXAMPLE = (
    "Example: [bold]deltazoo lm-eval --model hf --model_args pretrained=runs/quickstart/model --tasks lambada_openai"
    "[/]; what it takes: [bold]deltazoo lm-eval -- --help[/]"
)


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    passed_on = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command("lm-eval", epilog=_EXAMPLE, context_settings=passed_on)(lm_eval)


def lm_eval(
    arguments: Annotated[list[str], typer.Argument(help="Those of lm_eval, as they are.", metavar="ARGUMENTS")],
    load: LoadOption = None,
) -> None:
    """Run lm-evaluation-harness with our models, swapped ones and, as --model deltazoo, accelerated ones."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ImportError("lm-evaluation-harness is not installed: pip install '.[harness]' in a checkout, or lm_eval")

    from deltazoo.training.harness_model import run_harness

    run_harness(arguments)
