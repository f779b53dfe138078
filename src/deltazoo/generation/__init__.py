"""A decoding loop of our own: the prompt in pieces, then steps with the sampling inside, on a GPU from one graph."""

from deltazoo.generation.decoder import Decoder, generate
from deltazoo.generation.sampling import Sampling

__all__ = ["Decoder", "Sampling", "generate"]
