"""``deltazoo show RULE``: one rule in full."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from deltazoo.cli.rule_files import LoadOption

if TYPE_CHECKING:
    from deltazoo.spec import RuleSpec


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("show", epilog="Example: [bold]deltazoo show gated_deltanet[/]")(show)


def show(
    rule: Annotated[str, typer.Argument(help="Name of a rule; see deltazoo list.")],
    load: LoadOption = None,
) -> None:
    """Show a rule: equation, paper, choices, and the configurations that train it."""
    from deltazoo.cli.tables import facts_table
    from deltazoo.spec import NONEXPANSIVE_MEANING, choice_name, get_rule
    from deltazoo.training.config import load_config
    from deltazoo.training.presets import presets

    spec = get_rule(rule)
    trained_by = [name for name, path in presets().items() if load_config(path).model.get("mixer") == spec.name]
    value_heads = f"{spec.head_dim} for keys, {spec.expand_v:g} times that for values"
    facts = {
        "rule": spec.name,
        "in one sentence": spec.summary,
        "update": spec.equation,
        "paper": spec.paper,
        "step size": choice_name(spec.step_size),
        "micro-steps": str(spec.num_micro_steps),
        "decay": spec.decay,
        "erase key": f"{spec.erase_key}, reads the {spec.erase_reads} state" if spec.corrects else "none",
        "bounded without writes": f"{spec.nonexpansive_class}: {NONEXPANSIVE_MEANING[spec.nonexpansive_class]}",
        "normalised": ", ".join(n for n, on in (("q", spec.normalize_q), ("k", spec.normalize_k)) if on) or "nothing",
        "eigenvalue of a step": _eigenvalue(spec),
        "output gate": f"{spec.output_gate}, {choice_name(spec.gate_activation)}"
        if spec.output_gate != "none"
        else "none",
        "head size": value_heads,
        "model_type": spec.hub_model_type or f"delta_rule with mixer: {spec.name}",
        "configurations": ", ".join(trained_by) or "none",
    }
    Console().print(facts_table(facts))


def _eigenvalue(spec: "RuleSpec") -> str:
    """Of `I - beta k e^T` along the key."""
    if not spec.corrects:
        return "none: it does not erase"
    if spec.erase_key == "separate":
        return "within [-1, 1]"
    # A user's own function is bounded to the larger interval.
    return "[-1, 1]" if spec.allow_neg_eigval or callable(spec.step_size) else "[0, 1]"
