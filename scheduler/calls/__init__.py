"""The calls of a fused graph: merged side by side, written in place, and put in order."""
