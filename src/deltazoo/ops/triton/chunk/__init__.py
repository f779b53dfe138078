"""Kernels for whole sequences, 64 tokens at a time, and the device functions that they share."""
