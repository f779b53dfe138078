"""Handwritten digits, one pixel per token, tested under brightness, noise and lost pixels (arXiv:2512.12602, 4).

Images come with scikit-learn (1,797 of 8 x 8 pixels, where the paper has MNIST); it is imported when the task is first
drawn from.
"""

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.tasks.task import IGNORED, Batch, Task, asked_alone

_TEST_IMAGES = 397


@dataclass(frozen=True, kw_only=True)
class Digits(Task):
    """Rows of pixels in [0, 1]; the class is asked after the last one.

    Conditions: "clean", "brightness x", "noise s" (standard deviation), "dropout p" (share of pixels set to 0). Always
    the same held-out images; noise is drawn from the generator.
    """

    channels = 1

    size: int = 8
    max_shift: int = 0

    @property
    def sizes(self) -> tuple[int, int]:
        return 0, 10

    def check_length(self, length: int) -> None:
        """Images have one size."""
        if length != self.size**2:
            raise ValueError(f"task {self.name!r} has images of {self.size**2} pixels, got a length of {length}")

    def sample(self, batch_size: int, length: int, generator: torch.Generator) -> Batch:
        """Draw training images, shifted by up to `max_shift` pixels."""
        self.check_length(length)
        images, classes = _images(self.size)
        rows = torch.randint(len(images) - _TEST_IMAGES, (batch_size,), generator=generator)
        chosen = images[rows]
        if self.max_shift:
            dy, dx = torch.randint(-self.max_shift, self.max_shift + 1, (2, batch_size, 1), generator=generator)
            pixels = torch.arange(self.size)
            y, x = (pixels + dy).clamp(0, self.size - 1), (pixels + dx).clamp(0, self.size - 1)
            chosen = chosen[torch.arange(batch_size)[:, None, None], y[:, :, None], x[:, None, :]]
        return _batch(chosen, classes[rows])

    def test_sample(self, condition: int | str, batch_size: int, generator: torch.Generator) -> Batch:
        """All held-out images under a condition."""
        kind, _, amount = str(condition).partition(" ")
        images, classes = _images(self.size)
        images, classes = images[-_TEST_IMAGES:], classes[-_TEST_IMAGES:]
        if kind == "brightness":
            images = images * float(amount)
        elif kind == "noise":
            images = images + float(amount) * torch.randn(images.shape, generator=generator)
        elif kind == "dropout":
            images = images * (torch.rand(images.shape, generator=generator) >= float(amount))
        elif condition != "clean":
            raise ValueError(
                f"task {self.name!r} is tested as 'clean', 'brightness 2', 'noise 0.25' or 'dropout 0.25', "
                f"got {condition!r}"
            )
        return _batch(images, classes)


def _batch(images: Tensor, classes: Tensor) -> Batch:
    pixels = images.flatten(1)
    targets = torch.full(pixels.shape, IGNORED)
    targets[:, -1] = classes
    return asked_alone(pixels[..., None], targets)


@cache
def _images(size: int) -> tuple[Tensor, Tensor]:
    """All images `[1797, size, size]` in [0, 1] in a fixed random order, and their classes."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the digits task needs scikit-learn: pip install scikit-learn") from error
    data = load_digits()
    images = torch.from_numpy(data.images).float() / 16
    if size != images.shape[1]:
        images = F.interpolate(images[:, None], (size, size), mode="bilinear", align_corners=False)[:, 0]
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order], torch.from_numpy(data.target).long()[order]
