"""A delta-rule layer inside vLLM: its linear maps are modules of vLLM, and its states are in vLLM's pages.

vLLM's modules take the place of the layer's linear maps, so that vLLM can divide them among ranks, adapt and quantise
them. The maps that read the layer's input become one or two products; in the layer, modules that return parts of these
products stand in for the maps. vLLM's module of the output map follows the layer.

In each step vLLM computes the maps for all tokens. The layer computes what is between the maps: first for the sequences
that decode, one token each, then for pieces of prompts, as packed sequences. If kernels of a decoding step compute the
rule (`deltazoo.generation.fused_blocks`), they read and write the pages in place.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from deltazoo.generation.fused_blocks import FusedRule, first_maps, why_not_this_rule
from deltazoo.layers import DeltaRuleAttention, RMSNorm
from deltazoo.layers.layer_options import check_shares
from deltazoo.layers.norm import GatedRMSNorm
from deltazoo.layers.rotary import Rotary
from deltazoo.layers.sequences import WHOLE_ROWS, Sequences, describe_sequences
from deltazoo.layers.state import LayerState, meta_state
from deltazoo.models.delta_layers import GATE_PROJECTIONS
from deltazoo.ops.fused import takes_kernel
from deltazoo.runtime import RuntimeOptions

MakeLayer = Callable[[int], DeltaRuleAttention]
"""A function that makes the layer with one rank's share of the heads, given the number of ranks."""


def meta_layer(make: MakeLayer, ranks: int) -> tuple[DeltaRuleAttention, DeltaRuleAttention]:
    """The whole layer, and a rank's share of it, on the meta device; ValueError if ranks cannot divide the heads."""
    with torch.device("meta"):
        whole = make(1)
        if ranks > 1:
            check_shares(whole, ranks)
        if ranks > 1 and getattr(whole, "qk_norm", None) == "width":
            raise ValueError("tensor parallelism divides heads, and queries and keys have norms over all heads")
        return whole, make(ranks)


def states_of(make: MakeLayer, ranks: int, dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each state that a rank keeps of a sequence; inputs of convolutions have the model's dtype."""
    state = meta_state(meta_layer(make, ranks)[1])
    return [(tuple(x.shape[1:]), dtype if x is state.conv else torch.float32) for x in state if x is not None]


class JoinedMaps(nn.Module):
    """A module that joins linear maps of a checkpoint into fewer products."""

    joined: Mapping[str, Mapping[str, Any]]
    """The names of each product's maps in the checkpoint, each with vLLM's name of the part."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load parameters by the names of a checkpoint; returns the names of the filled parameters in vLLM."""
        parameters, filled = dict(self.named_parameters()), set()
        parts = {name: (product, part) for product, maps in self.joined.items() for name, part in maps.items()}
        for name, x in weights:
            owner, _, kind = name.rpartition(".")
            product, part = parts.get(owner, (owner, None))
            target = f"{product}.{kind}" if product else kind
            if target not in parameters:
                beside = ", ".join(x for x in parameters if x.startswith(f"{product}."))
                raise ValueError(f"the checkpoint has {name}, and in vLLM it has no place in {product} ({beside})")
            load = getattr(parameters[target], "weight_loader", default_weight_loader)
            load(parameters[target], x, *(() if part is None else (part,)))
            filled.add(target)
        return filled


class _Result(nn.Module):
    """A stand-in for a linear map of a layer, which returns the result that vLLM's module computed."""

    def __init__(self, results: dict[str, Tensor], name: str) -> None:
        super().__init__()
        self.results, self.name = results, name

    def forward(self, x: Tensor) -> Tensor:
        return self.results[self.name]


class _PageStates:
    """The `past_key_values` of a layer, which reads and writes the states of some sequences in vLLM's pages."""

    fixed = False

    def __init__(self, pages: Sequence[Tensor], has_window: bool, rows: Tensor, goes_on: Tensor | None) -> None:
        self.pages, self.has_window, self.rows, self.goes_on = pages, has_window, rows.long(), goes_on

    def get_state(self, layer_idx: int) -> LayerState:
        """The states of the sequences; zeros for sequences that begin."""
        states: list[Tensor | None] = []
        for page in self.pages:
            x = page[self.rows]
            if self.goes_on is not None:
                x = torch.where(self.goes_on.view(-1, *[1] * (x.ndim - 1)), x, torch.zeros((), dtype=x.dtype))
            states.append(x)
        return LayerState(*(states if self.has_window else [None, *states]))  # type: ignore[arg-type]

    def set_state(self, layer_idx: int, state: LayerState, num_new_tokens: int) -> None:
        """Write the states to their pages."""
        for page, x in zip(self.pages, [x for x in state if x is not None], strict=True):
            page[self.rows] = x.to(page.dtype)


class PagedLayer(JoinedMaps, MambaBase):
    """A delta-rule layer in place of a layer of vLLM: it maps `[tokens, hidden_size]` to `[tokens, hidden_size]`.

    Args:
        make: function that makes the layer, see `MakeLayer`.
        vllm_config: vLLM's configuration of the model.
        prefix: the layer's name in the model; vLLM assigns pages to this name.

    Raises:
        ValueError: the ranks cannot divide the heads.
    """

    def __init__(self, make: MakeLayer, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        whole, layer = meta_layer(make, ranks)
        self.prefix, self.has_window = prefix, bool(layer.conv_size)
        self.states = states_of(make, ranks, vllm_config.model_config.dtype)
        self.kv_cache = (torch.tensor([]),) * len(self.states)
        vllm_config.compilation_config.static_forward_context[prefix] = self
        self.layer = layer.to_empty(device=torch.get_default_device())
        layer.head_share = (rank, ranks)
        layer.use_runtime(RuntimeOptions())
        fused = _has_kernels(layer)
        self._join_maps(whole, vllm_config.quant_config)
        begins = {name: columns.start for name, columns in self.columns.items()}
        self.rule = FusedRule(layer, begins, lambda name: getattr(layer, name)[1]) if fused else None
        self._width = layer.num_v_heads * layer.head_v_dim
        self._share_parameters(whole, rank)

    def _join_maps(self, whole: DeltaRuleAttention, quantised: QuantizationConfig | None) -> None:
        """Replace the layer's linear maps by vLLM's modules.

        Quantisation leaves maps to step sizes, decays and low ranks as they are. The second half of a map of low rank
        stays in the layer. Every rank has the whole first half, so vLLM's product contains it once for each rank.
        """
        first: dict[str, Any] = first_maps(whole)
        ranks = get_tensor_model_parallel_world_size()
        self.low_rank = [name for name in first if isinstance(getattr(whole, name), nn.Sequential)]
        gates = {*self.low_rank, *GATE_PROJECTIONS} if quantised else set()
        groups = {"in_proj": [x for x in first if x not in gates], "gates_proj": [x for x in first if x in gates]}
        self.joined: dict[str, dict[str, int]] = {}
        self.columns: dict[str, slice] = {}
        """The columns of each map's result, in the results of all products side by side."""
        self._results: dict[str, Tensor] = {}
        end = 0
        for product, names in groups.items():
            if not names:
                continue
            sizes = [first[x].out_features * (ranks if x in self.low_rank else 1) for x in names]
            self.joined[product] = {f"{x}.0" if x in self.low_rank else x: part for part, x in enumerate(names)}
            config, biased = quantised if product == "in_proj" else None, any(first[x].bias is not None for x in names)
            if config is not None:
                config.packed_modules_mapping = {**config.packed_modules_mapping, **self.packed}
            made = MergedColumnParallelLinear(
                whole.hidden_size, sizes, bias=biased, quant_config=config, prefix=f"{self.prefix}.{product}",
                return_bias=False,
            )  # fmt: skip
            if biased:
                made.bias.data.zero_()  # for those of the maps that have no bias
            setattr(self, product, made)
            for name, size in zip(names, sizes, strict=True):
                self.columns[name] = slice(end, end + size // ranks)
                end += size // ranks
                stand_in = _Result(self._results, name)
                if name in self.low_rank:
                    getattr(self.layer, name)[0] = stand_in
                else:
                    setattr(self.layer, name, stand_in)
        out = whole.o_proj
        self.o_proj = RowParallelLinear(
            out.in_features, out.out_features, bias=out.bias is not None, quant_config=quantised,
            prefix=f"{self.prefix}.o_proj", return_bias=False,
        )  # fmt: skip
        self.layer.o_proj = nn.Identity()  # type: ignore[assignment]

    def _share_parameters(self, whole: DeltaRuleAttention, rank: int) -> None:
        """Make each parameter left in the layer load the rows of this rank's heads, or all rows if heads share it."""
        shapes = {name: x.shape for name, x in whole.named_parameters()}
        for name, parameter in self.layer.named_parameters():
            start = 0 if shapes[name] == parameter.shape else rank * len(parameter)

            def load(
                parameter: Tensor,
                loaded: Tensor,
                start: int = start,
                name: str = name,
                shape: torch.Size = shapes[name],
            ) -> None:
                if loaded.numel() != shape.numel():
                    raise ValueError(f"{self.prefix}.{name} must have shape {tuple(shape)}, got {tuple(loaded.shape)}")
                parameter.data.copy_(loaded.reshape(shape)[start : start + len(parameter)])

            parameter.weight_loader = load  # type: ignore[attr-defined]

    @property
    def packed(self) -> dict[str, list[str]]:
        """Names of the maps in each product, for vLLM."""
        return {product: list(maps) for product, maps in self.joined.items()}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load parameters by the names of the layer's checkpoint; returns the names of the filled ones in vLLM."""
        ranks, own = get_tensor_model_parallel_world_size(), dict(self.layer.named_parameters())
        halves = tuple(f"{name}.0." for name in self.low_rank)
        given = {name: torch.cat([x] * ranks) if name.startswith(halves) else x for name, x in weights}
        return super().load_weights((f"layer.{name}" if name in own else name, x) for name, x in given.items())

    def forward(self, hidden_states: Tensor, rotary: Rotary | None = None) -> Tensor:
        """Mix the tokens of a step.

        Args:
            hidden_states: `[T, hidden_size]`.
            rotary: cosines and sines `[T, d]`, as the layer takes them.
        """
        joint = _joined([getattr(self, product)(hidden_states) for product in self.joined], -1)
        metadata: Any = get_forward_context().attn_metadata
        if metadata is None:  # vLLM measures memory: all tokens are one prompt
            sequences = describe_sequences(1, len(hidden_states))
            return self.o_proj(self._run(joint, hidden_states, rotary, slice(None), sequences, None))
        m = metadata[self.prefix]
        decoded, end = m.num_decode_tokens, m.num_decode_tokens + m.num_prefill_tokens
        outputs = []
        if decoded:
            rows = m.state_indices_tensor_d[:decoded, 0].contiguous()
            if self.rule is not None:
                outputs.append(self._step(joint[:decoded], rotary, rows))
            else:
                states = _PageStates(self.kv_cache, self.has_window, rows, None)
                outputs.append(self._run(joint, hidden_states, rotary, slice(decoded), WHOLE_ROWS, states))
        if m.num_prefills:
            states = _PageStates(self.kv_cache, self.has_window, m.state_indices_tensor_p, m.has_initial_states_p)
            outputs.append(self._run(joint, hidden_states, rotary, slice(decoded, end), _packed(m), states))
        if end < len(hidden_states):  # vLLM has padded the step
            outputs.append(hidden_states.new_zeros(len(hidden_states) - end, self._width))
        return self.o_proj(_joined(outputs, 0))

    def _step(self, joint: Tensor, rotary: Rotary | None, rows: Tensor) -> Tensor:
        """The input of the output map, by kernels, for one token of each sequence; `rows` `[R]` are their pages."""
        from deltazoo.ops.decoding.between_products import norm_heads

        assert self.rule is not None
        turned = None if rotary is None else (rotary[0][: len(rows), None], rotary[1][: len(rows), None])
        output = self.rule.of_parts(joint[None], LayerState(*self.kv_cache), turned, state_indices=rows)
        return norm_heads(*output, joint.dtype)

    def _run(
        self,
        joint: Tensor,
        x: Tensor,
        rotary: Rotary | None,
        tokens: slice,
        sequences: Sequences,
        states: _PageStates | None,
    ) -> Tensor:
        """The input of the output map for some tokens, `[tokens, inputs of that map]`."""
        along = 1 if sequences is WHOLE_ROWS and states is not None else 0
        for name, columns in self.columns.items():
            self._results[name] = joint[tokens, columns].unsqueeze(along)
        turned = None if rotary is None else (rotary[0][tokens].unsqueeze(along), rotary[1][tokens].unsqueeze(along))
        y = self.layer(x[tokens].unsqueeze(along), past_key_values=states, sequences=sequences, rotary=turned)
        self._results.clear()
        return y.flatten(0, 1)

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of one sequence's states, for vLLM."""
        return tuple(shape for shape, _ in self.states)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Dtypes of one sequence's states, for vLLM."""
        return tuple(dtype for _, dtype in self.states)

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        """The kind of metadata, which tells the sequences that decode, and the page of each sequence."""
        return MambaAttentionBackendEnum.MAMBA1


def _has_kernels(layer: DeltaRuleAttention) -> bool:
    """Whether kernels of a decoding step can compute the layer between its maps, with states in pages."""
    known = layer.is_registered_class and type(layer.o_norm) in (RMSNorm, GatedRMSNorm)
    return known and takes_kernel(None, layer.o_norm.weight) and why_not_this_rule(layer) is None


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _packed(metadata: Any) -> Sequences:
    """The description of a step's pieces of prompts, made once for all layers that share the metadata."""
    if not hasattr(metadata, "deltazoo_sequences"):
        metadata.deltazoo_sequences = describe_sequences(
            1, metadata.num_prefill_tokens, cu_seqlens=metadata.query_start_loc_p
        )
    return metadata.deltazoo_sequences
