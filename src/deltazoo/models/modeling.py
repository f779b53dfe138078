"""The model of every rule and every mix of layers: a stack of blocks, each a linear or softmax layer and an MLP.

The classes of the Hub types are subclasses without a body (`hub`). State-dict keys are those of fla-hub checkpoints:
`model.embeddings`, `model.layers.N.{attn_norm, attn, mlp_norm, mlp}`, `model.norm`, `lm_head`.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from itertools import islice
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from deltazoo.generation.batch import BatchDescription
from deltazoo.generation.cache import CACHE, prepare_cache, takes_cache
from deltazoo.generation.capture import graphs_run_on
from deltazoo.generation.hf_generate import CapturedGeneration
from deltazoo.layers.norm import RMSNorm
from deltazoo.layers.recompute_levels import level_of
from deltazoo.models.block import DeltaRuleBlock, SoftmaxInputs
from deltazoo.models.captured_training import run_blocks
from deltazoo.models.configuration import DeltaRuleConfig
from deltazoo.models.delta_layers import ModelWithDeltaLayers
from deltazoo.models.forward_arguments import (
    OF_SOFTMAX_KERNELS,
    ROW_HEAD,
    describe_arguments,
    refuse_several_documents,
    refuse_unknown,
    unwrapped,
)
from deltazoo.models.loss import LateLogits, OutputWithLateLogits, fuses_loss, loss_without_logits
from deltazoo.models.saving import SharedModel
from deltazoo.models.softmax_attention import RotaryEmbedding, SoftmaxAttention
from deltazoo.models.training_report import describe_training
from deltazoo.ops.fused import IGNORED
from deltazoo.ops.validation import check_tensor
from deltazoo.runtime import RUNTIME_OPTIONS, RuntimeOptions


class DeltaRulePreTrainedModel(SharedModel, ModelWithDeltaLayers):
    """The base class of all heads: attributes that transformers reads, and methods that the heads share."""

    runtime_options = tuple(option for option in RUNTIME_OPTIONS if option != "fuse_linear_cross_entropy")

    config: DeltaRuleConfig
    config_class = DeltaRuleConfig
    base_model_prefix = "model"
    _input_embed_layer = "embeddings"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DeltaRuleBlock"]  # noqa: RUF012
    _skip_keys_device_placement = [CACHE]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": DeltaRuleBlock, "attentions": SoftmaxAttention}  # noqa: RUF012

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Self:
        """A model from safetensors files, see transformers; ValueError for tensor parallelism, which it has not."""
        if kwargs.get("tp_plan") is not None or kwargs.get("tp_size") is not None:
            raise ValueError(
                f"tp_plan, tp_size: {cls.__name__} has no tensor parallelism. deltazoo.distributed.fully_shard_model "
                "divides weights among GPUs, deltazoo.context_parallel rows, device_map layers"
            )
        return super().from_pretrained(*args, **kwargs)

    def describe_training(self) -> str:
        """Lines that say how a training step computes norms, MLPs and the loss, what it recomputes, and why."""
        return describe_training(self)

    def prepare_cache(self, cache: Cache) -> None:
        """Make a fresh `DynamicCache` or `StaticCache` fit this model's layers, in place; ValueError if it cannot."""
        prepare_cache(cache, self.running_layer_types)

    @property
    def running_layer_types(self) -> list[str]:
        """Types of the layers that a forward pass runs; early exit in transformers lowers `num_hidden_layers`."""
        return (self.config.layer_types or [])[: self.config.num_hidden_layers]


_USE_CACHE_POSITION = 5  # its position among the arguments of DeltaRuleModel.forward


def _no_cache_while_recomputing(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` with `use_cache=False` unless given, in training that recomputes or may run captured.

    A block that runs twice must not write to a cache, and captured training writes to none. By default small batches on
    a GPU have none either, so that the form of an output does not depend on the batch's size. This acts before
    `merge_with_config_defaults` fills in the configuration's `use_cache`.
    """

    @wraps(forward)
    def wrapper(self: "DeltaRuleModel", *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("use_cache") is not None or len(args) > _USE_CACHE_POSITION
        if self.training and not given:
            device = self.norm.weight.device
            captures = self.runtime.captured_training is not False and graphs_run_on(device)
            if level_of(self.runtime.recompute, device) != "none" or (captures and torch.is_grad_enabled()):
                kwargs["use_cache"] = False
        return forward(self, *args, **kwargs)

    return wrapper


class DeltaRuleModel(DeltaRulePreTrainedModel):
    """The decoder without a head."""

    def __init__(self, config: DeltaRuleConfig, **runtime: Any) -> None:
        super().__init__(config)
        assert config.num_hidden_layers is not None and config.layer_types is not None
        if len(config.layer_types) > config.num_hidden_layers:  # from_pretrained(..., num_hidden_layers=n)
            config.layer_types = config.layer_types[: config.num_hidden_layers]
        config.validate_architecture()  # arguments of from_pretrained may have changed keys
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(DeltaRuleBlock(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        is_hybrid = "full_attention" in config.layer_types
        self.rotary_emb = RotaryEmbedding(config) if is_hybrid else None
        self.gradient_checkpointing = False
        self.post_init()
        self.set_runtime(**runtime)

    def use_runtime(self, options: RuntimeOptions) -> None:
        """Record the options, and apply `fused_kernels` to the last norm."""
        super().use_runtime(options)
        self.norm.fused = options.fused_kernels

    @takes_cache()
    @_no_cache_while_recomputing
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | Mapping[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        delta_batch: BatchDescription | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """The final hidden states.

        Args:
            input_ids: `[B, T]` token numbers.
            attention_mask: `[B, past + T]`, 1 = real token; padding may be anywhere.
            position_ids: `[B, T]`, for rotary embeddings; positions that start again mark packed documents.
            cache: the cache to continue, changed in place. Before transformers 5.24 its name is `past_key_values`.
            inputs_embeds: `[B, T, hidden_size]` in place of `input_ids`.
            use_cache: whether to return a cache; a packed batch returns none, since no further call could continue it.
            delta_batch: the description that `describe_batch` makes of the arguments; made here unless given.
            kwargs: `cu_seqlens`, `cu_seq_lens_q`, `seq_idx` for packed documents, and others of transformers.
                `token_type_ids` have no effect, as in transformers' decoders.

        Raises:
            ValueError: inputs that do not fit each other, the cache or the model; unknown arguments.
        """
        kwargs = unwrapped(kwargs)
        row_head = kwargs.pop(ROW_HEAD, None)
        refuse_unknown(kwargs)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        check_tensor("input_ids", input_ids)
        if input_ids is not None and input_ids.ndim != 2:
            raise ValueError(f"input_ids must have shape [B, T], got {tuple(input_ids.shape)}")
        if inputs_embeds is None:
            inputs_embeds = self.embeddings(input_ids)
        if cache is not None:
            self.prepare_cache(cache)
        batch = delta_batch
        if batch is None:
            given = {"attention_mask": attention_mask, "position_ids": position_ids}
            batch = self.describe(inputs_embeds, cache, kwargs | given)
        if batch.beyond_one_row:
            refuse_several_documents(row_head)
        recomputes = self.training and self.runtime.recompute not in (None, "none")
        if use_cache and cache is None and not (batch.packed or batch.shared or recomputes):
            cache = DynamicCache(config=self.config)
            self.prepare_cache(cache)

        softmax = self._softmax_inputs(inputs_embeds, batch, cache, kwargs)
        arguments = {"batch": batch, "softmax": softmax, CACHE: cache}
        calls = [(layer, arguments) for layer in islice(self.layers, self.config.num_hidden_layers)]
        hidden_states = run_blocks(self, calls, inputs_embeds, wanted=self.runtime.captured_training is not False)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), **{CACHE: cache})  # type: ignore[arg-type]

    def describe(self, tokens: Tensor, cache: Cache | None, arguments: Mapping[str, Any]) -> BatchDescription:
        """The description of a batch of the forward pass; see `describe_arguments`."""
        # A pipeline stage fills only its own layers of the cache; transformers replaces the others by identities.
        here = next((i for i, layer in enumerate(self.layers) if not isinstance(layer, nn.Identity)), 0)
        past_length = 0 if cache is None else cache.get_seq_length(here)
        return describe_arguments(self.deltazoo_context, tokens, cache, past_length, arguments)

    def _softmax_inputs(
        self, x: Tensor, batch: BatchDescription, cache: Cache | None, kwargs: Mapping[str, Any]
    ) -> SoftmaxInputs | None:
        if self.rotary_emb is None or "full_attention" not in self.running_layer_types:
            return None
        packed = None if batch.shared else batch.sequences.positions
        if isinstance(batch.attention_mask, Mapping):
            mask: Any = batch.attention_mask["full_attention"]
        else:
            given: dict[str, Any] = {"attention_mask": batch.attention_mask, "position_ids": packed, CACHE: cache}
            mask = create_causal_mask(config=self.config, inputs_embeds=x, **given)
        kernel_kwargs = {key: kwargs[key] for key in OF_SOFTMAX_KERNELS if key in kwargs}
        kernel_kwargs |= {"position_ids": packed, "delta_batch": batch}
        return SoftmaxInputs(mask, self.rotary_emb(x, batch.position_ids), kernel_kwargs)


class DeltaRuleForCausalLM(CapturedGeneration, DeltaRulePreTrainedModel, GenerationMixin):
    """The decoder with a language-modelling head."""

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}  # type: ignore[dict-item]  # noqa: RUF012

    runtime_options = RUNTIME_OPTIONS
    leaves_out_first_tokens: ClassVar[bool] = True
    """Whether the loss leaves out the first token of every packed document, unlike the loss of transformers' models."""

    def __init__(self, config: DeltaRuleConfig, **runtime: Any) -> None:
        super().__init__(config)
        self.model = DeltaRuleModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
        self.set_runtime(**runtime)

    @takes_cache()
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | Mapping[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits, and the loss if labels are given. Arguments are those of `DeltaRuleModel` and:

        Args:
            labels: `[B, T]` token numbers, -100 to leave one out; token t predicts label t + 1. In a packed batch the
                first token of a document is not predicted, so the loss equals that of separate documents. Where it can,
                training computes the loss without all logits (`fuse_linear_cross_entropy`); the logits of the output
                are then computed when they are first read.
            logits_to_keep: number of last positions (0 = all), or the positions, that get logits.
            kwargs: see `DeltaRuleModel`; `num_items_in_batch` divides the summed loss, and `shift_labels` take the
                place of `labels`: token t predicts label t.
        """
        kwargs = unwrapped(kwargs)
        shift_labels = kwargs.pop("shift_labels", None)
        labels = shift_labels if labels is None else labels
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        batch = None
        if labels is not None and tokens is not None:
            if cache is not None:
                self.prepare_cache(cache)
            given = {"attention_mask": attention_mask, "position_ids": position_ids}
            batch = self.model.describe(tokens, cache, kwargs | given)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            delta_batch=batch,
            **{CACHE: cache},
            **kwargs,
        )
        hidden_states = _select_positions(outputs.last_hidden_state, logits_to_keep)
        fused = labels is not None and self.training and fuses_loss(self)
        loss: Tensor | None = None
        logits: Tensor | LateLogits | None = None if fused else self.lm_head(hidden_states)
        if labels is not None:
            if self.loss_function is ForCausalLMLoss:  # another one may take labels of another kind
                _check_labels(labels if shift_labels is None else shift_labels, hidden_states)
                if shift_labels is not None:
                    shift_labels = shift_labels.contiguous()  # the function takes a view of them
            if batch is not None and batch.packed:
                first = batch.sequences.positions == 0
                if shift_labels is None:
                    labels = _leave_out(labels, first, logits_to_keep)
                else:
                    shift_labels = _leave_out(shift_labels, F.pad(first[:, 1:], (0, 1)), logits_to_keep)
            targets = {"num_items_in_batch": kwargs.get("num_items_in_batch"), "shift_labels": shift_labels}
            if fused:
                loss = loss_without_logits(self, hidden_states, labels, **targets)
                if not torch.compiler.is_compiling():
                    logits = LateLogits(hidden_states, self.lm_head.weight)
            else:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **targets)
        output = OutputWithLateLogits if isinstance(logits, LateLogits) else CausalLMOutputWithPast
        return output(
            loss=loss,
            logits=logits,  # type: ignore[arg-type]
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE: getattr(outputs, CACHE)},
        )


def _check_labels(labels: Tensor, hidden_states: Tensor) -> None:
    """Raise ValueError unless there is one label per position; the loss itself counts them and ignores their shape."""
    if labels.shape != hidden_states.shape[:-1]:
        raise ValueError(
            f"labels must have shape {tuple(hidden_states.shape[:-1])}, one for each position that gets logits, got "
            f"{tuple(labels.shape)}"
        )


def _leave_out(labels: Tensor, tokens: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """The labels of the positions that get logits, without those of some tokens of the batch, `[B, T]` bool."""
    return labels.masked_fill(_select_positions(tokens[..., None], logits_to_keep)[..., 0], IGNORED)


def _select_positions(hidden_states: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """Hidden states `[B, T, hidden_size]` at the last positions (0 = all), at positions `[n]` or `[B, n]`, or by mask.

    A mask `[B, T]` gives `[number of True, hidden_size]`.
    """
    if isinstance(logits_to_keep, int):
        if logits_to_keep < 0:
            raise ValueError(f"logits_to_keep must be at least 0, which keeps all, or positions, got {logits_to_keep}")
        return hidden_states[:, -logits_to_keep:] if logits_to_keep else hidden_states
    if logits_to_keep.dtype == torch.bool and logits_to_keep.ndim == 2:
        return hidden_states[logits_to_keep]
    if logits_to_keep.ndim == 2:
        return hidden_states.take_along_dim(logits_to_keep[..., None], dim=1)
    return hidden_states[:, logits_to_keep]
