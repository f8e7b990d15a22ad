"""Whole programs of a graph: built with other decisions, run in a process of their own, and raced."""
