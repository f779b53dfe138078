"""Runtime options: they decide speed and memory, change results by rounding at most, and are never saved."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from deltazoo.names import unknown

Backend = Literal["triton", "chunkwise", "reference"]
RecomputeLevel = Literal["none", "elementwise", "states", "block", "nested"]
BACKENDS: tuple[str, ...] = get_args(Backend)
RECOMPUTE_LEVELS: tuple[str, ...] = get_args(RecomputeLevel)
FORMER_OPTIONS = {"liger": "Liger kernels left with 0.2; deltazoo's own are the default"}
"""Options that no longer exist, which saved configurations may hold, and the reason for a caller who passes one."""


@dataclass(frozen=True)
class RuntimeOptions:
    """Options that say how a model runs. None leaves the choice to the device and the installed packages.

    Options are given to `from_pretrained`, to the constructor of a model or in the section `runtime` of a training
    configuration, and changed with `model.set_runtime(...)`.

    Attributes:
        backend: backend of the operator of the linear layers, see `deltazoo.ops.delta_rule`. A named one that cannot
            run raises when the model runs.
        fused_kernels: whether Triton kernels compute what surrounds the operator (`deltazoo.ops.fused`): norms, with
            the residual before them, rotary embeddings and SwiGLU. None: wherever they run; True: everywhere, on NVIDIA
            GPUs only; False: plain torch.
        fuse_linear_cross_entropy: whether training computes the loss from `labels` without the logits of all positions
            (`deltazoo.models.loss`). True: a model whose loss cannot be computed so raises.
        recompute: results that training computes again in the backward pass instead of keeping them: `"none"`,
            `"elementwise"`, `"states"`, `"block"` or `"nested"`, see `deltazoo.layers.recompute_levels`. None:
            `"states"` for large batches on a GPU, else `"none"`. Gradient checkpointing replaces it if both are on.
            With either, training creates no cache.
        captured_training: whether training on a GPU runs the blocks as CUDA graphs where that changes nothing but the
            time (`deltazoo.models.captured_training`): `"auto"`, the default, or False for never.

    Raises:
        ValueError: a value that an option does not have.
    """

    backend: Backend | None = None
    fused_kernels: bool | None = None
    fuse_linear_cross_entropy: bool | None = None
    recompute: RecomputeLevel | None = None
    captured_training: Literal["auto", False] | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        for name, known in (("backend", BACKENDS), ("recompute", RECOMPUTE_LEVELS)):
            value = getattr(self, name)
            if value is not None and value not in known:
                raise ValueError(f"{name}: {unknown('value', value, known)}")
        if self.captured_training not in (None, "auto") and self.captured_training is not False:
            raise ValueError(f'captured_training must be "auto", False or None, got {self.captured_training!r}')
        for name in ("fused_kernels", "fuse_linear_cross_entropy"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise ValueError(f"{name} must be True, False or None, got {value!r}")

    def changed(self, options: dict[str, Any], known: Iterable[str]) -> "RuntimeOptions":
        """A copy with other values.

        Args:
            options: values by name.
            known: names of the options that the model has.

        Raises:
            TypeError: a name that is not among `known`.
            ValueError: a value that an option does not have.
        """
        for name in options:
            if name in FORMER_OPTIONS:
                raise TypeError(f"no runtime option {name!r}: {FORMER_OPTIONS[name]}")
            if name not in known:
                raise TypeError(unknown("runtime option", name, known))
        return replace(self, **options)

    def given(self) -> dict[str, Any]:
        """The options that are not None, by name."""
        values = {name: getattr(self, name) for name in RUNTIME_OPTIONS}
        return {name: value for name, value in values.items() if value is not None}


RUNTIME_OPTIONS: tuple[str, ...] = tuple(field.name for field in fields(RuntimeOptions))
