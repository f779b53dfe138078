"""The ranks that share a sequence, the tokens of each, and the check that all ranks make the same call."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from deltazoo.ops.validation import check_tensor_values

SEGMENT_UNIT = 64
"""Divisor of the length of a segment: the tokens of a chunk."""


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that share one sequence. Rank r holds a contiguous piece of its tokens, after the piece of rank r - 1.

    Results do not depend on the number of ranks: outputs, final states and all gradients have the same bits on 1, 2, 3
    or more ranks as long as the pieces are cut at multiples of the segment length; elsewhere they differ by rounding.
    The reference backend differs by rounding on GPUs, where the order of torch's sums depends on how many there are.
    Without a context a GPU takes other kernels: the results differ by rounding from those of a context of one rank.

    Args:
        group: a process group, or a device mesh of one dimension (`mesh["cp"]`); None: this process alone.
        lengths: tokens of each rank's piece. Unless given, the ranks tell each other in every call, and check that
            their calls fit together. With lengths they exchange nothing but states and check nothing. Code under
            `torch.compile` needs them.
        segment_length: tokens of a segment, a multiple of 64. Unless given, it follows from the shape of the whole
            sequence (`deltazoo.ops.context.pieces.segment_length`).
        gather_final_state: whether every rank gets the final states of all sequences. Otherwise a rank gets those of
            the sequences that end in its piece, and zeros for all others.
        meanwhile: function called while the ranks exchange states, for work that does not need the result. Its
            gradients are computed while the ranks exchange gradients. Compiled code, which orders operations itself,
            does not call it.

    Raises:
        TypeError: another kind of group.
        ValueError: a mesh of several dimensions, lengths that are not positive or are for another number of ranks, a
            segment length that is no multiple of 64.
    """

    group: ProcessGroup | DeviceMesh | None = None
    lengths: tuple[int, ...] | None = None
    segment_length: int | None = None
    gather_final_state: bool = False
    meanwhile: Callable[[], None] | None = None
    rank: int = field(init=False)
    """This process's number in the group."""
    size: int = field(init=False)
    """Number of ranks."""
    group_name: str = field(init=False)
    """Name by which torch's functional collectives know the group."""

    def __post_init__(self) -> None:
        """Check the arguments, and look up this process in the group."""
        group = self.group
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(
                    "context parallelism takes a device mesh of one dimension, such as mesh['cp'], got one with the "
                    f"dimensions {group.mesh_dim_names or group.ndim}"
                )
            group = group.get_group()
        if group is not None and not isinstance(group, ProcessGroup):
            raise TypeError(f"group must be a ProcessGroup, a DeviceMesh or None, got {type(group).__name__}")
        rank, size, name = (0, 1, "") if group is None else (group.rank(), group.size(), group.group_name)
        for attribute, value in (("group", group), ("rank", rank), ("size", size), ("group_name", name)):
            object.__setattr__(self, attribute, value)
        if self.lengths is not None:
            object.__setattr__(self, "lengths", tuple(self.lengths))
            if len(self.lengths) != size or min(self.lengths) < 1:
                raise ValueError(f"lengths must be {size} positive numbers of tokens, one per rank, got {self.lengths}")
        length = self.segment_length
        if length is not None and (length < SEGMENT_UNIT or length % SEGMENT_UNIT):
            raise ValueError(f"segment_length must be a positive multiple of {SEGMENT_UNIT} tokens, got {length}")

    def __deepcopy__(self, memo: object) -> "ContextParallel":
        """The context itself, since a copy of a model belongs to the same ranks."""
        return self

    @property
    def known_lengths(self) -> tuple[int, ...]:
        """The lengths of a context that has them, given or from `agreed_lengths`."""
        assert self.lengths is not None
        return self.lengths


def agreed_lengths(
    context: ContextParallel, num_tokens: int, call: object, error: Exception | None = None
) -> ContextParallel:
    """The context with the lengths of all pieces, after all ranks have found that their calls are alike.

    The exchange is of two numbers per rank, over the CPU if the group has a backend for it. On a group with NCCL alone
    the CPU waits for the device.

    Args:
        num_tokens: number of tokens of this rank's piece.
        call: description of the call, whose `repr` must be equal on all ranks.
        error: error that this rank found in its own arguments.

    Raises:
        ValueError: on every rank, if one has an error or no tokens, or another call; a rank with an error of its own
            raises that.
    """
    if context.lengths is not None:
        return context
    if context.size == 1:
        if error is not None:
            raise error
        return replace(context, lengths=(num_tokens,))
    if torch.compiler.is_compiling():
        raise ValueError(
            "compiled code cannot ask the other ranks how many tokens they have: pass ContextParallel(lengths=...)"
        )
    said = f"{type(error).__name__}: {error}" if error is not None else repr(call)
    number = -1 if error is not None else num_tokens
    assert isinstance(context.group, ProcessGroup)
    where = "cpu" if "cpu:" in dist.get_backend_config(context.group) else "cuda"
    mine = torch.tensor([number, zlib.crc32(said.encode())], device=where)
    lengths, hashes = finished(started_gather(mine, context), context).view(-1, 2).T.tolist()
    if min(lengths) > 0 and len(set(hashes)) == 1:
        return replace(context, lengths=tuple(lengths))
    calls: list[tuple[int, str]] = [(0, "")] * context.size
    dist.all_gather_object(calls, (number, said), group=context.group)
    if error is not None:
        raise error
    raise ValueError(_disagreement(calls))


def agreed_piece(
    context: ContextParallel, num_tokens: int, cu_seqlens: Tensor | None, described: Callable[[], object]
) -> ContextParallel:
    """The context with lengths, after all ranks have found that their calls fit together.

    Args:
        num_tokens: number of tokens of this rank's piece.
        cu_seqlens: boundaries in the whole row, or None.
        described: function that gives a value which must be equal on all ranks. If it raises on one, all raise.
    """
    if context.lengths is None:
        call, error = None, None
        try:
            bounds: object = None if cu_seqlens is None else len(cu_seqlens)
            if cu_seqlens is not None and cu_seqlens.device.type == "cpu":  # for a GPU the host would have to wait
                bounds = cu_seqlens.tolist()
            call = (described(), bounds, context.segment_length, context.gather_final_state)
        except (NotImplementedError, TypeError, ValueError) as raised:
            error = raised
        context = agreed_lengths(context, num_tokens, call, error)
    lengths = context.known_lengths
    if num_tokens != lengths[context.rank]:
        raise ValueError(f"rank {context.rank} has a piece of {num_tokens} tokens, and lengths say {lengths}")
    check_tensor_values(None, cu_seqlens, sum(lengths))
    return context


def _disagreement(calls: list[tuple[int, str]]) -> str:
    failed = [f"rank {rank}: {said}" for rank, (number, said) in enumerate(calls) if number < 0]
    if failed:
        return "other ranks that share the sequence could not go on: " + "; ".join(failed)
    empty = [rank for rank, (number, _) in enumerate(calls) if number == 0]
    if empty:
        lengths = [number for number, _ in calls]
        return f"every rank needs at least one token of the sequence, got pieces of {lengths} tokens"
    return "ranks that share a sequence must be called alike, got " + "; ".join(
        f"rank {rank}: {said}" for rank, (_, said) in enumerate(calls)
    )


def started_gather(x: Tensor, context: ContextParallel) -> Tensor:
    """The tensors `[n, ...]` of all ranks, `[size * n, ...]`, on their way; `finished` waits for them."""
    if context.size == 1:
        return x
    return torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), context.size, context.group_name)


def finished(x: Tensor, context: ContextParallel) -> Tensor:
    """The result of a started collective."""
    return x if context.size == 1 else torch.ops._c10d_functional.wait_tensor(x)


def sum_over_ranks(x: Tensor, context: ContextParallel) -> Tensor:
    """The sum of every rank's `x`."""
    if context.size == 1:
        return x
    return finished(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", context.group_name), context)
