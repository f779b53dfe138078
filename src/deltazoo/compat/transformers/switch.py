"""`accelerate` and `restore`: they set the accelerated class of all layers, after checks, or the original class."""

from functools import cache
from types import MethodType
from typing import Any, ClassVar, Literal

import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin

from deltazoo._report import ModelReport, backend_of, report
from deltazoo.compat.transformers.arrangements import LAYER_ARRANGEMENTS, LayerArrangement, arrangement_of
from deltazoo.compat.transformers.layer import AcceleratedLayer, accelerated_class, rule_of
from deltazoo.compat.transformers.packing import describe_documents
from deltazoo.generation.cache import takes_cache
from deltazoo.generation.hf_generate import CapturedGeneration
from deltazoo.generation.step import steps_of
from deltazoo.models.captured_training import capture_library_blocks, release_library_blocks
from deltazoo.models.forward_arguments import remove_pre_hook, tell_of_row_head, tells_of_row_head

_PICTURES = ("mm_token_type_ids", "image_grid_thw", "video_grid_thw")
"""Arguments with the places of pictures and videos in a prompt."""


def accelerate(
    model: nn.Module,
    *,
    backend: str | None = None,
    fused_kernels: bool | None = None,
    captured_training: Literal["auto", False] = "auto",
) -> ModelReport:
    """Run the delta-rule layers of a transformers model on `deltazoo.ops`, in place.

    Only the computation changes: modules, parameters, state dict, cache and saved files stay the model's own, and other
    models of the same class are not changed. Projections and gates still run as the model's modules, so adapters and
    quantised layers act. deltazoo computes the rule and the short convolution, and with fused kernels the gated norm
    unless it has an adapter or hooks. `generate` captures its decoding step. Results differ from the original by
    rounding, and in two respects:

    * Packed documents are separated in every layer, whether given by `cu_seqlens`, `cu_seq_lens_q`, `cu_seq_lens_k`,
      `seq_idx` or `position_ids` that start again. They fill no cache.
    * Padding anywhere, in single tokens too, does not influence other positions; positions that are not given skip it.
      Its outputs in these layers are zeros. Masks that are not about padding are refused.

    Call it before the model is wrapped (DDP, FSDP). Adapters and hooks of accelerate may be added before or after. A
    second call changes the backend.

    Args:
        model: any transformers model, or a module that contains one.
        backend: backend of the operator: None takes triton where it can run and chunkwise elsewhere.
        fused_kernels: whether Triton kernels (`deltazoo.ops.fused`) compute the convolution of rows without padding,
            the decay gate and the gated norm: True, on NVIDIA GPUs only; None, wherever they run; False, nowhere.
        captured_training: whether training steps run the blocks as CUDA graphs where they can, as those of our models
            do; False: never.

    Returns:
        The report of `deltazoo.report(model)`: the backend of each layer, with the reason.

    Raises:
        ValueError: no known layer, or one that cannot be accelerated; the model is unchanged then.
        NotImplementedError: the named backend, or the fused kernels, cannot run a layer.
    """
    found = [(module, known, name) for name, module in model.named_modules() if (known := _arrangement(module))]
    if not found:
        layers = ", ".join(f"{known.family} ({name})" for name, known in LAYER_ARRANGEMENTS.items())
        raise ValueError(f"{type(model).__name__} has no delta-rule layer of transformers; known: {layers}")
    bases = [_base_model(model, name) for _, _, name in found]
    for module, known, name in found:
        _check(module, known, name, backend, fused_kernels)

    for module, _, _ in found:
        if not isinstance(module, AcceleratedLayer):
            _become(module, accelerated_class(type(module)))
        module.deltazoo_backend = backend
        module.deltazoo_fused_kernels = fused_kernels
    for base in bases:
        if describe_documents not in base._forward_pre_hooks.values():
            base.register_forward_pre_hook(describe_documents, with_kwargs=True, prepend=True)
        if captured_training is False:
            release_library_blocks(base)
        else:
            capture_library_blocks(base)
    for around in model.modules():
        if not (isinstance(around, PreTrainedModel) and any(isinstance(x, AcceleratedLayer) for x in around.modules())):
            continue
        tell_of_row_head(around)
        generates: Any = type(around)
        if issubclass(generates, GenerationMixin) and not issubclass(generates, CapturedGeneration):
            around.__class__ = _generating_class(generates)
    return report(model)


def restore(model: nn.Module) -> None:
    """Undo `accelerate` exactly.

    Args:
        model: a model that was given to `accelerate`, or a copy of it.

    Raises:
        ValueError: no layer of the model is accelerated.
    """
    accelerated = [module for module in model.modules() if isinstance(module, AcceleratedLayer)]
    if not accelerated:
        raise ValueError(f"{type(model).__name__} has no accelerated layer to restore")
    for module in accelerated:
        del module.deltazoo_backend, module.deltazoo_fused_kernels
        _become(module, module.original)
    for base in model.modules():
        if isinstance(base, AcceleratedGeneration):
            steps_of(base).kept = None
            base.__class__ = base.original
        if describe_documents in base._forward_pre_hooks.values():
            release_library_blocks(base)
        remove_pre_hook(base, describe_documents)
        remove_pre_hook(base, tells_of_row_head)


def has_known_layers(model: nn.Module) -> bool:
    """Whether a model has delta-rule layers of transformers that `accelerate` knows, accelerated or not."""
    return any(_arrangement(module) is not None for module in model.modules())


def _arrangement(module: nn.Module) -> LayerArrangement | None:
    return module.arrangement if isinstance(module, AcceleratedLayer) else arrangement_of(type(module))


def _base_model(model: nn.Module, name: str) -> PreTrainedModel:
    """The innermost transformers model around a layer: its forward pass receives the whole batch."""
    path = name
    while path:
        path = path.rpartition(".")[0]
        ancestor = model.get_submodule(path)
        if isinstance(ancestor, PreTrainedModel):
            return ancestor
    raise ValueError(
        f"{name or type(model).__name__} is in no transformers model: accelerate the model that contains it"
    )


def _check(module: Any, known: LayerArrangement, name: str, backend: str | None, fused_kernels: bool | None) -> None:
    if not hasattr(module, "conv1d"):
        raise ValueError(
            f"{name}: transformers {transformers.__version__} arranges {type(module).__name__} in a way of its own "
            "(separate convolutions, another cache); accelerating it needs a newer version"
        )
    if module.activation not in ("silu", "swish"):
        raise ValueError(f"{name}: our convolution uses SiLU, but the layer has activation {module.activation!r}")
    if module.conv1d.bias is not None:
        raise ValueError(f"{name}: our convolution has no bias, but the layer's has one")
    own = module.__dict__.get("forward")
    if own is not None and not _is_own_forward(module, own) and not hasattr(module, "_hf_hook"):
        raise ValueError(f"{name}: its forward has been replaced by {own!r}, which accelerating would undo")
    backend_of(rule_of(module, known, backend))  # raises if the named one cannot run
    if fused_kernels:
        best, reason = backend_of(rule_of(module, known, None))
        if best != "triton":
            raise NotImplementedError(f"{name}: the fused kernels run where the triton backend does, but {reason}")


def _become(module: nn.Module, cls: type[nn.Module]) -> None:
    """Change the class of a module, and of the bound methods that hooks of accelerate keep."""
    kept = [key for key in ("forward", "_old_forward") if _is_own_forward(module, module.__dict__.get(key))]
    module.__class__ = cls
    for key in kept:
        module.__dict__[key] = module.__class__.forward.__get__(module)


def _is_own_forward(module: nn.Module, method: Any) -> bool:
    return isinstance(method, MethodType) and method.__func__ is type(module).forward


class AcceleratedGeneration(CapturedGeneration):
    """`generate` of accelerated models: the loop of transformers, whose step is captured as in our models."""

    original: ClassVar[type[Any]]
    """The class of transformers."""

    def prepare_cache(self, cache: Cache) -> None:
        """Leave the cache unchanged: accelerated layers keep their states in the original form."""

    @takes_cache()
    def prepare_inputs_for_generation(
        self, input_ids: Tensor, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Inputs of the original; those of a single token have no description of earlier pictures.

        The token's positions are given. Older versions of transformers pass that description on, and one of its tensors
        grows with every token.
        """
        inputs = super().prepare_inputs_for_generation(input_ids, inputs_embeds=inputs_embeds, **kwargs)  # type: ignore[misc]
        tokens = inputs.get("input_ids")
        if tokens is not None and tokens.shape[1] == 1 and inputs.get("position_ids") is not None:
            return {name: x for name, x in inputs.items() if name not in _PICTURES}
        return inputs

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle by the original class, since this class has its name and no module holds it."""
        return _empty_model, (self.original,), vars(self)


def _empty_model(original: Any) -> Any:
    cls: Any = _generating_class(original)
    return cls.__new__(cls)


@cache
def _generating_class(original: Any) -> type[Any]:
    """A model class of transformers with captured steps in `generate`.

    It goes by the original's name, which transformers writes into saved configurations.
    """
    members = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    bases: tuple[type, ...] = (AcceleratedGeneration, original, GenerationMixin)
    return type(original.__name__, bases, {**members, "original": original})
