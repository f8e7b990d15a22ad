"""Reductions and scans: accumulators, and how they are joined."""
