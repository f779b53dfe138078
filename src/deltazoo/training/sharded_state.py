"""Model and optimizer state of sharded runs, in files that a run on any number of processes can resume from."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from transformers.trainer import OPTIMIZER_NAME

_FOLDER = "optimizer"


def whole_model(model: nn.Module) -> dict[str, Any]:
    """The state dict of a sharded model, gathered on the CPU of the first process; empty on the others."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def save_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Path) -> None:
    """Write every process's share of the optimizer's state, with torch.distributed.checkpoint."""
    save(get_optimizer_state_dict(model, optimizer), checkpoint_id=checkpoint / _FOLDER)


def is_sharded(checkpoint: Path) -> bool:
    """Whether `save_optimizer` wrote the checkpoint."""
    return (checkpoint / _FOLDER).is_dir()


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Path) -> None:
    """Read the optimizer's state of a checkpoint, sharded or whole, into a model that is sharded or whole."""
    if is_sharded(checkpoint):
        state = get_optimizer_state_dict(model, optimizer)
        load(state, checkpoint_id=checkpoint / _FOLDER)
        set_optimizer_state_dict(model, optimizer, state)
        return
    saved = torch.load(checkpoint / OPTIMIZER_NAME, map_location="cpu", weights_only=True)
    set_optimizer_state_dict(
        model, optimizer, _by_name(saved, model, optimizer), options=StateDictOptions(full_state_dict=True)
    )


def _by_name(saved: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A state dict of an optimizer with the parameters' names in place of their numbers."""
    named = {parameter: name for name, parameter in model.named_parameters()}
    names = [named[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[str, dict[str, Tensor]] = {names[number]: values for number, values in saved["state"].items()}
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in saved["param_groups"]]
    return {"state": state, "param_groups": groups}
