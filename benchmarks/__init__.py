"""Benchmarks: the operators (`operator_*`) and whole models (`model_*`) timed beside their peers.

A suite times its candidates and writes results; a page and its plots are made from result files alone. `lower_bound` is
the least time the hardware allows, `targets` what the kernels are meant to reach. `selfcheck` compares the kernels with
float64 on this machine.
"""
