"""Kernels for Hopper (compute capability 9.0) in Gluon; `plan.OBSTACLES` says which calls they do not serve."""
