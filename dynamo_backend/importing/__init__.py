"""ATen graphs into graphs of the IR."""
