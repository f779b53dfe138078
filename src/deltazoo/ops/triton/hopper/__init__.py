"""Kernels for Hopper (compute capability 9.0) in Gluon, for the calls that `served_calls` tells."""
