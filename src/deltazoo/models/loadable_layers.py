"""The check before saving that the configuration describes a model's layers, so that loading makes the same ones."""

from torch import nn

__all__ = ["refuse_undescribed"]

# Options that decide a layer's results. Its sizes are not among them: loading checks the shapes of parameters.
_CHOICES = (
    "spec",
    "activation",
    "allow_neg_eigval",
    "neg_eigval",
    "decay_lower_bound",
    "num_micro_steps",
    "conv_size",
    "rope",
)


def refuse_undescribed(layer: nn.Module, described: nn.Module, path: str) -> None:
    """Raise ValueError unless loading would make a layer that computes what `layer` computes.

    Args:
        layer: of a model that is to be saved.
        described: the layer that the model's configuration makes instead.
        path: the layer's name in the model, for the message.

    Raises:
        ValueError: another class, rule or option.
    """
    found, expected = _own_class(layer), _own_class(described)
    if found is not expected:
        raise ValueError(
            f"{path} is a {found.__module__}.{found.__qualname__}, and the configuration would load a "
            f"{expected.__qualname__} in its place, with other results. Register the layer class with a spec of its "
            "own name (deltazoo.register_rule), and make the model of a configuration with that mixer"
        )
    for name in _CHOICES:
        ours, theirs = getattr(layer, name, None), getattr(described, name, None)
        if ours != theirs:
            raise ValueError(
                f"{path} has {name}={ours!r}, and the configuration would load a layer with {theirs!r} in its place: "
                "change the configuration and make the model of it"
            )


def _own_class(module: nn.Module) -> type[nn.Module]:
    """The module's class without the one that FSDP2 derives from it."""
    return next(kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch.distributed"))
