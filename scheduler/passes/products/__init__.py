"""Passes over products of matrices: which become loops, and which are computed where they are read."""
