"""Regions of symbolic sizes: conditions that tell them apart, the proof that they cover, and which are worth it."""
