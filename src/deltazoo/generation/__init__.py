"""Generation: the decoding loop of `deltazoo.generate`, captured steps for `model.generate`, and the cache of states.

`Decoder` and `generate` run a prompt in pieces and then steps that include the sampling, on a GPU from one CUDA graph.
"""

from deltazoo.generation.decoder import Decoder, generate
from deltazoo.generation.sampling import Sampling

__all__ = ["Decoder", "Sampling", "generate"]
