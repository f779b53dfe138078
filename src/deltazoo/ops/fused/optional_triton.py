"""Triton and our launches if Triton is installed; otherwise stand-ins, so that files with kernels can be imported.

Such a file also has each formula in torch, for cases without a kernel.
"""

from typing import Any

try:
    import triton
    import triton.language as tl

    from deltazoo.ops.triton.launch import Constants, launch
except ModuleNotFoundError as missing:
    if missing.name != "triton":
        raise

    class _StandIn:
        """A stand-in for the names in definitions of kernels: `jit`, plain or with options, and annotations."""

        constexpr = None

        def jit(self, function: Any = None, **_: Any) -> Any:
            return function if callable(function) else self.jit

    triton = tl = _StandIn()
    Constants = launch = None  # type: ignore[assignment, misc]

__all__ = ["Constants", "launch", "tl", "triton"]
