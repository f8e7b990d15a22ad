"""Fusion: which nodes of a graph share a kernel."""
