"""Tensor functions: what one kernel computes, as stages, as text, as a table, and lowered to loops."""
