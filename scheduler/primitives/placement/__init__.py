"""Primitives that say where a block is computed."""
