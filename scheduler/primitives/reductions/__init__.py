"""Primitives that rewrite reductions: split, joined, or made online."""
