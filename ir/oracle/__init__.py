"""The oracle: what the IR means, computed by NumPy."""
