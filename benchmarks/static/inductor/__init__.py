"""Inductor's kernels for a GPU that is not here: written by Inductor itself, compiled by Triton, read by our model."""
