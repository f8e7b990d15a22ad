"""Primitives that rewrite buffers: copies, layouts, scopes and padding."""
