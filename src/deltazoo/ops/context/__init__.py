"""One sequence over many ranks: each computes on its piece of the tokens, and states travel between them.

A piece is cut into segments. A segment takes the state S that enters it to `M S + X`: M is the product of its tokens'
transitions, X the state that it leaves from zero. Ranks exchange such pairs (M, X), fold them into the state that
enters each segment, and compute outputs from there. In the backward pass the gradients of states travel the other way,
through the transposed M.

`group` describes the ranks and their pieces, `pieces` the places of segments, `fold` is the fold and its exchange,
`product` its products, `rule` the operator, `backends` the computation on segments, and `exchange` passes tokens of
other ranks to convolutions and softmax attention.
"""
