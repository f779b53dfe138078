"""Benchmarks of the operators: what is timed, how, against whom, and what the hardware would allow.

`suite` runs the contestants of `contestants` on the inputs of `inputs` with a stopwatch from `stopwatch` and writes
`results`; `page` and `plots` turn result files into a page. `selfcheck` asks a different question: are the kernels
right on this machine?
"""
