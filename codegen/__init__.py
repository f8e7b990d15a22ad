"""Scheduled loops to target text: Triton source for GPUs, LLVM IR for CPUs, and the host program that calls them.

Imports `torch_mlc.ir` alone: it knows nothing of how a nest came by its schedule.
"""
