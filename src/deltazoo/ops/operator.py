"""Operators of torch, made of functions, with fake results and gradients.

Compilers, dispatch modes, function transforms and tensor subclasses see the operator `torch.ops.deltazoo.NAME`. Plain
eager calls bypass torch's dispatcher, which costs the host more than one or two launches.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from deltazoo.ops.autograd_modes import refuse_second_derivative

NAMESPACE = __name__.partition(".")[0]
"""Namespace of the operators in torch: the package's name, so that a copy under another name has its own."""

# torch.library.custom_op would add 11 microseconds to a call, a bare Library 3, and its first call imports the
# compiler (torch._dynamo), which takes seconds.
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_PLAIN = (Tensor, torch.nn.Parameter)
_NO_TENSORS = frozenset((type(None), bool, int, float))  # a test for subclasses takes longer


def _like_first_arguments(number: int, *arguments: Any) -> Any:
    """Uninitialised tensors like the first `number` arguments, None where one is None."""
    like = tuple([None if x is None else x.new_empty(x.shape) for x in arguments[:number]])
    return like if number > 1 else like[0]


def _save_arguments(number: int, ctx: Any, arguments: tuple[Any, ...], results: Any) -> None:
    """Keep all arguments, of which the first `number` are tensors or None."""
    ctx.save_for_backward(*arguments[:number])
    ctx.options = arguments[number:]


def _gradients_of_first_arguments(backward: Callable[..., Any], ctx: Any, *d_results: Tensor | None) -> Any:
    """The gradients that `backward` returns, and None for all further arguments."""
    tensors = ctx.saved_tensors  # read once, since activation checkpointing demands it
    found = backward(*tensors, *ctx.options, *d_results)
    found = found if isinstance(found, tuple) else (found,)
    return *found, *[None] * (len(tensors) + len(ctx.options) - len(found))


class Operator:
    """A function that launches kernels (`launch`) and the operator made of it (`overload`).

    Args:
        schema: schema for `torch.library.define`, for example `"swiglu(Tensor gate, Tensor up) -> Tensor"`.
        launch: function of the arguments of the schema that returns its results; the first tensor's device is the
            current one. It may return None for a Tensor. Operators cannot, so this one then returns an empty tensor,
            for which its callers, its gradients and saved tensors have None again.
        contiguous: whether `launch` takes the tensors contiguous.
        fake: function for tensors without data, with results of the right shapes and dtypes. By default the results
            are like the first arguments, as those of gradients are.
    """

    def __init__(
        self, schema: str, launch: Callable[..., Any], fake: Callable[..., Any] | None = None, contiguous: bool = False
    ) -> None:
        name = schema.partition("(")[0]
        fake = fake or partial(_like_first_arguments, schema.partition("->")[2].count("Tensor"))
        launch = _prepared(launch, schema, contiguous)
        _library.define(schema)
        _library.impl(name, _without_none(launch), "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", _without_none(fake), lib=_library)
        self.name = name
        self.launch = launch
        self.overload = getattr(getattr(torch.ops, NAMESPACE), name).default

    def __call__(self, *arguments: Any) -> Any:
        """Results of a call that autograd does not record."""
        return _with_none(self.overload(*arguments)) if _dispatching() else self.launch(*arguments)

    def differentiate(self, gradients: Callable[..., Any], save: Callable[..., None]) -> None:
        """Give the overload gradients, by the two functions of `torch.library.register_autograd`."""
        torch.library.register_autograd(f"{NAMESPACE}::{self.name}", gradients, setup_context=save, lib=_library)


class DifferentiableOperator(Operator):
    """An operator with gradients of first order. Calling it gives its results.

    Args:
        schema, launch, fake, contiguous: see `Operator`.
        backward: the operator that launches the kernels of the backward pass.
        refusal: arguments of `refuse_second_derivative`.
        save: function of `(ctx, arguments, results)` that keeps in `ctx` what the backward pass needs. By default it
            keeps all arguments: the tensors, which must come first, as `ctx.saved_tensors`, and the others as
            `ctx.options`.
        gradients: function of `(backward, ctx, *gradients of the results)` that gives a gradient or None for each
            argument. `backward` is the function of the operator `backward` or, if something must see it, the operator.
            By default it takes all arguments and the gradients of the results, and returns those of the first
            arguments; the others have none.
        shown: number of results that a call returns. The others are kept for the backward pass alone.
        infer: function in place of `launch` for plain eager calls that autograd does not record. It returns only the
            shown results, so it may run kernels that keep nothing. The operator itself always runs `launch`: a compiler
            decides on gradients before it runs, and expects every result of the schema.
    """

    def __init__(
        self,
        schema: str,
        launch: Callable[..., Any],
        fake: Callable[..., Any] | None,
        contiguous: bool = False,
        *,
        backward: Operator,
        refusal: tuple[str, str],
        save: Callable[..., None] | None = None,
        gradients: Callable[..., Any] = _gradients_of_first_arguments,
        shown: int | None = None,
        infer: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(schema, launch, fake, contiguous)
        launch = self.launch
        self.backward = backward
        self.shown = shown
        self.infer = launch
        if shown is not None:
            self.infer = _prepared(infer or (lambda *arguments: launch(*arguments)[:shown]), schema)
        keep = save or partial(_save_arguments, schema.partition("->")[0].count("Tensor"))

        def save_from_operator(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            if shown is not None:
                ctx.mark_non_differentiable(*output[shown:])
            keep(ctx, inputs, _with_none(output))

        def run_backward(*arguments: Any) -> Any:
            return _with_none(backward.overload(*arguments))

        def gradients_from_operator(ctx: Any, *d_results: Tensor | None) -> Any:
            refuse_second_derivative(*refusal)
            return gradients(run_backward, ctx, *_with_none(d_results))

        self.differentiate(gradients_from_operator, save_from_operator)
        launch_backward = backward.launch

        class Eager(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *arguments: Any) -> Any:
                results = launch(*arguments)
                keep(ctx, arguments, results)
                return results if shown is None else results[:shown]

            @staticmethod
            def backward(ctx: Any, *d_results: Tensor | None) -> Any:
                refuse_second_derivative(*refusal)
                return gradients(launch_backward, ctx, *d_results)

        # `Eager.apply` without its part in Python, a third of its time, which looks for transforms: there are none. In
        # the backward pass torch would look for the function by name.
        self.record = super(torch.autograd.Function, Eager).apply
        Eager._backward_cls.apply = Eager.backward  # type: ignore[attr-defined]

    def __call__(self, *arguments: Any) -> Any:
        """Results of a call, which autograd records if gradients are wanted."""
        if _dispatching():
            return self._by_overload(arguments)
        recording = False
        for x in arguments:
            if type(x) in _PLAIN:
                recording = recording or x.requires_grad
            elif type(x) not in _NO_TENSORS and isinstance(x, Tensor):  # a subclass may handle the operator
                return self._by_overload(arguments)
        return (self.record if recording and torch.is_grad_enabled() else self.infer)(*arguments)

    def _by_overload(self, arguments: tuple[Any, ...]) -> Any:
        results = self.overload(*arguments)
        return _with_none(results) if self.shown is None else results[: self.shown]


def _dispatching() -> bool:
    """Whether a compiler, a dispatch mode or a function transform is active, which must see the operator."""
    return torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or torch._C._are_functorch_transforms_active()


def _prepared(function: Callable[..., Any], schema: str, contiguous: bool = False) -> Callable[..., Any]:
    """The function with its first tensor's device as the current one, where Triton launches, and tensors contiguous."""
    parameters = schema.partition("(")[2].partition(" -> ")[0].split(", ")
    tensors = [number for number, name in enumerate(parameters) if contiguous and name.startswith("Tensor")]

    def call(*given: Any, **options: Any) -> Any:
        for number in tensors:
            x = given[number]
            if x is not None and not x.is_contiguous():
                given = (*given[:number], x.contiguous(), *given[number + 1 :])
        first = given[0]
        if first.is_cuda and first.get_device() != torch.cuda.current_device():
            with torch.cuda.device(first.get_device()):
                return function(*given, **options)
        return function(*given, **options)

    return call


def _without_none(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with an empty tensor of its first argument's dtype for each None among its results."""

    def call(x: Tensor, *arguments: Any) -> Any:
        results = function(x, *arguments)
        if not isinstance(results, tuple):
            return results
        return tuple([x.new_empty(0) if result is None else result for result in results])

    return call


def _with_none(results: Any) -> Any:
    """Results of an operator, with None again for the empty tensors of `_without_none`."""
    return tuple([None if _stands_for_none(x) else x for x in results]) if isinstance(results, tuple) else results


def _stands_for_none(x: Tensor | None) -> bool:
    if x is None:
        return True
    # A symbolic size is no int, and asking whether it is zero would make it a condition of the compiled program.
    return x.ndim == 1 and type(x.shape[0]) is int and x.shape[0] == 0 and x.is_floating_point()
