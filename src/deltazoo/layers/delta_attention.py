"""The layer that all rules share: project, convolve, normalise, gates, rule, norm and output gate, project."""

from collections.abc import Mapping
from functools import partial
from inspect import signature
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from deltazoo.layers.initialization import Initializer, decay_rate_, log_uniform_step_
from deltazoo.layers.layer_input import LayerInput
from deltazoo.layers.layer_options import (
    LayerOptions,
    check_decay,
    check_sizes,
    check_steps,
    refuse_unknown_options,
)
from deltazoo.layers.norm import GatedRMSNorm, RMSNorm, l2_normalize, l2_normalize_both
from deltazoo.layers.parameters import Float32Parameters
from deltazoo.layers.rotary import Rotary, rotate_queries_and_keys
from deltazoo.layers.rule import EffectiveStep, RuleInputs, check_shape_of, run_rule
from deltazoo.layers.sequences import Sequences, describe_sequences, describe_shared
from deltazoo.layers.short_convolution import ShortConvolution, activation_function, convolve
from deltazoo.layers.state import StateAccess, StateStore
from deltazoo.names import function_of
from deltazoo.ops import ContextParallel, DeltaRuleOutput, decay
from deltazoo.ops.dtypes import at_least_float32
from deltazoo.ops.recompute import recomputable
from deltazoo.ops.validation import check_tensor
from deltazoo.runtime import RuntimeOptions
from deltazoo.spec import ANOTHER_FORM, Promises, RuleSpec, StepForm, get_rule, registered_layer, registered_promises


def layer_class(rule: str | RuleSpec) -> "type[DeltaRuleAttention]":
    """The class that computes a rule: the one registered with its name, or `DeltaRuleAttention`.

    Raises:
        ValueError: a name that no rule has; a spec need not be registered.
        TypeError: an argument that is neither a name nor a spec.
    """
    spec = get_rule(rule) if isinstance(rule, str) else rule
    if not isinstance(spec, RuleSpec):
        raise TypeError(f"rule must be a rule's name or a RuleSpec, got {rule!r}")
    return registered_layer(spec.name) or DeltaRuleAttention


def make_layer(
    rule: str | RuleSpec, hidden_size: int, num_heads: int, head_dim: int | None = None, **options: Any
) -> "DeltaRuleAttention":
    """A layer of the class registered with a rule.

    Arguments and errors are those of `DeltaRuleAttention`; `options` are its keyword arguments.
    """
    return layer_class(rule)(rule, hidden_size, num_heads, head_dim, **options)


class DeltaRuleAttention(Float32Parameters):
    """A delta-rule linear attention layer of any rule: `y = layer(x)`, both `[B, T, hidden_size]`.

    Parameters are named as in the checkpoints on the Hub. Linear maps are called as modules, so adapters and
    quantised replacements act on them; only plain ones are computed together in training (`linear_maps`).

    A rule that a spec alone cannot express is a subclass, registered with `register_rule`. It may override
    `step_gate`, `log_decay`, `rule_inputs` or `with_auxiliary_state`. Parameters of its own are made in
    `make_parameters`, filled by `initializers`, and described in `float32_parameters`, `input_projections` and
    `tensor_parallel`. docs/new_rules.md has an example.

    Args:
        rule: name of a registered rule, or a `RuleSpec`, such as a registered one changed by `dataclasses.replace`.
        hidden_size: width of the input and output.
        num_heads: query and key heads.
        head_dim: channels per query and key head; `hidden_size / num_heads` unless given.
        options: the other fields of `LayerOptions`, by keyword.

    Raises:
        TypeError: an unknown option; the message names the nearest.
        ValueError: options of the wrong type or that are not finite, sizes that do not fit together, options that do
            nothing in this rule, an unknown rule, or one whose registered layer is another class.
    """

    float32_parameters: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias")
    input_projections: ClassVar[tuple[str, ...]] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "g_proj",
        "f_proj",
        "a_proj",
        "b_proj",
    )
    """Names of the linear maps that read the layer's input, by `LayerInput.project`. Training may compute them as one
    function, decoding as one product; the narrow ones stand last, for alignment."""
    tensor_parallel: ClassVar[Mapping[str, Literal["heads", "whole", "low_rank"]]] = {}
    """The division of the parameters and linear maps that a subclass adds among vLLM's ranks of tensor parallelism, by
    name. "heads": the rows belong to the heads, in order. "whole": all heads share it. "low_rank": two maps made by
    `low_rank`, whose output belongs to the heads."""
    key_expansion: ClassVar[int] = 1
    """Key channels of the operator per channel of a key head; a rule that has several decays each by itself."""
    projects_micro_steps: ClassVar[bool] = True
    """Whether `k_proj`, `v_proj` and `b_proj` project to every micro-step. It is False for a subclass that makes the
    steps of its spec itself, or takes no more than one: its `num_micro_steps` cannot be changed."""
    shares_rows: ClassVar[bool] = True
    """Whether ranks can share rows (context parallelism): False for a subclass that carries a state by `run_scan`."""
    stands_for: ClassVar[type["DeltaRuleAttention"]]
    """The class of which this one is another name, or which it extends for swapped models; else the class itself."""
    context: ContextParallel | None = None
    """The ranks that share the rows of a layer called without a model (`deltazoo.context_parallel`)."""
    A_log: nn.Parameter
    dt_bias: nn.Parameter

    def __init__(
        self,
        rule: str | RuleSpec,
        hidden_size: int,
        num_heads: int,
        head_dim: int | None = None,
        **options: Any,
    ) -> None:
        refuse_unknown_options(type(self), options)
        given = LayerOptions(hidden_size, num_heads, head_dim, **options)
        super().__init__()
        self.spec = get_rule(rule) if isinstance(rule, str) else rule
        expected = layer_class(self.spec)
        if not isinstance(self, expected):
            raise ValueError(
                f"rule {self.spec.name!r} is computed by {expected.__name__}, got {type(self).__name__}: use that "
                "class, or deltazoo.layers.make_layer, which chooses it"
            )
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.num_v_heads = num_heads if given.num_v_heads is None else given.num_v_heads
        self.head_k_dim = self._default_head_dim() if head_dim is None else head_dim
        self.expand_v: float = given.of(self.spec, "expand_v")
        self.head_v_dim = round(self.head_k_dim * self.expand_v)
        self.conv_size = given.conv_size if given.use_short_conv else 0
        self.conv_initializer_range = given.conv_initializer_range
        self.activation = given.activation
        activation_function(given.activation)  # refuses others
        self.allow_neg_eigval: bool = given.of(self.spec, "allow_neg_eigval")
        self.neg_eigval = given.neg_eigval
        self.decay_lower_bound: float | None = given.of(self.spec, "decay_lower_bound")
        self.num_micro_steps: int = given.of(self.spec, "num_micro_steps")
        self.projected_steps = self.num_micro_steps if self.projects_micro_steps else 1
        self.initializer_range = given.initializer_range
        self.layer_idx = given.layer_idx
        self.num_layers = given.num_layers
        self.head_share = (0, 1)
        """The layer's share of the model's heads under tensor parallelism: its number, and the number of shares."""
        self.backend = given.backend
        self.fused_kernels = given.fused_kernels
        check_sizes(self)
        check_steps(self, given.beta_bias)
        self.effective_step: EffectiveStep | None = None
        self.precision: str | None = None
        if self.spec.corrects:
            self.effective_step = EffectiveStep(self.spec, allow_neg_eigval=self.allow_neg_eigval)
            self.precision = self.effective_step.precision if self.promises.gain_at_most_one else None
        check_decay(self, of_its_own=type(self).make_decay_gate is not DeltaRuleAttention.make_decay_gate)

        query_dim, value_dim = self.num_heads * self.head_k_dim, self.num_v_heads * self.head_v_dim
        key_dim, written_dim = self.projected_steps * query_dim, self.projected_steps * value_dim
        linear = partial(nn.Linear, bias=False)
        self.q_proj = linear(hidden_size, query_dim)
        self.k_proj = linear(hidden_size, key_dim)
        self.v_proj = linear(hidden_size, written_dim)
        if self.conv_size:
            self.q_conv1d = self.short_convolution(query_dim, unit_heads=self._unit_heads(self.spec.normalize_q))
            self.k_conv1d = self.short_convolution(key_dim, unit_heads=self._unit_heads(self.spec.normalize_k))
            self.v_conv1d = self.short_convolution(written_dim)
        if self.spec.corrects:
            self.b_proj = nn.Linear(hidden_size, self.projected_steps * self.num_v_heads, bias=given.beta_bias)
        self.make_decay_gate()
        self._make_output_gate(given.norm_eps, given.gate_bias)
        self.o_proj = linear(value_dim, hidden_size)
        self.make_parameters()
        self.init_parameters()

    def __init_subclass__(cls, *, stands_for: "type[DeltaRuleAttention] | None" = None, **options: Any) -> None:
        """Refuse a class that overrides `apply_rule`, or is written as an earlier version wanted it.

        Args:
            stands_for: the class whose rule it computes in the same way, under another name or with other parameters.

        Raises:
            TypeError: the class overrides `apply_rule`, has a method that takes `hidden_states` in place of a
                `LayerInput`, or has a promise that `register_rule` takes.
        """
        super().__init_subclass__(**options)
        cls.stands_for = stands_for or cls
        for name in Promises._fields:
            if stands_for is None and name in vars(cls):
                raise TypeError(
                    f"{cls.__name__}.{name} belongs to the registration of the rule: write "
                    f"deltazoo.register_rule(SPEC, layer={cls.__name__}, {name}=...) after the class"
                )
        for name in ("step_gate", "log_decay", "rule_inputs", "with_auxiliary_state"):
            parameters = list(signature(getattr(cls, name)).parameters)
            if "hidden_states" in parameters:
                line = ", ".join("x" if parameter == "hidden_states" else parameter for parameter in parameters)
                raise TypeError(
                    f"{cls.__name__}.{name} gets a LayerInput in place of hidden_states now: write `def {name}({line})`"
                    ", with x.hidden_states for the tensor, and x.project(name) for self.project(name, hidden_states)"
                )
        if cls.apply_rule is not DeltaRuleAttention.apply_rule:
            raise TypeError(
                f"{cls.__name__} overrides apply_rule, the call of the operator, and checks, reports and diagnoses "
                "would describe an operator that never ran. A rule of the operator's form is registered with "
                "register_rule, and its class overrides step_gate, log_decay, rule_inputs or with_auxiliary_state; "
                f"{ANOTHER_FORM}"
            )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: StateStore | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        sequences: Sequences | None = None,
        rotary: Rotary | None = None,
    ) -> Tensor:
        """Mix the tokens.

        Args:
            hidden_states: `[B, T, hidden_size]`.
            attention_mask: `[B, T]` bool or integer for these tokens, 1 = real; padding may be anywhere. Padded
                positions do not change the results of others and give zeros.
            past_key_values: the `StateStore` in which the layer reads and writes its state; any number of tokens may
                follow any number of earlier ones.
            cu_seqlens: `[N + 1]` boundaries of sequences packed along T, with B = 1.
            sequences: the description that `describe_sequences` makes of the mask or the boundaries, in place of both;
                the layers of a model share one.
            rotary: cosines and sines `[B or 1, T, d]` that turn the first d channels of queries and keys, before they
                are normalised; None: positions act through the recurrence alone, as in the papers.

        Returns:
            `[B, T, hidden_size]`.

        Raises:
            ValueError: arguments that do not fit each other or the layer.
            TypeError: a list in place of a tensor, or `past_key_values` of another kind.
        """
        past = StateAccess(past_key_values, self.layer_idx)
        sequences = self._describe(hidden_states, attention_mask, cu_seqlens, sequences, past)
        x = LayerInput(sequences.arrange(hidden_states), self, apart=sequences.computed_meanwhile)
        q, k, v = [x.project(name) for name in ("q_proj", "k_proj", "v_proj")]
        convolutions = (self.q_conv1d, self.k_conv1d, self.v_conv1d) if self.conv_size else None
        q, k, v, conv_state = convolve(convolutions, q, k, v, past, sequences, self.activation)
        q, k, v = self._split_heads(q, k, v)
        q, k = rotate_queries_and_keys(q, k, rotary, sequences, fused_kernels=self.fused_kernels)
        q, k = self._normalize(q, k)
        inputs = self.rule_inputs(x, q, k, v).mask_padding(sequences)
        inputs, auxiliary = self.with_auxiliary_state(x, inputs, past, sequences)
        output, state = self.apply_rule(inputs, past, sequences.meanwhile(x.project_ahead))
        y = self.o_proj(self._norm_and_gate(output, x).flatten(2))
        past.keep(conv_state, state, auxiliary, num_new_tokens=sequences.row_length(x.hidden_states))
        return sequences.restore(y)

    def _describe(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        sequences: Sequences | None,
        past: StateAccess,
    ) -> Sequences:
        check_tensor("hidden_states", hidden_states, required=True)
        if hidden_states.ndim != 3 or hidden_states.shape[-1] != self.hidden_size:
            raise ValueError(f"hidden_states must be [B, T, {self.hidden_size}], got {tuple(hidden_states.shape)}")
        if sequences is not None:
            if attention_mask is not None or cu_seqlens is not None:
                raise ValueError(
                    "sequences already says where sequences begin: pass no attention_mask or cu_seqlens beside it"
                )
            return sequences
        batch_size, num_tokens, _ = hidden_states.shape
        if self.context is None:
            return describe_sequences(batch_size, num_tokens, attention_mask=attention_mask, cu_seqlens=cu_seqlens)
        check = partial(_check_shared, attention_mask, past)
        return describe_shared(self.context, batch_size, num_tokens, cu_seqlens, check, fills_cache=past.wanted)

    def _split_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _per_head(q, self.head_k_dim), _per_head(k, self.head_k_dim), _per_head(v, self.head_v_dim)

    def _normalize(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        # Convolutions with `unit_heads` have normalised their output already.
        normalize_q = self.spec.normalize_q and not (self.conv_size and self.q_conv1d.unit_heads)
        normalize_k = self.spec.normalize_k and not (self.conv_size and self.k_conv1d.unit_heads)
        if normalize_q and normalize_k:
            return l2_normalize_both(q, k, fused=self.fused_kernels)
        normalize = partial(l2_normalize, fused=self.fused_kernels)
        return normalize(q) if normalize_q else q, normalize(k) if normalize_k else k

    def rule_inputs(self, x: LayerInput, q: Tensor, k: Tensor, v: Tensor) -> RuleInputs:
        """The operator's inputs for the current tokens. A subclass may override it.

        The inputs of a token must depend on that token alone. Otherwise training, decoding, padded and packed batches
        would give different results; `deltazoo check` finds such rules.

        Args:
            x: the layer's input, and its linear maps: `x.hidden_states`, `x.project(name)`.
            q, k, v: per head, convolved and normalised, in the dtype the operator will see. With n micro-steps the
                heads of k and v are those of the first step, then those of the second, and so on.
        """
        beta = None
        if self.effective_step is not None:
            beta = self.effective_step(self.step_gate(x), k, fused=self.fused_kernels)
            if self.neg_eigval == "erase":
                # The write is beta * v: halved values undo the doubling there, exactly.
                v = recomputable(torch.mul, v, 0.5)
        return RuleInputs(q, k, v, beta, self.log_decay(x))

    def with_auxiliary_state(
        self, x: LayerInput, inputs: RuleInputs, past: StateAccess, sequences: Sequences
    ) -> tuple[RuleInputs, Tensor | None]:
        """The operator's inputs, changed by a further state that the rule has, and that state after these tokens.

        Most rules have none. A subclass with one reads `past.auxiliary`, None before the first token, and carries it on
        with `run_rule`, which knows where sequences begin.

        Args:
            x: the layer's input.
            inputs: the result of `rule_inputs`, with padding masked.
            past: the states before these tokens.
            sequences: the sequences of the batch.
        """
        return inputs, None

    def step_gate(self, x: LayerInput) -> Tensor:
        """The gate b in (0, 1) from which the spec's step size is computed. A subclass may override it.

        Args:
            x: the layer's input.

        Returns:
            `[B, T, HV]` float32 (float64 stays), not negative; with n micro-steps n * HV, those of the first step
            first.
        """
        return torch.sigmoid(at_least_float32(x.project("b_proj")))

    def log_decay(self, x: LayerInput) -> Tensor | None:
        """The log-decay of the current tokens, None for a rule without decay. A subclass may override it.

        Args:
            x: the layer's input.

        Returns:
            `[B, T, HV]` or, per key channel, `[B, T, HV, K]`, float32 (float64 stays), natural log, not positive.
        """
        if self.spec.decay == "none":
            return None
        per_head = self.spec.decay == "scalar"
        a = x.project("a_proj") if per_head else _per_head(x.project("f_proj"), self.head_k_dim)
        found = decay.log_decay(self.decay_gate, a, self.A_log, self.dt_bias, fused=self.fused_kernels)
        check_shape_of("log-decay", self.spec, found, a)
        return found

    def project(self, name: str, *_: Any) -> Tensor:
        """Raise TypeError with the new line, for a method written when the layer had `project`, not its input."""
        raise TypeError(f"{type(self).__name__}.project({name!r}, x) is x.project({name!r}) now, with x a LayerInput")

    def apply_rule(self, inputs: RuleInputs, past: StateAccess, sequences: Sequences) -> DeltaRuleOutput:
        """The operator's output `[B, T, HV, V]`, and the state after the last token."""
        return run_rule(
            inputs,
            past.recurrent,
            sequences,
            erase_reads=self.spec.erase_reads,
            num_micro_steps=self.num_micro_steps,
            in_place=past.in_place,
            scale=None if self.spec.scale_queries else 1.0,
            backend=self.backend,
            precision=self.precision,
        )

    def _norm_and_gate(self, output: Tensor, x: LayerInput) -> Tensor:
        if self.spec.output_gate == "none":
            return self.o_norm(output)
        return self.o_norm(output, _per_head(x.project("g_proj"), self.head_v_dim))

    def _default_head_dim(self) -> int:
        if self.num_heads < 1:
            raise ValueError(f"num_heads must be at least 1, got {self.num_heads}")
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"{type(self).__name__} takes head_dim = hidden_size / num_heads unless given, but hidden_size="
                f"{self.hidden_size} is no multiple of num_heads={self.num_heads}: pass head_dim"
            )
        return self.hidden_size // self.num_heads

    def _unit_heads(self, normalize: bool) -> int:
        """Channels per head that the convolution normalises, 0 if it does not. A rotation after it keeps the norm."""
        return self.head_k_dim if normalize else 0

    def short_convolution(self, channels: int, *, unit_heads: int = 0) -> ShortConvolution:
        """A convolution with the layer's options; `unit_heads` is that of `ShortConvolution`."""
        return ShortConvolution(
            channels,
            self.conv_size,
            self.activation,
            unit_heads=unit_heads,
            fused=self.fused_kernels,
            initializer_range=self.conv_initializer_range,
        )

    def make_decay_gate(self) -> None:
        """Make the parameters that `log_decay` reads. A subclass that overrides one overrides both."""
        if self.spec.decay == "none":
            return
        if self.spec.decay == "scalar":
            channels = self.num_v_heads
            self.a_proj = nn.Linear(self.hidden_size, channels, bias=False)
        else:
            channels = self.num_v_heads * self.head_k_dim
            self.f_proj = self.low_rank(channels, bias=False)
        for name, size in (("A_log", self.num_v_heads), ("dt_bias", channels)):
            self.register_parameter(name, nn.Parameter(torch.empty(size, dtype=torch.float32)))
        self.decay_gate = function_of("decay_gate", self.spec.decay_gate, decay.DECAY_GATES)
        if self.decay_lower_bound is not None:
            self.decay_gate = partial(decay.bounded_decay, lower_bound=self.decay_lower_bound)

    def _make_output_gate(self, norm_eps: float, gate_bias: bool) -> None:
        if not gate_bias and self.spec.output_gate != "low_rank":
            raise ValueError(
                f"rule {self.spec.name!r} has no low-rank output gate, whose bias gate_bias=False leaves out"
            )
        if self.spec.output_gate == "none":
            self.o_norm: RMSNorm = RMSNorm(self.head_v_dim, norm_eps, fused=self.fused_kernels)
            return
        value_dim = self.num_v_heads * self.head_v_dim
        self.g_proj: nn.Module = (
            nn.Linear(self.hidden_size, value_dim, bias=False)
            if self.spec.output_gate == "full"
            else self.low_rank(value_dim, bias=gate_bias)
        )
        self.o_norm = GatedRMSNorm(self.head_v_dim, norm_eps, self.spec.gate_activation, fused=self.fused_kernels)

    def low_rank(self, channels: int, *, bias: bool, rank: int | None = None) -> nn.Sequential:
        """Two linear maps with `rank` channels between them, `head_v_dim` unless given.

        `bias` is that of the second map; the released KDA models have one in the output gate only.
        """
        rank = self.head_v_dim if rank is None else rank
        return nn.Sequential(
            nn.Linear(self.hidden_size, rank, bias=False),
            nn.Linear(rank, channels, bias=bias),
        )

    def make_parameters(self) -> None:
        """Make the parameters and modules that a subclass adds, after sizes and options are set.

        `initializers` fills them.
        """

    def initializers(self, initializer_range: float | None = None) -> dict[str, Initializer]:
        """Functions that fill the layer's parameters in place, by parameter name.

        A subclass adds its own. A parameter without one is zero if its name ends in `.bias`, otherwise normal.

        Args:
            initializer_range: standard deviation of the linear weights; the layer's own unless given.
        """
        std = self.initializer_range if initializer_range is None else initializer_range
        linear = partial(nn.init.normal_, std=std)
        known: dict[str, Initializer] = {
            "A_log": partial(decay_rate_, rate_range=self.spec.decay_rate_range),
            "dt_bias": partial(log_uniform_step_, dt_range=self.spec.dt_range),
            "o_norm.weight": nn.init.ones_,
        }
        if self.decay_lower_bound is not None:
            known["A_log"] = nn.init.zeros_  # the bounded gate starts from a plain sigmoid
        known |= {
            f"{name}.weight": x.initialize_ for name, x in self.named_children() if isinstance(x, ShortConvolution)
        }
        names = [name for name, _ in self.named_parameters()]
        return {x: known.get(x) or (nn.init.zeros_ if x.endswith(".bias") else linear) for x in names}

    def neutral_initializers(self) -> dict[str, Initializer]:
        """Functions that fill added parameters of a layer that replaces softmax attention, by parameter name.

        They take the place of those in `initializers`, so that a rule begins as the rule it extends, or close to it.
        """
        return {}

    def init_parameters(self, initializer_range: float | None = None) -> None:
        """Start all parameters afresh, except those a checkpoint has filled (`_is_hf_initialized`).

        Those on the meta device have no values; there torch takes a millisecond for each.
        """
        for name, initialize in self.initializers(initializer_range).items():
            parameter = self.get_parameter(name)
            if not (parameter.is_meta or getattr(parameter, "_is_hf_initialized", False)):
                initialize(parameter)

    @property
    def is_registered_class(self) -> bool:
        """Whether the layer is of the class registered with its rule, for which alone promises hold."""
        return self.stands_for is layer_class(self.spec)

    @property
    def promises(self) -> Promises:
        """The promises that hold for the layer: all of them, if this class computes the rule as its spec says."""
        if not self.is_registered_class:
            return Promises()
        if self.stands_for is DeltaRuleAttention:
            return Promises(StepForm(), gain_at_most_one=True)
        return registered_promises(self.spec.name)

    @property
    def step_form(self) -> StepForm | None:
        """Decay and keys of the layer in the terms of the decoding kernel; None: the kernel does not know them."""
        form = self.promises.step_form
        if form is None or form.decay is not None or self.spec.decay == "none":
            return form
        names: dict[Any, Any] = {decay.softplus_decay: "softplus", decay.saturating_decay: "saturating"}
        name = names.get(getattr(self, "decay_gate", None))
        gate = "a_proj" if self.spec.decay == "scalar" else "f_proj"
        return name and form._replace(decay=name, decay_gate=gate)

    def use_runtime(self, options: RuntimeOptions) -> None:
        """Run with other `backend` and `fused_kernels`; ValueError if an output gate's activation has no kernel."""
        self.backend, self.fused_kernels = options.backend, options.fused_kernels
        for child in self.children():
            if isinstance(child, (ShortConvolution, RMSNorm)):
                child.set_fused(options.fused_kernels)

    def extra_repr(self) -> str:
        """Rule and shape, for printing."""
        heads = f"{self.num_heads} heads of {self.head_k_dim}"
        values = f"{self.num_v_heads} value heads of {self.head_v_dim}"
        signs = f", negative eigenvalues on {self.neg_eigval}" if self.allow_neg_eigval else ""
        steps = f", {self.num_micro_steps} micro-steps" if self.num_micro_steps > 1 else ""
        return f"{self.spec.name}, {heads}, {values}{signs}{steps}"


DeltaRuleAttention.stands_for = DeltaRuleAttention


def _check_shared(attention_mask: Tensor | None, past: StateAccess) -> None:
    if attention_mask is not None:
        raise ValueError("rows that several ranks share take no attention_mask: pack them with cu_seqlens")
    if past.recurrent is not None:
        raise ValueError(
            "rows that several ranks share fill an empty cache; for the tokens after them call "
            "deltazoo.context_parallel(model, None)"
        )


def _per_head(x: Tensor, channels: int) -> Tensor:
    """`[B, T, heads * channels]` as `[B, T, heads, channels]`."""
    return x.view(*x.shape[:-1], x.shape[-1] // channels, channels)  # takes the host half as long as unflatten
