"""Check the device named on the command line."""

import re

__all__ = ["check_device"]


def check_device(name: str) -> None:
    """Raise ValueError unless torch can compute on the device `name` on this machine.

    torch is imported only if the name has the right form and is not ``cpu``.
    """
    if not re.fullmatch(r"cpu|(cuda|mps|xpu)(:\d+)?", name):
        raise ValueError(f"there is no device {name!r}: give cpu, cuda (the first GPU), or cuda:1 and so on")
    kind, _, index = name.partition(":")
    if kind == "cpu":
        return
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != kind:
        wanted = "NVIDIA GPU" if kind == "cuda" else f"{kind} device"
        raise ValueError(f"device {name!r} was asked for, and torch sees no {wanted} here")
    count = torch.accelerator.device_count()
    if index and int(index) >= count:
        raise ValueError(f"device {name!r} was asked for, and torch sees {count} here, numbered from 0")
