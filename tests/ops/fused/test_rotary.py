"""The kernel of the rotary embedding against plain torch; and angles that it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from fused_cases import HALF, Case, Results, test_interpreted, test_on_the_gpu  # noqa: F401
from torch import Tensor

pytest.importorskip("triton")

from deltazoo.ops.fused import choice, rotary, rotate  # noqa: E402


@dataclass(frozen=True)
class Rotation(Case):
    """The rotary embedding of the first channels of each head, and its gradient."""

    shape: tuple[int, ...] = (2, 37, 3, 16)
    channels: int = 16
    shared: bool = True
    heads_first: bool = False
    wide_angles: bool = False

    def run(self, device: str, *, fused: bool, dtype: torch.dtype | None = None) -> Results:
        draw = self.drawing(device, dtype)

        def heads() -> Tensor:
            B, T, H, K = self.shape
            return draw(B, H, T, K).transpose(1, 2) if self.heads_first else draw(*self.shape)

        x, d_y = heads().requires_grad_(), heads()
        angles = draw(1 if self.shared else self.shape[0], self.shape[1], self.channels)
        angles = angles.float() if self.wide_angles and dtype is None else angles
        y = rotate(x, (angles.cos(), angles.sin()), fused=fused)
        return {"y": y.detach(), "d_x": torch.autograd.grad(y, x, d_y)[0]}


CASES: list[Case] = [
    Rotation("rotary"),
    Rotation("rotary_of_rows", shape=(3, 5, 2, 24), channels=24, shared=False),
    Rotation("rotary_of_some_channels", shape=(2, 7, 5, 20), channels=6, heads_first=True),
    Rotation("rotary_of_two_channels", shape=(1, 3, 2, 600), channels=2),
    Rotation("rotary_half", dtype=HALF),
    Rotation("rotary_half_by_wide_angles", dtype=HALF, wide_angles=True, heads_first=True),
    Rotation("rotary_of_nothing", shape=(0, 5, 2, 16)),
]


def test_angles_that_the_rotary_embedding_cannot_use() -> None:
    def angles(*shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> tuple[Tensor, Tensor]:
        return (torch.ones(shape, device="meta", dtype=dtype, requires_grad=requires_grad),) * 2

    x = torch.ones(2, 5, 3, 8, device="meta")
    for shape in ((3, 5, 8), (2, 4, 8), (5, 8)):
        with pytest.raises(ValueError, match=r"expected x \[B, T, H, K\] with cos and sin"):
            rotate(x, angles(*shape), fused=True)
    for channels in (0, 5, 10):
        with pytest.raises(ValueError, match=f"even number of the 8 channels, got {channels}"):
            rotate(x, angles(1, 5, channels), fused=True)
    with pytest.raises(ValueError, match="no gradient to its angles"):
        rotate(x, angles(1, 5, 8, requires_grad=True), fused=True)
    with pytest.raises(NotImplementedError, match=r"not torch\.float64"):
        rotate(x, angles(1, 5, 8, dtype=torch.float64), fused=True)
    with pytest.raises(NotImplementedError, match="not on cpu"):
        rotate(torch.ones(2, 5, 3, 8), (torch.ones(1, 5, 8),) * 2, fused=True)


@pytest.mark.parametrize("why", ["dtype", "gradient"])
def test_by_default_angles_that_the_kernel_refuses_go_through_plain_torch(why: str) -> None:
    x, angles = torch.randn(2, 5, 3, 8), torch.randn(1, 5, 8, dtype=torch.float64 if why == "dtype" else None)
    given = angles.cos().requires_grad_(why == "gradient"), angles.sin()
    expected = rotate(x, given, fused=False)
    with mock.patch.object(choice, "_run_on", lambda x: True), mock.patch.object(rotary, "_operator") as kernel:
        assert torch.equal(rotate(x, given), expected)
        kernel.assert_not_called()
        assert rotate(x, (angles.cos().float(), angles.sin().float())) is kernel.return_value
