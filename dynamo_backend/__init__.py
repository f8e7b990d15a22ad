"""Torch in, callable out: the entry point of `torch.compile(backend="mlc")`, AOTAutograd, the import of ATen graphs.

The top of the house: it may import every other room, and none imports it.
"""
