"""Which parameters an optimiser should not pull towards zero."""

from torch import nn

from deltazoo.layers.float32_parameters import Float32Parameters

__all__ = ["parameters_without_decay"]


def parameters_without_decay(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay must leave alone: decay gates, norm weights and biases.

    Pulling `A_log` or `dt_bias` towards zero changes how long a head remembers. The names are found by the kind of
    module, not by marks on the parameters, which loading a checkpoint or sharding may lose.
    """
    names = set()
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_gate = isinstance(module, Float32Parameters) and name in module.float32_parameters
            is_norm = "norm" in type(module).__name__.lower()
            if is_gate or is_norm or name == "bias" or getattr(parameter, "_no_weight_decay", False):
                names.add(f"{prefix}.{name}" if prefix else name)
    return names
