"""The kernels of a captured decoding step. `deltazoo.generation` alone uses them, importing them inside functions:
Triton may be missing.

`rule` computes every rule for one token; `low_rank_maps` and `scaled_keys` compute its inputs besides queries, keys and
values. `product` is a product for one row with its neighbours; `row_product` is a product for several rows, in parts,
which `convolution` and `between_products` add up. `greedy_token` chooses the token, and `gumbel_scores` turns its
choice into a draw. `launch_ahead` lets a kernel start before the kernel in front of it has ended.
"""
