"""Loops of a program: where they begin and end, which iterations need no mask, and what they carry."""
