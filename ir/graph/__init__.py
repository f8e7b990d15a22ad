"""Graphs of tensor functions and library calls, and what is asked of their calls."""
