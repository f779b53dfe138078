"""The GPU kernels. Triton is imported by the modules here and nowhere else."""
