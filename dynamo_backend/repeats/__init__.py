"""Layers that repeat: a few of them are compiled, and the program is written out, or rolled into a loop, for all."""
