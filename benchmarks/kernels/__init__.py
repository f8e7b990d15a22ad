"""Fused patterns as small functions, each at an aligned and an odd size."""
