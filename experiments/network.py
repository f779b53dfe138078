"""The small model around one layer: every configuration has the same skeleton and, within 2%, as many parameters."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltazoo.layers import DeltaRuleAttention, make_layer
from experiments.configurations import Configuration, parse_configuration
from experiments.experiment import Recipe
from experiments.tasks import Task

_TOLERANCE = 0.02
_REFERENCE = "delta_net"


class LabModel(nn.Module):
    """Embedding, pre-norm layers of a rule and a GELU MLP, norm, and a linear read-out at every token.

    Args:
        configuration: the rule and its options.
        recipe: sizes.
        task: symbols or measurements in, classes out.
        mlp_width: hidden width of the MLPs; 0 leaves them out.
    """

    def __init__(self, configuration: Configuration, recipe: Recipe, task: Task, mlp_width: int) -> None:
        super().__init__()
        width = recipe.hidden_size
        symbols, classes = task.sizes
        if task.channels is None:
            self.embedding: nn.Module = nn.Embedding(symbols, width)
        else:
            self.embedding = MeasurementEmbedding(task.channels, recipe.train_lengths[1], width)
        self.layers = nn.ModuleList(
            _make_rule_layer(configuration, recipe) if recipe.bare else Layer(configuration, recipe, mlp_width)
            for _ in range(recipe.num_layers)
        )
        self.micro_steps = max((layer.num_micro_steps for layer in self._rule_layers()), default=1)
        self.norm = nn.LayerNorm(width)
        self.read_out = nn.Linear(width, classes)

    def forward(self, inputs: Tensor, tokens: Tensor) -> Tensor:
        """Logits at some of the tokens.

        Args:
            inputs: `[B, T]` or `[B, T, channels]`.
            tokens: `[N]` int64, which of the `B * T` tokens are asked for, each once and in order.

        Returns:
            `[N, num_classes]`.
        """
        x = self.embedding(inputs)
        for layer in self.layers:
            x = layer(x)
        x = x.flatten(0, 1)
        if len(tokens) < len(x):  # otherwise all are asked for, and selecting them would only cost time
            x = x.index_select(0, tokens)
        return self.read_out(self.norm(x))

    def use_backend(self, backend: str | None) -> None:
        """Run the operators of all layers on one backend."""
        for layer in self._rule_layers():
            layer.backend = backend

    def _rule_layers(self) -> list[DeltaRuleAttention]:
        return [module for module in self.modules() if isinstance(module, DeltaRuleAttention)]


class Layer(nn.Module):
    """A layer of the rule and an MLP, each behind a norm and added to its input."""

    def __init__(self, configuration: Configuration, recipe: Recipe, mlp_width: int) -> None:
        super().__init__()
        width = recipe.hidden_size
        self.rule_norm = nn.LayerNorm(width)
        self.rule_layer = _make_rule_layer(configuration, recipe)
        if mlp_width:
            self.mlp_norm = nn.LayerNorm(width)
            self.up = nn.Linear(width, mlp_width)
            self.down = nn.Linear(mlp_width, width)
        self.has_mlp = bool(mlp_width)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[B, T, hidden_size]` to the same shape."""
        x = x + self.rule_layer(_in_autocast_dtype(self.rule_norm(x)))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)))) if self.has_mlp else x


def _in_autocast_dtype(x: Tensor) -> Tensor:
    """`x` in autocast's dtype, converted once for all matrix products that read it."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


class MeasurementEmbedding(nn.Module):
    """Measurements through a linear map plus a learned position, then GELU, as in EFLA's pixel script.

    Positions start with standard deviation 1, as embeddings do. With small ones a brighter image turns the keys, and
    no rule then survives a change of brightness.
    """

    def __init__(self, channels: int, length: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, width)
        self.positions = nn.Parameter(torch.randn(length, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map `[B, T, channels]` to `[B, T, width]`."""
        return F.gelu(self.linear(x) + self.positions[: x.shape[1]])


class RotarySoftmaxAttention(nn.Module):
    """The models' softmax attention with rotary positions, behind the interface of the delta-rule layers."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        from deltazoo.models.configuration import DeltaRuleConfig
        from deltazoo.models.softmax_attention import RotaryEmbedding, SoftmaxAttention

        config = DeltaRuleConfig(
            hidden_size=recipe.hidden_size,
            num_hidden_layers=1,
            layer_types=["full_attention"],
            num_attention_heads=recipe.num_heads,
        )
        config._attn_implementation = "sdpa"
        self.rotary = RotaryEmbedding(config)
        self.attention = SoftmaxAttention(config, layer_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        """Attend causally over `[B, T, hidden_size]`."""
        positions = torch.arange(x.shape[1], device=x.device)[None]
        # In float32 for every dtype of x, as all gates and positions of the lab are computed.
        return self.attention(x, position_embeddings=self.rotary(x.float(), positions))[0]


def _make_rule_layer(configuration: Configuration, recipe: Recipe) -> nn.Module:
    if configuration.spec is None:
        return RotarySoftmaxAttention(recipe)
    options: dict[str, Any] = dict(configuration.options)
    if recipe.beta_bias is not None and configuration.spec.corrects:
        options["beta_bias"] = True
    layer = make_layer(
        configuration.spec,
        recipe.hidden_size,
        recipe.num_heads,
        recipe.head_dim,
        expand_v=1.0,
        initializer_range=recipe.initializer_range,
        use_short_conv=recipe.use_short_conv,
        **options,
    )
    if recipe.beta_bias is not None and configuration.spec.corrects:
        nn.init.constant_(layer.b_proj.bias, recipe.beta_bias)
    return layer


def build_model(configuration: Configuration, recipe: Recipe, task: Task) -> LabModel:
    """The configuration's model, its MLP as wide as makes the number of parameters the same for all.

    Raises:
        ValueError: no width of the MLP gives that number within 2%.
    """
    with torch.device("meta"):
        wanted = _count(
            LabModel(parse_configuration(_REFERENCE), recipe, task, round(recipe.mlp_ratio * recipe.hidden_size))
        )
        width = 0
        if recipe.mlp_ratio:
            one, two = (_count(LabModel(configuration, recipe, task, mlp_width)) for mlp_width in (1, 2))
            width = recipe.mlp_multiple * round((1 + round((wanted - one) / (two - one))) / recipe.mlp_multiple)
        found = _count(LabModel(configuration, recipe, task, max(width, 0)))
    if width < 0 or abs(found - wanted) > _TOLERANCE * wanted:
        raise ValueError(
            f"configuration {configuration.name!r} has {found:,} parameters, not within {_TOLERANCE:.0%} "
            f"of {wanted:,}: raise mlp_ratio={recipe.mlp_ratio} or lower mlp_multiple={recipe.mlp_multiple}"
        )
    return LabModel(configuration, recipe, task, width)


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
