"""Products, distances and factors of matrices, and torch's own attention."""
