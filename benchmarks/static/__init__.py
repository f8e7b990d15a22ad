"""The suite ``static``: what loops and machine code tell of kernels for a GPU that need not be here."""
