"""Kernels on GPUs: drivers, contexts, launches, and the capture of launches."""
