"""Reductions, norms, softmax and losses."""
