"""Other forms of modules within a decoding step: linear maps of one input as one product, and library modules.

A step multiplies one row, or a few, by every weight, so the number of products matters as much as their size.
`merged_products` stores the weights of maps with the same input (queries, keys, values and gates of a layer, gate and
up of an MLP) one below the other in memory. Within a step the first map multiplies by all of them at once.

    q_proj(x) -> x [Wq; Wk; Wv; Wb]^T -> q | k | v | b,      k_proj(x) -> k,      v_proj(x) -> v,      b_proj(x) -> b

Inputs of many tokens take one product per map, whose results are contiguous, as most kernels want them. Modules,
parameters and state-dict keys do not change. Only the addresses of weights do: no weight exists twice, and an update in
place acts on both forms. For torch each parameter has a storage of its own, which begins where another ends. Views of
one storage would not do, since code that saves models takes them for duplicates.

`library_modules` finds norms and MLPs of transformers around the layers of swapped and accelerated models, which our
kernels compute: an RMSNorm takes six or seven launches there, one with our kernel. transformers has classes of its own
for every family, nearly all with the same few forward passes, so a module is recognised by the code of its forward
pass. Results differ from the module's own by rounding, of which there is less: transformers rounds the norm before its
weight, and SiLU before the product.

Threads share a model's modules. `replaced` acts on calls of its own thread; other threads run the modules' own forward
passes.
"""

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack, to_dlpack
from transformers.activations import SiLUActivation

from deltazoo.ops import fused
from deltazoo.ops.fused import MOST_COLUMNS, takes_kernel
from deltazoo.ops.linear_maps import is_hooked

Replacement = tuple[nn.Module, Callable[..., Tensor]]
"""A module, and its forward pass within a step."""
_MOST_TOKENS = 1024
"""Most tokens of an input that is multiplied by all weights at once."""
_of_thread = threading.local()


def replacement(module: nn.Module, compute: Callable[..., Tensor | None]) -> Replacement:
    """The replacement of a module by a function of its arguments; if that returns None, its own forward pass runs."""
    return module, partial(_output, module, compute)


def _output(module: Any, compute: Callable[..., Tensor | None], *args: Any, **kwargs: Any) -> Tensor:
    here = torch.compiler.is_compiling() or getattr(_of_thread, "replaces", False)
    output = compute(*args, **kwargs) if here else None
    return type(module).forward(module, *args, **kwargs) if output is None else output


@contextmanager
def replaced(replacements: Sequence[Replacement]) -> Iterator[None]:
    """A context in which forward passes are replaced for calls of this thread, except those replaced already."""
    outer = getattr(_of_thread, "replaces", False)
    modules = [(vars(module), forward) for module, forward in replacements]
    changed = [own for own, forward in modules if own.setdefault("forward", forward) is forward]
    _of_thread.replaces = True
    try:
        yield
    finally:
        _of_thread.replaces = outer
        for own in changed:
            del own["forward"]


def merged_products(model: nn.Module) -> "list[JointProduct]":
    """The products of a model's linear maps that may run merged.

    These maps still run one by one: anything but a plain `nn.Linear` (quantised, adapted, divided among devices,
    parametrised, with hooks), weights that share memory with other tensors, and maps whose dtype differs from their
    neighbours', such as gate projections kept in float32 in a half-precision model. Results of a merged product differ
    from those of its parts by rounding alone.

    Args:
        model: the model whose parameters move in memory, which takes memory for one layer's maps meanwhile.
    """
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    products = []
    for layer in model.modules():
        # The class is asked, since modules of other libraries have submodules of this name.
        names = getattr(type(layer), "input_projections", None) or _joint_maps(type(layer))
        groups: dict[object, list[nn.Linear]] = {}
        for name in names:
            linear: Any = getattr(layer, name, None)
            linear = linear[0] if isinstance(linear, nn.Sequential) else linear  # the first half of a low-rank map
            if type(linear) is not nn.Linear or not is_unhooked(linear):
                continue
            if all(uses[id(p)] == 1 and _owns_memory(p) for p in linear.parameters()):
                groups.setdefault((linear.weight.dtype, linear.weight.device, linear.in_features), []).append(linear)
        products += [_joint_product(linears) for linears in groups.values() if len(linears) > 1]
    return products


class JointProduct:
    """Several linear maps as one product. The first map computes it, and each returns its piece.

    Attributes:
        linears, sizes: the maps, and the number of outputs of each.
        weight: `[sum of sizes, inputs]`.
        bias: bias of the product, zero for maps without one; None if no map has one.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.linears = linears
        self.sizes = [linear.out_features for linear in linears]
        self.weight = _in_one_block([linear.weight for linear in linears])
        biases = [x.weight.new_zeros(x.out_features) if x.bias is None else x.bias for x in linears]
        self.bias = None if all(x.bias is None for x in linears) else _in_one_block(biases)
        self._addresses = [p.data_ptr() for linear in linears for p in linear.parameters()]
        self._ready: tuple[Tensor | None, list[Tensor | None]] = (None, [])

    @property
    def replacements(self) -> list[Replacement]:
        """The replacements of the maps within a step."""
        return [replacement(linear, partial(self._piece, index)) for index, linear in enumerate(self.linears)]

    def is_in_place(self) -> bool:
        """Whether the maps' parameters are still in the block."""
        return self._addresses == [p.data_ptr() for linear in self.linears for p in linear.parameters()]

    def _piece(self, index: int, x: Tensor) -> Tensor | None:
        if torch.is_grad_enabled():
            return None
        if index == 0 and x.numel() <= _MOST_TOKENS * x.shape[-1]:
            self._ready = (x, list(self._multiply(x)))
        source, pieces = self._ready
        if source is not x:
            return None
        # A piece is returned once: a second call may come with other values in the same tensor.
        piece, pieces[index] = pieces[index], None
        if all(left is None for left in pieces):
            self._ready = (None, [])
        return piece

    def _multiply(self, x: Tensor) -> Sequence[Tensor]:
        if x.shape[0] > 1 and self.bias is None and len(set(self.sizes)) == 1:
            # In one product of several rows the pieces would not be contiguous, and kernels would copy them. Maps of
            # one size make a batch of products, whose results are contiguous.
            weights = self.weight.unflatten(0, (len(self.sizes), -1))
            rows = x.flatten(0, -2).expand(len(self.sizes), -1, -1)
            return torch.bmm(rows, weights.mT).unflatten(1, x.shape[:-1]).unbind()
        return F.linear(x, self.weight, self.bias).split(self.sizes, dim=-1)


def is_unhooked(linear: nn.Linear) -> bool:
    """Whether a step may read the weight itself: no hooks, no replaced forward pass, an ordinary tensor."""
    return not is_hooked(linear) and all(
        type(p) is nn.Parameter
        and p.device.type != "meta"
        and (p.dtype, p.device) == (linear.weight.dtype, linear.weight.device)
        and p.is_contiguous()
        and not p.is_inference()
        for p in linear.parameters()
    )


def _owns_memory(x: Tensor) -> bool:
    """Whether x alone fills its storage, unlike parts of an optimiser's flat buffer, and no process shares it."""
    return x.untyped_storage().nbytes() == x.nbytes and (x.is_cuda or not x.is_shared())


_products: WeakValueDictionary[tuple[int, ...], JointProduct] = WeakValueDictionary()
"""Products in use by the identities of their maps. Captured steps rely on addresses of weights, so they share these."""


def _joint_product(linears: Sequence[nn.Linear]) -> JointProduct:
    """The product of these maps that is already in use, or a new one."""
    key = tuple(map(id, linears))
    product = _products.get(key)
    if product is None or not product.is_in_place():
        product = _products[key] = JointProduct(linears)
    return product


def _in_one_block(parameters: Sequence[Tensor]) -> Tensor:
    """Stack tensors along their first axis, and make the parameters among them parts of the result."""
    # Tensors made in inference mode could not be trained later.
    with torch.inference_mode(False), torch.no_grad():
        block = torch.cat([p.detach() for p in parameters])
        for parameter, part in zip(parameters, block.split([len(p) for p in parameters]), strict=True):
            # For torch the parameter gets a storage of its own, which is the same memory and keeps it alive.
            if isinstance(parameter, nn.Parameter):
                parameter.data = from_dlpack(to_dlpack(part))
    return block


def library_modules(model: nn.Module) -> list[Replacement]:
    """The modules of transformers within a model that our kernels can compute."""
    found = ((module, _kernel_of(type(module))) for module in model.modules() if not is_hooked(module))
    return [replacement(x, partial(_library_output, kernel, x)) for x, kernel in found if kernel is not None]


def _library_output(kernel: "_Kernel", module: nn.Module, x: Tensor) -> Tensor | None:
    return kernel(module, x) if not torch.is_grad_enabled() and takes_kernel(None, x) else None


def _joint_maps(kind: type[nn.Module]) -> tuple[str, ...]:
    """Names of the linear maps that a known MLP of transformers applies to its input, in their order."""
    return ("gate_proj", "up_proj") if _kernel_of(kind) is _mlp else ()


def is_swiglu(module: nn.Module) -> bool:
    """Whether a module is an MLP of transformers that computes `deltazoo.layers.mlp.SwiGLU`, biases aside."""
    return _kernel_of(type(module)) is _mlp and type(module.act_fn) in _SILU


def is_row_norm(module: nn.Module) -> bool:
    """Whether a module is an RMSNorm of transformers with a plain weight."""
    return _kernel_of(type(module)) is _norm


def block_parts(kind: type[nn.Module]) -> tuple[str, ...]:
    """The `step_parts` (`deltazoo.models.block.DeltaRuleBlock`) of a transformers block; empty if its sums differ."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    is_known = kind.__module__.startswith("transformers.models.") and _code(kind) == _code(LlamaDecoderLayer)
    return ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp") if is_known else ()


_SILU = (nn.SiLU, SiLUActivation)
_Kernel = Callable[[Any, Tensor], Tensor | None]
"""A function of a module of transformers and its input that gives the output; None: it does not take them."""


def _norm(module: Any, x: Tensor) -> Tensor | None:
    fits = x.dtype == module.weight.dtype and x.shape[-1] <= MOST_COLUMNS
    return fused.rms_norm(x, module.weight, module.variance_epsilon, fused=True) if fits else None


def _norm_around_one(module: Any, x: Tensor) -> Tensor | None:
    """The output of a norm whose weight is stored as its difference from one."""
    fits = x.shape[-1] <= MOST_COLUMNS
    return fused.rms_norm(x, 1 + module.weight.float(), module.eps, fused=True) if fits else None


def _mlp(module: Any, x: Tensor) -> Tensor | None:
    if type(module.act_fn) not in _SILU:
        return None
    gate, up = module.gate_proj(x), module.up_proj(x)
    alike = gate.dtype == up.dtype
    return module.down_proj(fused.swiglu(gate, up, fused=True) if alike else module.act_fn(gate) * up)


@cache
def _kernels() -> dict[tuple[Any, ...], _Kernel]:
    """The kernels by the code of the forward passes that they replace."""
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    kernels = ((LlamaRMSNorm, _norm), (Olmo2RMSNorm, _norm), (Gemma2RMSNorm, _norm_around_one), (LlamaMLP, _mlp))
    return {_code(kind): kernel for kind, kernel in kernels}


def _kernel_of(kind: type[nn.Module]) -> _Kernel | None:
    is_of_transformers = kind.__module__.startswith("transformers.models.")
    return _kernels().get(_code(kind)) if is_of_transformers else None


def _code(kind: type[nn.Module]) -> tuple[Any, ...]:
    """The code of a forward pass: instructions, constants and names, also of the methods that norms call."""
    functions = (getattr(kind, name, None) for name in ("forward", "_norm"))
    codes = (getattr(inspect.unwrap(function), "__code__", None) for function in functions if function is not None)
    return tuple((x.co_code, x.co_consts, x.co_names) for x in codes if x is not None)
