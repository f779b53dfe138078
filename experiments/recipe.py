"""Sizes and schedule of one comparison, the same for all its configurations."""

from dataclasses import dataclass

__all__ = ["Recipe"]


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
    """Mixers alone, `x = mixer(x)`: no norm before them and no residual path around them, so that the input's scale
    reaches the keys. Needs mlp_ratio 0."""
    initializer_range: float = 0.02
    """Standard deviation of the mixers' linear weights."""
    beta_bias: float | None = None
    """Where given, b_proj has a bias that starts there."""

    train_lengths: tuple[int, int] = (3, 40)
    """Shortest and longest training sequences; one length per batch, uniform."""
    curriculum: float = 0.0
    """Share of the training during which the longest length grows from its half to the whole."""
    test: tuple[int | str, ...] = (40, 128, 256)
    """Test lengths or conditions, reported in this order."""
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

    def __post_init__(self) -> None:
        low, high = self.train_lengths
        if not 1 <= low <= high:
            raise ValueError(
                f"train_lengths must be (shortest, longest) with 1 <= shortest <= longest, got {low, high}"
            )
        if self.steps < 1 or self.batch_size < 1 or self.test_sequences < 1:
            raise ValueError(
                f"steps, batch_size and test_sequences must be at least 1, got {self.steps}, {self.batch_size}, "
                f"{self.test_sequences}"
            )
        if self.mlp_multiple < 1:
            raise ValueError(f"mlp_multiple must be at least 1, got {self.mlp_multiple}")
        if self.bare and self.mlp_ratio:
            raise ValueError(f"a bare model has no MLP: set mlp_ratio=0, got {self.mlp_ratio}")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}")
        if not 0 <= self.warmup < 1 or not 0 <= self.curriculum <= 1:
            raise ValueError(
                f"warmup must lie in [0, 1) and curriculum in [0, 1], got {self.warmup}, {self.curriculum}"
            )

    @property
    def precision(self) -> str:
        """Of the matrix products, as it reads on the page."""
        return "bfloat16" if self.bf16 else "float32"

    def longest(self, step: int) -> int:
        """Longest training length at a step."""
        low, high = self.train_lengths
        if not self.curriculum:
            return high
        progress = min(1.0, step / (self.curriculum * self.steps))
        return max(low, round(high * (1 + progress) / 2))
