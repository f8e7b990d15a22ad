"""Primitives that rewrite loops: their extents, their order, and what they become on the machine."""
