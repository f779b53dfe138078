"""Kernels for Hopper (compute capability 9.0) in Gluon; `plan.OBSTACLES` has the calls that they do not take."""
