"""The host program: what runs between the kernels of one graph."""
