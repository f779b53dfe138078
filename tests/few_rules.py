"""The few rules between which every path through shared code lies, and what is tested on them alone.

What a rule's own code can break is tested on every registered rule, in as few calls as show it: its equation, its
parameters and gates, `deltazoo check` (a token's results come from that token alone, decoding equals training, padded
and packed equal alone, the gradients are right, what was saved loads again), and that its state stays bounded.

All other code is shared: projections, convolutions, chunks, states, caches, models, shares of ranks. It sees of a
rule what its spec says and which methods of the layer it overrides. So the many cases of such a test (every split,
every kind of padding, every way to pack) run on `FEW_RULES`. Between them they have every choice in a spec and every
overridden method; rules/test_few_rules.py says which is missing.
"""

FEW_RULES = [
    "linear_attention",  # no correction term: another operator, no step size, nothing normalised
    "neg_delta_net",  # no decay, no output gate, step sizes up to 2
    "gated_deltanet",  # decay per head, full output gate, values wider than keys
    "kda",  # decay per channel, gates of low rank, one with a bias
    "efla",  # keys of any length
    "eda",  # two steps per token, made by a layer of its own; another decay gate
    "gated_deltanet2",  # a separate erase key, gates per channel
    "comba_unit_erase",  # reads before the decay, normalises queries and keys itself
    "pkda",  # a further state
    "diagonal_kdn",  # a gate that is no step size; as many key heads for the operator as value heads
    "momentum",  # an operator with more key channels than the layer's heads
    "gla",  # a decay gate with parameters of its own
]
