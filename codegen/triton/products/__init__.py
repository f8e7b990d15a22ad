"""Matrix products in Triton: operands and how they are read, and what goes on with results."""
