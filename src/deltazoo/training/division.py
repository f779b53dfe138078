"""Divide the rows of an optimizer step among the processes of a run. Imports no torch."""

from dataclasses import dataclass

from deltazoo.training.config import OptimizationConfig


@dataclass(frozen=True)
class Division:
    """The share of a process.

    Attributes:
        groups: of processes; each reads rows of its own.
        context_parallel: processes of a group; they share the tokens of a forward pass.
        rows: of one forward pass of a group.
        accumulation: forward passes per optimizer step.
    """

    groups: int
    context_parallel: int
    rows: int
    accumulation: int


def divide_rows(settings: OptimizationConfig, processes: int) -> Division:
    """The division of a run's rows among `processes`, with the same rows in every step whatever their number.

    Raises:
        ValueError: the processes do not form groups of ``context_parallel``, or the rows of a step do not divide.
    """
    section, size = settings.section, settings.context_parallel
    if processes % size:
        raise ValueError(
            f"{section}.context_parallel={size} divides each forward pass among {size} processes, and {processes} "
            f"{'is' if processes == 1 else 'are'} no multiple of that: deltazoo train --gpus {size}"
        )
    groups, total = processes // size, settings.rows_of_a_step
    if total % groups:
        raise ValueError(
            f"the {total} rows of a step ({section}.rows_per_step) do not divide among {groups} "
            f"{'processes' if size == 1 else f'groups of {size} processes'}"
        )
    rows = min(settings.rows_per_batch, total // groups)
    if total // groups % rows:
        raise ValueError(
            f"{total // groups} rows per step and {'process' if size == 1 else 'group of processes'} are no whole "
            f"number of forward passes of {section}.rows_per_batch={rows} rows"
        )
    return Division(groups, size, rows, total // groups // rows)
