"""Linear maps of one input, computed as one matrix product, for decoding.

A decoding step multiplies one row, or a few, by every weight, so the number of products matters as much as their size.
`merged_products` stores the weights of maps with the same input (queries, keys, values and gates of a layer, gate and
up of an MLP) one below the other in memory. Within a step the first map multiplies by all of them at once.

    q_proj(x) -> x [Wq; Wk; Wv; Wb]^T -> q | k | v | b,      k_proj(x) -> k,      v_proj(x) -> v,      b_proj(x) -> b

Inputs of many tokens take one product per map, whose results are contiguous, as most kernels want them.

Modules, parameters and state-dict keys stay what they are. Only the addresses of weights change: no weight exists
twice, and an update in place acts on both forms. For torch each parameter has a storage of its own, which begins where
another ends. Views of one storage would not do, since code that saves models takes them for duplicates.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack, to_dlpack

from deltazoo.generation.library_modules import joint_maps
from deltazoo.ops.linear_maps import is_hooked

__all__ = ["JointProduct", "is_plain", "merged_products"]

_MOST_TOKENS = 1024
"""Tokens of an input that is multiplied by all weights at once."""


def merged_products(model: nn.Module) -> "list[JointProduct]":
    """The products of a model's linear maps that may run merged.

    These run one by one as before: anything but a plain `nn.Linear` (quantised, adapted, divided among devices,
    parametrised, with hooks), weights that share memory with other tensors, and maps whose dtype differs from their
    neighbours', such as gate projections kept in float32 in a half-precision model. Results of a merged product differ
    from those of its parts by rounding alone.

    Args:
        model: whose parameters move in memory; meanwhile this takes memory for one layer's maps.
    """
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    products = []
    for layer in model.modules():
        groups: dict[object, list[nn.Linear]] = {}
        for linear in _merging_candidates(layer):
            if all(uses[id(p)] == 1 and _owns_memory(p) for p in linear.parameters()):
                weight = linear.weight
                groups.setdefault((weight.dtype, weight.device, linear.in_features), []).append(linear)
        products += [_joint_product(linears) for linears in groups.values() if len(linears) > 1]
    return products


class JointProduct:
    """Several linear maps as one product, a part of a step. The first map computes it, and each returns its piece.

    Maps whose parameters or forward passes have been replaced since (by a hook of accelerate, say) run one by one.

    Attributes:
        linears, sizes: the maps, and how many outputs each has.
        weight: `[sum of sizes, inputs]`.
        bias: zero for maps without one; None if none of them has one.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.linears = linears
        self.sizes = [linear.out_features for linear in linears]
        self.weight = _in_one_block([linear.weight for linear in linears])
        biases = [x.weight.new_zeros(x.out_features) if x.bias is None else x.bias for x in linears]
        self.bias = None if all(x.bias is None for x in linears) else _in_one_block(biases)
        self._addresses = [
            (linear._parameters, name, p.data_ptr()) for linear in linears for name, p in linear.named_parameters()
        ]
        self._ready: tuple[Tensor | None, list[Tensor | None]] = (None, [])

    def is_current(self) -> bool:
        """Whether the modules' parameters are still in the block, and their forward passes have not been replaced."""
        if any("forward" in vars(linear) for linear in self.linears):
            return False
        parameters = ((owner[name], address) for owner, name, address in self._addresses)
        return all(p is not None and p.data_ptr() == address for p, address in parameters)

    def forwards(self) -> list[tuple[nn.Linear, Callable[[Tensor], Tensor | None]]]:
        """The modules, each with the function that returns its piece of the product."""
        return [(linear, partial(self._piece, index)) for index, linear in enumerate(self.linears)]

    def forget(self) -> None:
        """Drop pieces that no module has asked for."""
        self._ready = (None, [])

    def _piece(self, index: int, x: Tensor) -> Tensor | None:
        if torch.is_grad_enabled():
            return None
        if index == 0 and x.numel() <= _MOST_TOKENS * x.shape[-1]:
            self._ready = (x, list(self._multiply(x)))
        source, pieces = self._ready
        if source is not x:
            return None
        # Returned once: a second call may come with other values in the same tensor.
        piece, pieces[index] = pieces[index], None
        if all(left is None for left in pieces):
            self.forget()
        return piece

    def _multiply(self, x: Tensor) -> Sequence[Tensor]:
        if x.shape[0] > 1 and self.bias is None and len(set(self.sizes)) == 1:
            # In one product of several rows the pieces would not be contiguous, and kernels that need that would copy
            # them. Maps of one size make a batch of products, whose results are contiguous.
            weights = self.weight.unflatten(0, (len(self.sizes), -1))
            rows = x.flatten(0, -2).expand(len(self.sizes), -1, -1)
            return torch.bmm(rows, weights.mT).unflatten(1, x.shape[:-1]).unbind()
        return F.linear(x, self.weight, self.bias).split(self.sizes, dim=-1)


def _merging_candidates(layer: nn.Module) -> list[nn.Linear]:
    """The plain linear maps that a layer applies to its input."""
    # Of the class: modules of other libraries have submodules of this name.
    names = getattr(type(layer), "input_projections", None) or joint_maps(type(layer))
    maps = (getattr(layer, name, None) for name in names)
    first = (x[0] if isinstance(x, nn.Sequential) else x for x in maps)  # of the two halves of a low-rank map
    return [x for x in first if type(x) is nn.Linear and is_plain(x)]


def is_plain(linear: nn.Linear) -> bool:
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
    """Whether its storage holds nothing else (as an optimiser's flat buffer does) and no other process shares it."""
    return x.untyped_storage().nbytes() == x.nbytes and (x.is_cuda or not x.is_shared())


_products: WeakValueDictionary[tuple[int, ...], JointProduct] = WeakValueDictionary()
"""By the identities of their maps. Captured steps rely on the addresses of weights, so a product in use is shared."""


def _joint_product(linears: Sequence[nn.Linear]) -> JointProduct:
    """The product of these maps that is already in use, or a new one."""
    key = tuple(map(id, linears))
    product = _products.get(key)
    if product is None or not product.is_current():
        product = _products[key] = JointProduct(linears)
    return product


def _in_one_block(parameters: Sequence[Tensor]) -> Tensor:
    """Stack tensors along their first axis, and make the parameters among them parts of the result."""
    # Tensors made in inference mode could never be trained again.
    with torch.inference_mode(False), torch.no_grad():
        block = torch.cat([p.detach() for p in parameters])
        for parameter, part in zip(parameters, block.split([len(p) for p in parameters]), strict=True):
            # For torch a storage of its own. It is the same memory, which it keeps alive.
            if isinstance(parameter, nn.Parameter):
                parameter.data = from_dlpack(to_dlpack(part))
    return block
