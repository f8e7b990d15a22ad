"""Passes over reductions and scans: split, unrolled, shifted, or made online."""
