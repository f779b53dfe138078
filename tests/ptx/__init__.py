"""A model of one CUDA thread block that runs the PTX Triton makes, to judge compiled kernels where there is no GPU."""
