"""The operator as Triton kernels. Everything outside imports this package where it needs it, inside a function."""
