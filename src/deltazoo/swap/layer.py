"""The layer in the attention slot of a swapped model: a delta rule with softmax attention's parameters and call."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Self

from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from deltazoo.generation.batch import PACKING_ARGUMENTS, BatchDescription
from deltazoo.generation.cache import CacheStates, prepare_cache_layer, takes_cache
from deltazoo.layers import DeltaRuleAttention, RMSNorm, layer_class
from deltazoo.layers.initialization import Initializer
from deltazoo.layers.rotary import Rotary
from deltazoo.layers.sequences import WHOLE_ROWS
from deltazoo.models.forward_arguments import refuse_dropped
from deltazoo.spec import RuleSpec, StepForm, get_rule
from deltazoo.swap.families import ModelFamily

_LEFT_TO_THE_MODEL = ("position_ids", "use_cache", "output_router_logits")
"""Arguments of softmax attention that tell a delta-rule layer nothing beyond `delta_batch`."""


class DropInDeltaAttention(DeltaRuleAttention, stands_for=DeltaRuleAttention):
    """`DeltaRuleAttention` that can hold a copy of every parameter of a softmax attention layer.

    Args:
        rule: name of a registered rule.
        hidden_size, num_heads, head_dim: see `DeltaRuleAttention`.
        num_kv_heads: heads that the key and value projections make, a divisor of `num_heads`; each serves a group of
            neighbouring heads, as in grouped-query attention. Step sizes, decays and states stay one per head. (The
            other grouping, `num_v_heads`, has queries shared by several values, which no known model family has.)
        qkv_bias: whether the query, key and value projections have biases.
        o_bias: whether the output projection has a bias.
        gate_bias: whether a full-rank output gate has a bias; without one a SiLU gate cannot start open.
        qk_norm: RMSNorms of queries and keys before rotary embedding and L2 norm: one for the channels of a "head", or
            one over the "width" of all heads; None for none.
        qk_norm_eps: epsilon of these norms.
        options: further options of `DeltaRuleAttention`.

    Raises:
        ValueError: see `DeltaRuleAttention`; options that do not fit together.
    """

    def __init__(
        self,
        rule: str | RuleSpec,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        qkv_bias: bool = False,
        o_bias: bool = False,
        gate_bias: bool = False,
        qk_norm: str | None = None,
        qk_norm_eps: float = 1e-6,
        **options: Any,
    ) -> None:
        super().__init__(rule, hidden_size, num_heads, head_dim, **options)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.qk_norm = qk_norm
        self._check_sizes(gate_bias)
        shared = num_heads // self.num_kv_heads
        widths = {
            "q": self.q_proj.out_features,
            "k": self.k_proj.out_features // shared,
            "v": self.v_proj.out_features // shared,
        }
        for name, width in widths.items():
            setattr(self, f"{name}_proj", nn.Linear(hidden_size, width, bias=qkv_bias))
            if self.conv_size:
                # These convolutions do not normalise: the L2 norm comes after the original attention's norms.
                setattr(self, f"{name}_conv1d", self.short_convolution(width))
        self.o_proj = nn.Linear(self.o_proj.in_features, hidden_size, bias=o_bias)
        if gate_bias:
            self.g_proj = nn.Linear(hidden_size, self.o_proj.in_features)
        if qk_norm is not None:
            dims = (head_dim, head_dim) if qk_norm == "head" else (widths["q"], widths["k"])
            self.q_norm, self.k_norm = (RMSNorm(dim, qk_norm_eps, fused=self.fused_kernels) for dim in dims)
        self.init_parameters()

    def _check_sizes(self, gate_bias: bool) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}")
        if self.qk_norm not in (None, "head", "width"):
            raise ValueError(f"qk_norm must be 'head', 'width' or None, got {self.qk_norm!r}")
        if self.num_kv_heads != self.num_heads != self.num_v_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} shares keys and values among heads, "
                f"num_v_heads={self.num_v_heads} queries and keys among values: choose one"
            )
        if gate_bias and self.spec.output_gate != "full":
            raise ValueError(f"rule {self.spec.name!r} has no full-rank output gate, so gate_bias=True cannot act")
        if self.qk_norm == "width" and self.projected_steps > 1:
            raise ValueError(
                "the model has norms over the queries and over the keys of all heads together. They take one key per "
                f"token, and this layer has num_micro_steps={self.num_micro_steps}: qk_norm=False leaves the norms out"
            )

    def _split_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.qk_norm == "width":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = super()._split_heads(q, k, v)
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        shared = self.num_heads // self.num_kv_heads
        if shared > 1:
            k, v = k.repeat_interleave(shared, dim=2), v.repeat_interleave(shared, dim=2)
        return q, k, v

    @property
    def step_form(self) -> StepForm | None:
        """The form of the rule's layer; None where queries and keys have norms, or heads share keys and values."""
        plain = self.qk_norm is None and self.num_kv_heads == self.num_heads
        return super().step_form if plain else None

    def initializers(self, initializer_range: float | None = None) -> dict[str, Initializer]:
        """Initializers of `DeltaRuleAttention`; the norms of queries and keys start with factors of one."""
        known = super().initializers(initializer_range)
        ones = partial(nn.init.constant_, val=1.0)
        return {name: ones if name in ("q_norm.weight", "k_norm.weight") else start for name, start in known.items()}

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a layer by the class from which `drop_in_class` made its own."""
        if self.stands_for is type(self):
            return super().__reduce_ex__(protocol)
        return _unfilled, (self.stands_for,), vars(self)


def drop_in_class(rule: str | RuleSpec) -> type[DropInDeltaAttention]:
    """`DropInDeltaAttention` on top of the layer class of a rule."""
    layer: Any = layer_class(rule)  # hashable, which mypy does not see
    return _drop_in(layer)


@cache
def _drop_in(layer: Any) -> type[DropInDeltaAttention]:
    if layer is DeltaRuleAttention:
        return DropInDeltaAttention
    members = {"__module__": layer.__module__, "__doc__": layer.__doc__}
    return type(f"DropIn{layer.__name__}", (DropInDeltaAttention, layer), members, stands_for=layer)


def _unfilled(layer: Any) -> DropInDeltaAttention:
    return object.__new__(_drop_in(layer))


class SwappedAttention(nn.Module):
    """A delta-rule layer with the call of the attention that it replaces.

    Args:
        delta: the delta-rule layer.
        family: the model's family, which says how attention is called.
        layer_idx: the layer's number in the model and its cache.
        rope: whether the model's rotary embedding turns queries and keys.
        teacher: the attention module that was replaced, kept for distillation and `unswap_attention`; not part of
            parameters and checkpoints.
    """

    teacher: nn.Module | None

    def __init__(
        self,
        delta: DropInDeltaAttention,
        family: ModelFamily,
        layer_idx: int,
        *,
        rope: bool,
        teacher: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.delta = delta
        self.layer_idx = layer_idx
        self.rope = rope
        self._cache_argument = family.cache_argument
        vars(self)["teacher"] = teacher  # set as an attribute, its parameters would be the layer's

    def freeze_teacher(self) -> None:
        """Stop gradients and dropout of a kept teacher, and remember which parameters were trainable."""
        if self.teacher is not None:
            self._trainable = {name: p.requires_grad for name, p in self.teacher.named_parameters()}
            self.teacher.requires_grad_(False).eval()

    def release_teacher(self) -> nn.Module:
        """The teacher in its state before `freeze_teacher`, to be put back in its slot."""
        assert self.teacher is not None
        for name, parameter in self.teacher.named_parameters():
            parameter.requires_grad_(self._trainable[name])
        return self.teacher.train(self.training)

    @takes_cache()
    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Rotary | None = None,
        attention_mask: Any = None,
        cache: Cache | None = None,
        delta_batch: BatchDescription | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Mix tokens by the delta rule.

        Args:
            hidden_states: `[B, T, hidden_size]`.
            position_embeddings: the model's cosines and sines `[B or 1, T, d]`.
            attention_mask: the model's mask over pairs of tokens, which a recurrence does not use; padding and packing
                come in `delta_batch`.
            cache: the model's cache, which takes the layer's state.
            delta_batch: the base model's description of the batch; None: every row is one whole sequence.
            kwargs: further arguments of the model, and the cache if the family calls it by another name.

        Returns:
            `[B, T, hidden_size]`, and None in place of attention weights.

        Raises:
            ValueError: a mask or packed documents that no `delta_batch` describes.
            TypeError: an argument that the layer does not know.
        """
        if cache is None and self._cache_argument is not None:
            cache = kwargs.pop(self._cache_argument, None)
        refuse_dropped(self, kwargs, _LEFT_TO_THE_MODEL)
        if delta_batch is None:
            telling = {"attention_mask": attention_mask, **{name: kwargs.get(name) for name in PACKING_ARGUMENTS}}
            told = [name for name, value in telling.items() if value is not None]
            if told:
                raise ValueError(
                    f"{type(self).__name__} was given {', '.join(told)}, and no model around it has described the "
                    "batch in delta_batch: call the whole model"
                )
        rotary = position_embeddings if self.rope else None
        sequences = WHOLE_ROWS if delta_batch is None else delta_batch.sequences
        states = None
        if cache is not None and not (delta_batch is not None and delta_batch.packed):
            prepare_cache_layer(cache, self.layer_idx)
            states = CacheStates(cache)
        return self.delta(hidden_states, past_key_values=states, sequences=sequences, rotary=rotary), None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast the teacher too, whose parameters are not among the module's."""
        if self.teacher is not None:
            self.teacher._apply(fn)
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        """Layer number and options, for printing."""
        return f"layer_idx={self.layer_idx}, rope={self.rope}, teacher={'kept' if self.teacher else None}"


def build_swapped_attention(
    family: ModelFamily, config: PreTrainedConfig, index: int, options: dict[str, Any], teacher: nn.Module | None = None
) -> SwappedAttention:
    """The module that a configuration records for a slot; its parameters start as in the rule's paper."""
    options = dict(options)
    rope, rule = options.pop("rope"), get_rule(options.pop("variant"), options.pop("revision", 1))
    delta = drop_in_class(rule)(
        rule, config.hidden_size, layer_idx=index, initializer_range=config.initializer_range, **options
    )
    return SwappedAttention(delta, family, index, rope=rope, teacher=teacher)


def swapped_layers(model: nn.Module) -> dict[int, SwappedAttention]:
    """The swapped layers of a model by number, also inside wrappers."""
    return {module.layer_idx: module for module in model.modules() if isinstance(module, SwappedAttention)}
