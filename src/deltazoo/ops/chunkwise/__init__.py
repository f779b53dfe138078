"""The chunk form in plain torch: `form` computes with it, over chunks of `tokens` with the factors of `decay`."""
