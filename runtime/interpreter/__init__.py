"""Kernels of GPUs that are not here, run by Triton's interpreter."""
