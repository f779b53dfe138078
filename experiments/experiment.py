"""An experiment: one task, one recipe, several configurations; and the jobs it consists of."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from experiments.configurations import parse_configuration
from experiments.loop import rate_factor
from experiments.runner import Job
from experiments.tasks import TASKS


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How models are built and trained on a task."""

    hidden_size: int = 64
    num_layers: int = 1
    num_heads: int = 4
    head_dim: int = 16
    use_short_conv: bool = True
    mlp_ratio: float = 2.0
    """Hidden width of DeltaNet's MLP over `hidden_size`. Other configurations get the width that makes their number of
    parameters the same. 0: no MLP."""
    mlp_multiple: int = 1
    """MLP widths are multiples of this; 8 keeps the rows of 16-bit matrices where tensor cores want them."""
    bare: bool = False
    """Layers alone, `x = layer(x)`: no norm before them and no residual path around them, so that the input's scale
    reaches the keys. Needs mlp_ratio 0."""
    initializer_range: float = 0.02
    """Standard deviation of the layers' linear weights."""
    beta_bias: float | None = None
    """Where given, b_proj has a bias that starts there."""

    train_lengths: tuple[int, int] = (3, 40)
    """Shortest and longest training sequences; one length per batch, uniform."""
    curriculum: float = 0.0
    """Share of the training during which the longest length grows from its half to the whole."""
    test: tuple[int | str, ...] = (40, 128, 256)
    """Test lengths or conditions."""
    test_sequences: int = 256

    batch_size: int = 64
    draw_ahead: int = 1
    """Batches drawn at a time, which then share their length: for tasks that are slow to draw."""
    steps: int = 250
    learning_rate: float = 1e-3
    warmup: float = 0.1
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    bf16: bool = False
    """Autocast to bfloat16 in training and testing (weights, gates and state stay in float32); else float32
    throughout, on a GPU without TF32. Tasks that are about exactness, such as state tracking, stay in float32."""

    def longest(self, step: int) -> int:
        """Longest training length at a step."""
        low, high = self.train_lengths
        if not self.curriculum:
            return high
        progress = min(1.0, step / (self.curriculum * self.steps))
        return max(low, round(high * (1 + progress) / 2))

    def rate_factor(self, step: int) -> float:
        """Learning rate over its peak: linear warm-up, then a cosine to zero."""
        return rate_factor(step, self.steps, max(1, round(self.warmup * self.steps)), first=0)


class Experiment:
    """A comparison: what is compared, on what, how.

    Args:
        name: also of the task, unless `task` is another one.
        recipe: how models are built and trained, with `changes` of its fields.
        configurations: by name.
        rates: learning rates of configurations that do not use the recipe's.
        seeds: run at first; spare_seeds: run too when a claim on the experiment fails.
        headline: the test condition that a gate over several experiments reads; the first of the recipe unless given.
    """

    def __init__(
        self,
        name: str,
        recipe: Recipe,
        configurations: Sequence[str],
        *,
        task: str | None = None,
        rates: Mapping[str, tuple[float, ...]] | None = None,
        seeds: tuple[int, ...] = (0,),
        spare_seeds: tuple[int, ...] = (),
        headline: int | str | None = None,
        **changes: Any,
    ) -> None:
        self.name, self.configurations = name, tuple(configurations)
        self.recipe = replace(recipe, **changes)
        self.task = TASKS[task or name]
        self.rates, self.seeds, self.spare_seeds = rates or {}, seeds, spare_seeds
        self.headline = self.recipe.test[0] if headline is None else headline
        self.task.check_length(self.recipe.train_lengths[0])
        assert self.headline in self.recipe.test, name
        for configuration in self.configurations:
            parse_configuration(configuration)

    def jobs(self, *, spare: bool = False) -> list[Job]:
        """A job per configuration, learning rate and seed; those of the spare seeds too if asked."""
        return [
            {
                "id": f"{self.name} {configuration} lr={rate:g} seed={seed}",
                "experiment": self.name,
                "task": self.task.name,
                "configuration": configuration,
                "seed": seed,
                "learning_rate": rate,
                "recipe": asdict(replace(self.recipe, learning_rate=rate)),
            }
            for configuration in self.configurations
            for rate in self.rates.get(configuration, (self.recipe.learning_rate,))
            for seed in (*self.seeds, *(self.spare_seeds if spare else ()))
        ]
