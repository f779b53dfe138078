"""The choice of a call's backend: the requested one; else triton if device, dtype and sizes allow; else chunkwise."""

import importlib.util
import os
from functools import lru_cache

import torch

from deltazoo.names import unknown
from deltazoo.ops.dtypes import KERNEL_DTYPES
from deltazoo.runtime import BACKENDS


def resolve_backend(
    backend: str | None,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    head_k_dim: int,
    head_v_dim: int,
    undecayed_channels: bool = False,
) -> tuple[str, str]:
    """The backend that a call would run, and the reason.

    Args:
        backend: the name asked for, or None.
        device, dtype: device and dtype of q, k, v.
        head_k_dim, head_v_dim: K and V.
        undecayed_channels: whether the erase of whole sequences reads the state before a decay per key channel.

    Returns:
        `(name, reason)`.

    Raises:
        ValueError: an unknown name.
        NotImplementedError: a named backend that cannot run such a call.
    """
    if backend is not None and backend not in BACKENDS:
        raise ValueError(unknown("backend", backend, BACKENDS))
    if backend == "reference":
        return "reference", "asked for: the token loop that defines the operator"
    if backend == "chunkwise":
        return "chunkwise", "asked for: the chunk form in plain torch"
    obstacle = triton_obstacle(torch.device(device), dtype, head_k_dim, head_v_dim)
    if obstacle is None and undecayed_channels:
        obstacle = "its kernels have no undecayed read with a decay per key channel"
    if obstacle is None:
        return "triton", "asked for" if backend else "the GPU kernels support this call"
    if backend == "triton":
        raise NotImplementedError(f"the triton backend cannot run this call: {obstacle}; use backend='chunkwise'")
    return "chunkwise", f"no triton: {obstacle}"


def triton_obstacle(device: torch.device, dtype: torch.dtype, K: int, V: int) -> str | None:
    """The reason why the Triton kernels cannot run a call with such inputs and head sizes; None if they can."""
    return _obstacle(device, dtype, K, V)


# The mark of torch.compiler.assume_constant_result, without its import of the compiler: torch 2.11 cannot trace the
# call.
triton_obstacle._dynamo_marked_constant = True  # type: ignore[attr-defined]


def describe_kernels(
    device: torch.device,
    dtype: torch.dtype,
    K: int,
    V: int,
    *,
    decay: str,
    has_beta: bool,
    has_erase_key: bool,
    undecayed: bool,
    num_micro_steps: int,
    packs: bool,
) -> str | None:
    """Kernels that the triton backend runs on Hopper, with the obstacles to faster ones; None on other GPUs.

    The route of such a call gives both, for as many heads as fill the GPU.

    Args:
        device, dtype: device and dtype of q, k, v.
        K, V: head dimensions.
        decay: "none", "scalar" or "channel".
        has_beta, has_erase_key: whether calls have step sizes and an erase key.
        undecayed, num_micro_steps: see `delta_rule`.
        packs: whether there are also calls with packed rows.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    from deltazoo.ops.triton.gluon import MISSING
    from deltazoo.ops.triton.plan import Card, Plan
    from deltazoo.ops.triton.tiles import CHUNK, HOPPER

    if MISSING is not None:
        return f"plain Triton kernels, since {MISSING}"
    card = Card(HOPPER, gluon=True)

    def obstacles(sequences: int | None) -> dict[str, str]:
        heads = card.multiprocessors  # so many as fill the GPU: reports know no batch
        q, v = torch.Size([1, CHUNK, heads, K]), torch.Size([1, CHUNK * num_micro_steps, heads, V])
        forms = decay, has_beta, sequences, None, has_erase_key, undecayed
        return Plan(q, v, dtype, *forms, num_micro_steps, 1.0, card).route.why

    why = obstacles(None)
    if "scans" in why:
        return f"plain Triton kernels, since {why['scans']}"
    found = "kernels for Hopper"
    packed = obstacles(1).get("scans") if packs else None
    if packed is not None:
        found += f", plain Triton kernels where {packed}"
    passes = {"forward": "the forward pass", "backward": "the backward pass"}
    if "forward" not in why:
        passes = {"recorded": "the forward pass in training"} | passes
    stages: dict[str, list[str]] = {}
    for name, words in passes.items():
        if name in why:
            stages.setdefault(why[name], []).append(words)
    return "; ".join([found, *[f"{' and '.join(names)} in stages, since {reason}" for reason, names in stages.items()]])


@lru_cache
def _obstacle(device: torch.device, dtype: torch.dtype, K: int, V: int) -> str | None:
    if device.type != "cuda" and not (triton_interprets() and device.type == "cpu"):
        return f"its kernels run on NVIDIA GPUs, not on {device.type}"
    if not _is_installed("triton"):
        return "triton is not installed"
    if device.type == "cuda" and (torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0)):
        return f"its kernels need compute capability 8.0 or newer, which {torch.cuda.get_device_name(device)} has not"
    if dtype not in KERNEL_DTYPES:
        return f"its kernels take float32, bfloat16 and float16, not {dtype}"
    if K > 256 or V > 512:
        return f"its kernels take head dimensions up to K = 256 and V = 512, not K = {K} and V = {V}"
    return None


def triton_interprets() -> bool:
    """Whether Triton runs kernels in its interpreter, on a CPU, as tests do."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # an import hook refuses it
        return False
