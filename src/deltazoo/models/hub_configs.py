"""The configurations of the established Hub types: `DeltaRuleConfig` with a fixed rule, one class per type."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from deltazoo.models.configuration import DeltaRuleConfig
from deltazoo.models.fla_keys import add_fla_keys

__all__ = [
    "CONFIG_CLASSES",
    "CombaConfig",
    "DeltaNetConfig",
    "EFLAConfig",
    "GatedDeltaNetConfig",
    "GatedDeltaProductConfig",
    "GatedLinearAttentionConfig",
    "KDAConfig",
    "PrecondGatedDeltaNetConfig",
    "PrecondKDAConfig",
    "config_class_of",
]


class _NamedConfig(DeltaRuleConfig):
    """The configuration of a Hub type: one rule, and saved keys that fla-hub's classes load."""

    further_mixers: ClassVar[tuple[str, ...]] = ()
    """Rules that other keys of this type stand for."""
    parameter_names: ClassVar[Mapping[str, str]] = {}
    """Ends of parameters' names that differ in checkpoints of this type: theirs, and ours."""

    def __post_init__(self, **extra: Any) -> None:
        if self.mixer not in (type(self).mixer, *self.further_mixers):
            raise ValueError(
                f"model type {self.model_type!r} has mixer {type(self).mixer!r}, got mixer={self.mixer!r}; "
                "use DeltaRuleConfig for a free choice"
            )
        super().__post_init__(**extra)

    def to_dict(self) -> dict[str, Any]:
        """The configuration as plain values, in our keys and in those that fla-hub's classes read."""
        return add_fla_keys(super().to_dict())


@strict
class DeltaNetConfig(_NamedConfig):
    """DeltaNet (arXiv:2406.06484); with `allow_neg_eigval=True` its rule of arXiv:2411.12537."""

    model_type: ClassVar[str] = "delta_net"
    mixer: str = "delta_net"


@strict
class GatedDeltaNetConfig(_NamedConfig):
    """Gated DeltaNet (arXiv:2412.06464)."""

    model_type: ClassVar[str] = "gated_deltanet"
    num_hidden_layers: int = 21
    num_heads: int = 6
    head_dim: int | None = 256


@strict
class KDAConfig(_NamedConfig):
    """Kimi Delta Attention (arXiv:2510.26692)."""

    model_type: ClassVar[str] = "kda"
    mixer: str = "kda"
    head_dim: int | None = 128


@strict
class EFLAConfig(_NamedConfig):
    """Error-free linear attention (arXiv:2512.12602)."""

    model_type: ClassVar[str] = "efla"
    mixer: str = "efla"


@strict
class GatedDeltaProductConfig(_NamedConfig):
    """Gated DeltaProduct (arXiv:2502.10297); without its decay it is DeltaNet in several steps with an output gate."""

    model_type: ClassVar[str] = "gated_deltaproduct"
    further_mixers: ClassVar[tuple[str, ...]] = ("delta_net",)
    mixer: str = "gated_deltaproduct"
    num_hidden_layers: int = 21
    num_heads: int = 6
    head_dim: int | None = 256


@strict
class CombaConfig(_NamedConfig):
    """Comba (arXiv:2506.02475), as its checkpoints compute it: the erase key is the unit key."""

    model_type: ClassVar[str] = "comba"
    mixer: str = "comba_unit_erase"
    num_hidden_layers: int = 21
    num_heads: int = 6
    head_dim: int | None = 256


@strict
class PrecondKDAConfig(_NamedConfig):
    """Kimi Delta Attention with a preconditioned write key (arXiv:2604.21100)."""

    model_type: ClassVar[str] = "precond_kda"
    mixer: str = "pkda"
    head_dim: int | None = 128

    def __post_init__(self, **extra: Any) -> None:
        if self.num_v_heads not in (None, self.num_heads):
            raise NotImplementedError(
                f"model type 'precond_kda' with num_v_heads={self.num_v_heads} and num_heads={self.num_heads} is not "
                "implemented: its checkpoints have one moment of the keys per value head, and DeltaRuleConfig with "
                "mixer='pkda' one per key head"
            )
        super().__post_init__(**extra)


@strict
class PrecondGatedDeltaNetConfig(_NamedConfig):
    """Gated DeltaNet with a preconditioned write key (arXiv:2604.21100)."""

    model_type: ClassVar[str] = "precond_gated_deltanet"
    mixer: str = "pgdn"
    head_dim: int | None = 128


@strict
class GatedLinearAttentionConfig(_NamedConfig):
    """Gated linear attention (arXiv:2312.06635)."""

    model_type: ClassVar[str] = "gla"
    parameter_names: ClassVar[Mapping[str, str]] = {"attn.g_norm_swish_gate.weight": "attn.o_norm.weight"}
    mixer: str = "gla"
    num_heads: int = 4
    use_short_conv: bool = False

    def __post_init__(self, **extra: Any) -> None:
        if self.head_dim is None and "expand_k" not in extra:
            self.head_dim = max(1, self.hidden_size // (2 * self.num_heads))  # keys of half the model's width
        super().__post_init__(**extra)


CONFIG_CLASSES: tuple[type[DeltaRuleConfig], ...] = (
    DeltaRuleConfig,
    DeltaNetConfig,
    GatedDeltaNetConfig,
    KDAConfig,
    EFLAConfig,
    GatedDeltaProductConfig,
    CombaConfig,
    PrecondKDAConfig,
    PrecondGatedDeltaNetConfig,
    GatedLinearAttentionConfig,
)
"""One class per model type."""


def config_class_of(model_type: str | None, path: Path) -> type[DeltaRuleConfig]:
    """Our configuration class for the `model_type` found in the checkpoint at `path`; ValueError if it is not ours."""
    classes = {config.model_type: config for config in CONFIG_CLASSES}
    if model_type not in classes:
        raise ValueError(f"model type {model_type!r} in {path} is none of {', '.join(classes)}")
    return classes[model_type]
