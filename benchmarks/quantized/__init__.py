"""Quantized layers: how fast they are beside others, and what rounding costs a model that was trained."""
