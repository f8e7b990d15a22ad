"""Layers that repeat: a few of them are planned, and one of those becomes a region that is called for all."""
