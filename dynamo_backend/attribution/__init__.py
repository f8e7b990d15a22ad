"""Rounding attribution: which places of a model make a compiled output another than eager's, and by how much."""
