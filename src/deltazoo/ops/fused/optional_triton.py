"""Triton and our launches where it is installed; elsewhere stand-ins, so that files with kernels can be imported.

Such a file holds a formula in torch, too, which computes where no kernel runs.
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
        """What kernels name where they are defined: `jit`, plain or with options, and annotations."""

        constexpr = None

        def jit(self, function: Any = None, **_: Any) -> Any:
            return function if callable(function) else self.jit

    triton = tl = _StandIn()
    Constants = launch = None  # type: ignore[assignment, misc]

__all__ = ["Constants", "launch", "tl", "triton"]
