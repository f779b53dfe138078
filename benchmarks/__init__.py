"""Benchmarks, run from a checkout: `python -m benchmarks.operators --out FILE`, and so on for every module.

`tables` prints a result file as Markdown; `results/` holds the files that the pages quote.
"""
