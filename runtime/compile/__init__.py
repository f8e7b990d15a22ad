"""Kernels as bytes: compiled for a target, kept by key, loaded, or replaced by ATen ops."""
