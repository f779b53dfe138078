"""Kernels for Hopper (compute capability 9.0) in Gluon; `served_calls` says for which calls."""
