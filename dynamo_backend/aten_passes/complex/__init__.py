"""Complex numbers as their parts."""
